"""Takes the verdicts of subnet 38's real validator on the states, from a checkout of its code.

    python -m tests.truth.take_verdicts CHECKOUT STATES.jsonl [-o OUT.jsonl] [--only WORDS]

CHECKOUT is a clone of dstrbtd/DistributedTraining at the version to test; none of it is part of
this project. The command imports and calls the validator's own functions: `map_uid_to_peerid` reads
the commitment, `benchmark_uids` judges the age, `score_uids` scores the gradient. Empty stand-ins
replace the imports that do not affect a verdict (bittensor, hivemind, transformers, …); a small
model, a local server and a frozen clock replace the real model, storage and clock. Needs torch,
numpy, pydantic, boto3, moto[server], filelock, tqdm and einops.

Each line of OUT is the line from STATES with `real` added. For each version, `real` says whether
the validator `accepts` the state (valid and scored), what scoring it is `worth` (something,
nothing, nan), the `epoch` scored, whether it is `valid` and `scored`, and whether it is `picked`
for evaluation.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime as dt
import importlib
import inspect
import json
import logging
import math
import os
import sys
import tempfile
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from tests.truth import states
from tests.truth.server import Server
from tests.truth.stand_ins import StandIns

VALIDATOR_UID, MASTER_UID = 1, 0
_HOTKEY = "5Fminer"


_OWN = ["base", "averaging", "data", "protocol"]
_UTILS = ["config", "misc", "state_loader", "chain", "dendrite", "logger", "dist", "weight_utils"]
_STANDING_IN = tuple(
    f"distributed_training.{name}" for name in [*_OWN, *(f"utils.{name}" for name in _UTILS)]
)
"""Parts of the validator that play no role in any verdict."""

_ABSENT = (
    *("bittensor", "hivemind", "transformers", "huggingface_hub", "influxdb_client", "wandb"),
    *("datasets", "base58", "pytz", "openskill", "nest_asyncio"),
)
"""Modules that the validator imports but that are too heavy, or not needed, here."""


class TinyModel(torch.nn.Module):
    """Enough of a Llama (SiLU, RMSNorm) for the loss to depend on each parameter."""

    def __init__(self) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(7)
        for name, shape in states.SHAPES.items():
            start = (
                torch.ones(shape)
                if name.startswith("norm")
                else 0.1 * torch.randn(shape, generator=g)
            )
            setattr(self, name, torch.nn.Parameter(start))
        self.config = types.SimpleNamespace(block_list=[])

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def forward(self, input_ids: Any, labels: Any) -> Any:
        hidden = F.embedding(input_ids, self.embed_weight)
        hidden = hidden + F.silu(hidden @ self.layer_weight)
        hidden = (
            hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6) * self.norm_weight
        )
        logits = hidden @ self.head_weight.T
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return types.SimpleNamespace(loss=loss)


class _Pages:
    """The data set: batches drawn by block and uid, in place of the real loader."""

    def __init__(self, seed: int) -> None:
        g = torch.Generator().manual_seed(seed % 2**31)
        self._batches = [torch.randint(0, 256, (2, 33), generator=g) for _ in range(2)]

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return iter([(batch, batch) for batch in self._batches])


class _OfDatetime(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, dt.datetime)


class _Clock(metaclass=_OfDatetime):
    """Replaces `datetime`, which validators use to get the time and in `isinstance` checks."""

    @staticmethod
    def now(tz: Any = None) -> Any:
        return dt.datetime.fromtimestamp(states.NOW, tz)


class Validator:
    """The real functions, and their environment."""

    def __init__(self, checkout: Path, server: Server) -> None:
        sys.path.insert(0, str(checkout))
        sys.meta_path.insert(0, StandIns(_STANDING_IN + _ABSENT))
        for package in ("distributed_training.validator", "distributed_training.utils"):
            bare = types.ModuleType(package)
            bare.__path__ = [str(checkout / package.replace(".", "/"))]
            sys.modules[package] = bare
        self.server = server
        self.package = importlib.import_module("distributed_training")
        self.reward = importlib.import_module("distributed_training.validator.reward")
        self.uids = importlib.import_module("distributed_training.utils.uids")
        self.progress = importlib.import_module("distributed_training.utils.progress_tracker")
        self.compression = importlib.import_module("distributed_training.utils.compression")
        self.neuron = importlib.import_module("neurons.validator").Validator
        self.version = str(self.package.__version__)
        # They import it from a module that a stand-in replaces, and the stand-in gets it from here.
        setattr(self.uids, "get_progress", self.progress.get_progress)  # noqa: B010
        self._stand_still()

    def _stand_still(self) -> None:
        tensor = torch.tensor

        def on_cpu(*args: Any, **kwargs: Any) -> Any:
            return tensor(*args, **{k: v for k, v in kwargs.items() if k != "device"})

        # They hard-code "cuda"; the numbers are the same here.
        torch.tensor = on_cpu
        setattr(self.reward, "datetime", _Clock)  # noqa: B010 - mypy takes no assignment to a module
        setattr(self.reward, "fetch_training_data", self._training_data)  # noqa: B010
        setattr(self.reward, "cleanup_old_cache", lambda *_: None)  # noqa: B010
        setattr(self.uids, "decode_metadata", lambda key, value: (_HOTKEY, value["text"]))  # noqa: B010

    async def _training_data(self, _: Any, block: int, uid: int, n_pages: int) -> _Pages:
        # Draws its pages like the real one: the generator accepts only whole numbers.
        import numpy

        generator = numpy.random.default_rng(hash(uid) & 0xFFFFFFFF)
        generator.bit_generator.advance(block)
        return _Pages(int(generator.integers(0, 2**31)))

    def ask(self, state: states.State) -> dict[str, Any]:
        """The verdict on one state."""
        self.server.set(state)
        with tempfile.TemporaryDirectory() as folder:
            before = Path.cwd()
            os.chdir(folder)
            try:
                return self._asked(self._around(state), state)
            finally:
                os.chdir(before)

    def _asked(self, me: Any, state: states.State) -> dict[str, Any]:
        value = {"text": state.commitment, "block": states.BLOCK - 1000}
        found = [] if state.commitment is None else [("key", types.SimpleNamespace(value=value))]
        self.uids.bt.subtensor = lambda **_: types.SimpleNamespace(
            substrate=types.SimpleNamespace(query_map=lambda **_: found)
        )
        self.uids.map_uid_to_peerid(me)
        half = state.blocks_per_allreduce / 2
        early = state.blocks_since_allreduce < half and state.network_epoch != 0
        epoch = state.network_epoch - 1 if early else state.network_epoch
        me.local_progress.epoch = epoch
        picked = _called(self.uids.get_next_uids_manual, me, epoch=epoch)
        self.reward.benchmark_uids(me)
        tracker = me.uid_tracker[states.UID]
        asyncio.run(_called(self.reward.score_uids, me, epoch=epoch, uids=[states.UID]))
        scored, scores = me.scored, [tracker.train.random, tracker.train.assigned]
        changes = [part.absolute for part in scores]
        worth = "nothing"
        if any(math.isnan(change) for change in changes):
            worth = "nan"
        elif any(change != 0 for change in changes):
            worth = "something"
        return {
            "accepts": bool(scored and tracker.train.is_valid),
            "worth": worth,
            "epoch": epoch,
            "valid": bool(tracker.train.is_valid),
            "scored": scored,
            "picked": states.UID in (picked or []),
        }

    def _around(self, state: states.State) -> Any:
        """The `self` of the real functions: their own update, and minimal versions of everything
        else."""
        boto3 = importlib.import_module("boto3")
        model = TinyModel()
        full = {name: p.detach() for name, p in model.named_parameters()}
        transformer = self.compression.TransformDCT(full, target_chunk=64)
        compressor = self.compression.CompressDCT(
            use_quantization=True, quantization_bins=256, quantization_range=6
        )
        shapes, totals = {}, {}
        for name, p in full.items():
            encoded = transformer.encode(torch.zeros_like(p), use_dct=False)
            _, _, shapes[name], totals[name] = compressor.compress(encoded, 32)
        neuron = types.SimpleNamespace(
            global_model_name=states.MODEL,
            blocks_per_allreduce=state.blocks_per_allreduce,
            use_dct=False,
            sample_size=25,
        )
        keys = types.SimpleNamespace(access_key_id="v" * 32, secret_access_key="v" * 64)
        r2 = types.SimpleNamespace(account_id="v" * 32, read=keys)
        usual = getattr(self.reward, "MAX_UPLOAD_INTERVAL", 2400)
        return _Around(
            config=types.SimpleNamespace(neuron=neuron, netuid=38, r2=r2),
            logger=_Notes(),
            uid=VALIDATOR_UID,
            master_uid=MASTER_UID,
            master=True,
            world_size=1,
            local_rank=0,
            gloo_group=None,
            device="cpu",
            model=model,
            transformer=transformer,
            compressor=compressor,
            xshapes=shapes,
            totalks=totals,
            learning_rate_eval=0.5,
            outer_optimizer=types.SimpleNamespace(param_groups=[{"lr": 0.7}]),
            current_block=state.block,
            blocks_since_allreduce=state.blocks_since_allreduce,
            set_current_block_across_ranks=lambda: None,
            uid_tracker={states.UID: self.progress.UidTracker(uid=states.UID)},
            max_upload_interval=state.max_upload_interval or usual,
            global_progress=types.SimpleNamespace(epoch=state.network_epoch),
            local_progress=types.SimpleNamespace(),
            metagraph=types.SimpleNamespace(
                hotkeys=[_HOTKEY], uids=torch.tensor([states.UID]), n=1
            ),
            session=_Session(boto3.Session(), self.server.endpoint),
            update=self.neuron.update_model_with_pseudo_gradient,
        )


def _called(function: Callable[..., Any], me: Any, **known: Any) -> Any:
    """Call the function with the arguments that its version takes: 1.2.1 has no `epoch`."""
    takes = inspect.signature(function).parameters
    return function(me, **{name: value for name, value in known.items() if name in takes})


class _Around(types.SimpleNamespace):
    def update_model_with_pseudo_gradient(self, **given: Any) -> None:
        self.update(self, **given)

    @property
    def scored(self) -> bool:
        return any("Score status 1" in line for line in self.logger.lines)


class _Notes:
    """The logger: it keeps its messages, because a caught exception appears nowhere else."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def _keep(self, *words: Any) -> None:
        self.lines.append(" ".join(map(str, words)))

    info = debug = warning = error = trace = _keep


