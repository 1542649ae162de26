"""Replaces bittensor: a chain whose block number never advances."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from miner_guard.validators import states
from tests.truth.miner import world

MASTER = "5Fmaster"
HOTKEY = "5Fminer"


class _Logging:
    """bittensor's logger: each line goes to the world's log, with its rank and thread; rank 0 also
    prints it."""

    def _line(self, *words: object, **_: object) -> None:
        import os
        import threading

        text = " ".join(map(str, words))
        rank, thread = os.environ.get("LOCAL_RANK", "0"), threading.current_thread().name
        world.current().log("lines", [rank, thread, text])
        if rank == "0":
            print(text, flush=True)

    info = debug = warning = error = trace = success = _line

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


logging = _Logging()


class Synapse:
    """A message between validators and miners."""

    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)


class axon:
    """The miner's server for validators."""

    def __init__(self, **_: Any) -> None:
        world.current().call("axon")

    def __str__(self) -> str:
        return "axon"

    port = 8091

    def attach(self, **functions: Any) -> axon:
        world.current().call("axon.attach", functions["forward_fn"].__name__)
        return self

    def serve(self, **_: Any) -> axon:
        world.current().call("axon.serve")
        return self

    def start(self) -> axon:
        world.current().call("axon.start")
        return self

    def stop(self) -> axon:
        world.current().call("axon.stop")
        return self


class Subtensor:
    """The chain."""

    chain_endpoint = "local"

    def get_current_block(self) -> int:
        return states.BLOCK

    def commit(self, _: Any, netuid: int, text: str) -> None:
        world.current().call("commit", netuid, len(text))


class Metagraph:
    """The subnet's members."""

    def __init__(self) -> None:
        import torch

        self.hotkeys = [MASTER, *["5Fother"] * (states.UID - 1), HOTKEY]
        self.axons = [SimpleNamespace(hotkey=key) for key in self.hotkeys]
        self.block = torch.tensor(states.BLOCK)

    def __getattr__(self, name: str) -> Any:
        import torch

        if name.startswith("__"):
            raise AttributeError(name)
        return torch.zeros(states.UID + 1)
