"""Replaces the GPU and everything that the real miner reaches over the network, by swapping modules
and boto3's endpoint."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import json
import os
import sys
import threading
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miner_guard.validators.checkout import StandIns

_REPLACED = {
    "bittensor": "chain",
    "distributed_training.base.neuron": "neuron",
    "distributed_training.data.dataset": "dataset",
    "distributed_training.utils.state_loader": "state_loader",
    "distributed_training.utils.misc": "misc",
    "distributed_training.utils.logger": "misc",
}
"""The miner's modules, each with the module in this package that replaces it."""

_ABSENT = (
    "hivemind",
    "huggingface_hub",
    "transformers",
    "influxdb_client",
    "wandb",
    "datasets",
    "speedtest",
    "pandas",
    "dotenv",
    "openskill",
    "nest_asyncio",
    "pytz",
    "distributed_training.averaging",
    "distributed_training.utils.config",
    "distributed_training.utils.uids",
)
"""Modules that the miner imports but that neither uploads nor steps use."""

UPLOAD_STEPS = 5
"""Inner steps from one upload to the next."""

MICRO_BATCHES = 2
"""Per rank and inner step."""


@dataclass(frozen=True)
class World:
    """The settings that the starting command passes to the fakes."""

    folder: Path
    """Where the fakes write their logs."""

    endpoint: str
    """The S3 server's endpoint, with `{account}`."""

    uploads: int
    """After how many uploads the miner stops."""

    def log(self, name: str, line: object) -> None:
        """Append a line to a log; every process of the miner writes into the same files."""
        with _writing, (self.folder / f"{name}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def call(self, what: str, *arguments: object) -> None:
        """Log a call that would have left the machine."""
        self.log("calls", [what, *map(str, arguments)])


_writing = threading.Lock()


def current() -> World:
    """The world of this process."""
    given = json.loads(os.environ["MINER_WORLD"])
    return World(Path(given["folder"]), given["endpoint"], given["uploads"])


class _Replaced(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads a module of this package under the name of the miner module it replaces."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        return importlib.machinery.ModuleSpec(name, self) if name in _REPLACED else None

    def create_module(self, spec: Any) -> types.ModuleType | None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        ours = importlib.import_module(f"tests.truth.miner.{_REPLACED[module.__name__]}")
        known = {
            k: v for k, v in vars(ours).items() if not k.startswith("__") or k == "__getattr__"
        }
        vars(module).update(known)


def install() -> None:
    """Replace the network. Call this before the miner's script runs."""
    # Behind the guard's import hook, which watches some of these names; before the finder of files.
    last = next(i for i, f in enumerate(sys.meta_path) if f is importlib.machinery.PathFinder)
    sys.meta_path[last:last] = [_Replaced(), StandIns(_ABSENT)]
    _redirect_s3(current().endpoint)


def _redirect_s3(endpoint: str) -> None:
    import boto3.session
    from botocore.config import Config

    client = boto3.session.Session.client
    worker = "upload_worker.py" in " ".join(sys.orig_argv)
    whose = Config(user_agent_extra=f"by/{'worker' if worker else os.environ['LOCAL_RANK']}")

    def local(self: Any, service_name: str, *args: Any, **kwargs: Any) -> Any:
        account = str(kwargs.pop("endpoint_url")).removeprefix("https://").partition(".r2.")[0]
        where, given = endpoint.format(account=account), kwargs.pop("config", None)
        kwargs["config"] = whose if given is None else given.merge(whose)
        return client(self, service_name, *args, endpoint_url=where, **kwargs)

    setattr(boto3.session.Session, "client", local)  # noqa: B010 - mypy takes no assigned method