class _Session:
    """boto3's session, with the local server in place of R2."""

    def __init__(self, session: Any, endpoint: str) -> None:
        self._session, self._endpoint = session, endpoint

    def client(self, service: str, endpoint_url: str, **kwargs: Any) -> Any:
        account = endpoint_url.removeprefix("https://").partition(".r2.")[0]
        from botocore.config import Config

        quick = Config(retries={"max_attempts": 1}, s3={"addressing_style": "path"})
        where = self._endpoint.format(account=account)
        return self._session.client(service, endpoint_url=where, config=quick, **kwargs)


def main(arguments: Sequence[str] | None = None) -> None:
    """Ask the real validator about every state in a file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("checkout", type=Path)
    parser.add_argument("states", type=Path)
    parser.add_argument("-o", "--out", type=Path)
    parser.add_argument("--only", default="", help="states with these words in their name or group")
    parser.add_argument("--verbose", action="store_true", help="what the validator said of each")
    given = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    validator = Validator(given.checkout.resolve(), Server())
    taken = []
    for line in states.lines(given.states):
        if given.only not in f"{line['group']} {line['case']}":
            continue
        verdict = validator.ask(states.build(line))
        taken.append({**line, "real": {**line.get("real", {}), validator.version: verdict}})
        print(_outcome(line, verdict), flush=True)
    if given.out is not None:
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in taken)
        given.out.write_text(text, encoding="utf-8")


def _outcome(line: Mapping[str, Any], verdict: Mapping[str, Any]) -> str:
    word = "accepts" if verdict["accepts"] else "rejects"
    return f"{word} {verdict['worth']:<9} {line['group']}: {line['case']}"


if __name__ == "__main__":
    main()
