"""Asks subnet 38's own validator, from a clone of its code, about what a miner publishes.

`ask` starts the child, `python -m miner_guard.validators.checkout`: limited in memory and CPU time,
without sockets, and with no code of the clone but the functions that judge a miner.
`map_uid_to_peerid` reads the commitment, `benchmark_uids` the files' age, `get_next_uids_manual`
picks whom to score, and `score_uids` loads the gradients (`weights_only=True`), applies them to a
model and computes the loss. Empty modules stand in for imports that no verdict depends on
(bittensor, hivemind, transformers, …); a model of the recorded shapes, random tokens and a
stopped clock replace the real model, the data set and the time.
"""

from __future__ import annotations

import asyncio
import copy
import datetime as dt
import email.utils
import hashlib
import importlib
import importlib.abc
import importlib.machinery
import inspect
import io
import logging
import math
import os
import re
import subprocess
import sys
import tempfile
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miner_guard.record.redaction import without_secrets
from miner_guard.record.words import counted
from miner_guard.system import probe
from miner_guard.validators.inspection import restrict

DEADLINE_S = 1800.0
"""Deadline for one verdict: on the CPU, a model of 4 billion parameters takes minutes."""

_SPARE_BYTES = 4 * 1024**3
"""Memory for the child beyond torch, eight copies of the model and three of the gradients."""

NOW = 1_766_500_000.0
"""The time that the stopped clock shows."""

_VALIDATOR_UID, _MASTER_UID, _HOTKEY = -1, -2, "5Fminer"


@dataclass
class BucketState:
    """Everything that a verdict depends on."""

    network_epoch: int = 56
    blocks_per_allreduce: int = 400
    blocks_since_allreduce: int = 300
    block: int = 6_000_000
    max_upload_interval: int | None = None
    """Seconds; set if failed AllReduces have raised the limit."""

    age: float = 600.0
    """Age of all objects, in seconds."""

    commitment: str | None = None
    model: str = "llama-4b-ws-4"
    uid: int = 7
    bucket: str = "llama-4b-ws-4-007"
    account: str = ""
    """The id of the account that the bucket belongs to."""

    objects: MutableMapping[str, Any] = field(default_factory=dict)
    """By key: bytes, or the path of a file."""

    refuse: tuple[str, ...] = ()
    """Keys that the storage answers with 400: encrypted with a customer's key."""

    good_keys: tuple[str, ...] = ()
    """The read key ids that open the bucket."""

    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)


# the storage


class Refusal(Exception):
    """What the storage answers in place of an object, as boto3 raises it."""

    def __init__(self, code: str, status: int) -> None:
        super().__init__(code)
        metadata = {"HTTPStatusCode": status}
        self.response = {"Error": {"Code": code}, "ResponseMetadata": metadata}


class Storage:
    """In place of boto3's client: the buckets of one account, of which one holds the state's
    objects."""

    def __init__(self, state: BucketState, endpoint: str, key_id: str | None) -> None:
        self._state, self._key_id = state, key_id
        self._account = endpoint.removeprefix("https://").partition(".r2.")[0]

    def head_object(self, Bucket: str, Key: str) -> dict[str, Any]:
        """The object's age, size and checksum. Raises Refusal."""
        content, state = self._content_of(Bucket, Key), self._state
        # Storage reports whole seconds.
        changed = dt.datetime.fromtimestamp(math.floor(NOW - state.age), dt.timezone.utc)
        size = content.stat().st_size if isinstance(content, Path) else len(content)
        headers = {"date": email.utils.formatdate(NOW, usegmt=True)}
        digest = hashlib.md5(Key.encode(), usedforsecurity=False).hexdigest()
        answer = {"LastModified": changed, "ContentLength": size, "ETag": f'"{digest}"'}
        return {**answer, "ResponseMetadata": {"HTTPHeaders": headers}}

    def get_object(self, Bucket: str, Key: str) -> dict[str, Any]:
        """The object. Raises Refusal."""
        content = self._content_of(Bucket, Key)
        body = content.open("rb") if isinstance(content, Path) else io.BytesIO(content)
        return {**self.head_object(Bucket, Key), "Body": body}

    def download_file(self, bucket: str, key: str, path: str) -> None:
        """Save the object, or a link to it, as `path`. Raises Refusal."""
        content, target = self._content_of(bucket, key), Path(path)
        target.unlink(missing_ok=True)
        if isinstance(content, Path):
            target.symlink_to(content)
        else:
            target.write_bytes(content)

    def _content_of(self, bucket: str, key: str) -> bytes | Path:
        state = self._state
        if self._account != state.account or bucket != state.bucket:
            raise Refusal("NoSuchBucket", 404)
        if self._key_id not in state.good_keys:
            raise Refusal("AccessDenied", 403)
        if key in state.refuse:
            raise Refusal("InvalidRequest", 400)
        if key not in state.objects:
            raise Refusal("NoSuchKey", 404)
        content: bytes | Path = state.objects[key]
        return content


# what stands in for the rest


class _Anything(type):
    """A class that has every attribute and can be called, indexed and inherited from, as can its
    instances."""

    def __getattr__(cls, name: str) -> Any:
        return _anything(name)

    def __getitem__(cls, item: Any) -> Any:
        return cls


def _anything(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    if name.endswith(("Error", "Exception")):
        # Validators catch these.
        return type(name, (Exception,), {})
    permissive = {
        "__init__": lambda *_, **__: None,
        "__getattr__": lambda _, attribute: _anything(attribute)(),
        "__call__": lambda *_, **__: _anything(name)(),
    }
    return _Anything(name, (), permissive)


_ABSENT = (
    *("bittensor", "hivemind", "transformers", "huggingface_hub", "influxdb_client", "wandb"),
    *("datasets", "base58", "pytz", "openskill", "nest_asyncio"),
    *(f"distributed_training.{name}" for name in ("base", "averaging", "data", "protocol")),
    *(f"distributed_training.utils.{name}" for name in ("config", "misc", "state_loader", "chain")),
    *(f"distributed_training.utils.{name}" for name in ("dendrite", "logger", "dist")),
    "distributed_training.utils.weight_utils",
)
"""Modules that validators import and that no verdict depends on."""


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Provides an empty module for each absent name, and for all names below it."""

    def __init__(self, absent: Sequence[str]) -> None:
        self._absent = absent

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """The module if its name is one of this finder's."""
        if not any(name == absent or name.startswith(absent + ".") for absent in self._absent):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        """An empty module that has every attribute."""
        module = types.ModuleType(spec.name)
        module.__path__ = []
        setattr(module, "__getattr__", _anything)  # noqa: B010 - mypy takes no assignment to a method
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Runs nothing."""


class _OfDatetime(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, dt.datetime)


class _Clock(metaclass=_OfDatetime):
    """Replaces `datetime`, which validators use to get the time and in `isinstance` checks."""

    @staticmethod
    def now(tz: Any = None) -> Any:
        return dt.datetime.fromtimestamp(NOW, tz)


def model_of(torch: Any, shapes: Mapping[str, Sequence[int]]) -> Any:
    """A model of these parameters, with random weights: each matrix acts on the hidden state where
    its width fits, matrices that lead elsewhere and back are gated, and vectors scale the
    normalised state, so that the loss depends on each."""
    functional, rng = torch.nn.functional, torch.Generator().manual_seed(7)

    class StandInModel(torch.nn.Module):  # type: ignore[misc] # torch has its type only once imported
        device = torch.device("cpu")
        config = types.SimpleNamespace(block_list=[])

        def forward(self, input_ids: Any, labels: Any) -> Any:
            first, *inner, last = self.parameters()
            hidden, wide = functional.embedding(input_ids, first), None
            for weight in inner:
                width = hidden.shape[-1]
                if weight.dim() == 1 and len(weight) == width:
                    scale = torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6)
                    hidden = hidden * scale * weight
                elif weight.dim() == 2 and tuple(weight.shape) == (width, width):
                    hidden = hidden + functional.silu(hidden @ weight.T)
                elif weight.dim() == 2 and weight.shape[1] == width:
                    out = hidden @ weight.T
                    if wide is not None and wide.shape == out.shape:
                        out = functional.silu(wide) * out
                    elif wide is not None:
                        hidden = hidden + wide.mean(-1, keepdim=True)
                    wide = out
                elif weight.dim() == 2 and wide is not None and weight.shape[1] == wide.shape[-1]:
                    hidden, wide = hidden + wide @ weight.T, None
                else:
                    hidden = hidden + weight.mean()
            if wide is not None:
                hidden = hidden + wide.mean(-1, keepdim=True)
            logits = hidden @ last.T if last.dim() == 2 else (hidden * last) @ first.T
            loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            return types.SimpleNamespace(loss=loss)

    model = StandInModel()
    for name, shape in shapes.items():
        *path, last = name.split(".")
        owner = model
        for part in path:
            if not hasattr(owner, part):
                owner.add_module(part, torch.nn.Module())
            owner = getattr(owner, part)
        one = len(shape) == 1
        start = torch.ones(shape) if one else torch.randn(shape, generator=rng) * shape[-1] ** -0.5
        owner.register_parameter(last, torch.nn.Parameter(start))
    return model


class _Notes:
    """The logger: it keeps its messages, because a caught exception appears nowhere else."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def _keep(self, *words: Any) -> None:
        self.lines.append(" ".join(map(str, words)))

    info = debug = warning = error = trace = _keep


# the validator


class Validator:
    """The functions of a clone, and their environment. For a process of its own: it replaces
    modules, and `torch.tensor`. Raises whatever importing the clone raises."""

    def __init__(self, checkout: Path) -> None:
        import torch

        self._torch, dist = torch, importlib.import_module("torch.distributed")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        sys.path.insert(0, str(checkout))
        sys.meta_path.insert(0, StandIns(_ABSENT))
        for package in ("distributed_training.validator", "distributed_training.utils"):
            # The package itself imports everything.
            bare = types.ModuleType(package)
            bare.__path__ = [str(checkout / package.replace(".", "/"))]
            sys.modules[package] = bare
        toplevel = importlib.import_module("distributed_training")
        names = ("validator.reward", "utils.uids", "utils.progress_tracker", "utils.compression")
        modules: list[Any] = [importlib.import_module(f"distributed_training.{n}") for n in names]
        self._reward, self._uids, self._tracker, self._compression = modules
        self._neuron: Any = importlib.import_module("neurons.validator").Validator
        self.version = str(toplevel.__version__)
        # Validators import it from a module that a stand-in replaces.
        self._uids.get_progress = self._tracker.get_progress
        self._uids.decode_metadata = lambda _, value: (_HOTKEY, value["text"])
        self._reward.datetime = _Clock
        self._reward.cleanup_old_cache = lambda *_: None
        if (state := getattr(self._reward, "get_model_state_dict", None)) is not None:
            # `cpu_offload` copies from a GPU; on a CPU it returns the model's own tensors, so that
            # going back to them would undo nothing, and the second evaluation apply twice.
            self._reward.get_model_state_dict = lambda *a, **k: copy.deepcopy(state(*a, **k))
        tensor = torch.tensor
        # Validators hard-code "cuda"; the numbers are the same here.
        torch.tensor = lambda *a, **k: tensor(*a, **{**k, "device": "cpu"})

    def ask(self, state: BucketState) -> dict[str, Any]:
        """The verdict: whether the validator `accepts` the state (it is fresh and scored), what the
        score is `worth` (something, nothing, nan), and `why` not."""
        with tempfile.TemporaryDirectory() as folder:
            before = Path.cwd()
            os.chdir(folder)
            try:
                return self._verdict(self._around(state), state)
            finally:
                os.chdir(before)

    def _verdict(self, me: Any, state: BucketState) -> dict[str, Any]:
        value = {"text": state.commitment, "block": state.block - 1000}
        commitments = (
            [] if state.commitment is None else [("key", types.SimpleNamespace(value=value))]
        )
        substrate = types.SimpleNamespace(query_map=lambda **_: commitments)
        self._uids.bt.subtensor = lambda **_: types.SimpleNamespace(substrate=substrate)
        self._uids.map_uid_to_peerid(me)
        early = state.blocks_since_allreduce < state.blocks_per_allreduce / 2
        epoch = state.network_epoch - (early and state.network_epoch != 0)
        me.local_progress.epoch = epoch
        _called(self._uids.get_next_uids_manual, me, epoch=epoch)
        self._reward.benchmark_uids(me)
        asyncio.run(_called(self._reward.score_uids, me, epoch=epoch, uids=[state.uid]))
        scored = any("Score status 1" in line for line in me.logger.lines)
        train = me.uid_tracker[state.uid].train
        changes = [train.random.absolute, train.assigned.absolute]
        score = "something" if any(changes) else "nothing"
        score = "nan" if any(map(math.isnan, changes)) else score
        return {
            "accepts": bool(scored and train.is_valid),
            "worth": score,
            "why": list(_why(me.logger.lines, state)),
        }

    def _around(self, state: BucketState) -> Any:
        """The `self` of the functions: its own update of the model, and the least of all else."""
        torch = self._torch
        reward, space = self._reward, types.SimpleNamespace
        model = model_of(torch, state.shapes)
        full = {name: p.detach() for name, p in model.named_parameters()}
        vocabulary = len(next(iter(full.values())))
        with torch.no_grad():
            tokens = torch.zeros(1, 2, dtype=torch.int64)
            if not math.isfinite(model(input_ids=tokens, labels=tokens).loss.item()):
                raise ValueError("the loss of the model that stands in for this one is not finite")

        async def pages(_: Any, block: int, uid: int, n_pages: int) -> list[Any]:
            # Draws like the real one: the generator accepts only whole numbers.
            import numpy

            generator = numpy.random.default_rng(hash(uid) & 0xFFFFFFFF)
            bits: Any = generator.bit_generator
            bits.advance(block)
            rng = torch.Generator().manual_seed(int(generator.integers(0, 2**31)))
            batches = [torch.randint(0, vocabulary, (2, 65), generator=rng) for _ in range(8)]
            return [(batch, batch) for batch in batches]

        reward.fetch_training_data = pages
        transformer = self._compression.TransformDCT(full, target_chunk=64)
        compressor = self._compression.CompressDCT(
            use_quantization=True, quantization_bins=256, quantization_range=6
        )
        shapes, totals = {}, {}
        for name, p in full.items():
            encoded = transformer.encode(torch.zeros_like(p), use_dct=False)
            _, _, shapes[name], totals[name] = compressor.compress(encoded, 32)
        keys = space(access_key_id="v" * 32, secret_access_key="v" * 64)
        me = space(
            config=space(
                neuron=space(
                    global_model_name=state.model,
                    blocks_per_allreduce=state.blocks_per_allreduce,
                    use_dct=False,
                    sample_size=25,
                ),
                netuid=38,
                r2=space(account_id="v" * 32, read=keys),
            ),
            logger=_Notes(),
            uid=_VALIDATOR_UID,
            master_uid=_MASTER_UID,
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
            outer_optimizer=space(param_groups=[{"lr": 0.7}]),
            current_block=state.block,
            blocks_since_allreduce=state.blocks_since_allreduce,
            set_current_block_across_ranks=lambda: None,
            uid_tracker={state.uid: self._tracker.UidTracker(uid=state.uid)},
            max_upload_interval=state.max_upload_interval
            or getattr(reward, "MAX_UPLOAD_INTERVAL", 2400),
            global_progress=space(epoch=state.network_epoch),
            local_progress=space(),
            metagraph=space(hotkeys=[_HOTKEY], uids=torch.tensor([state.uid]), n=1),
            session=space(
                client=lambda _, endpoint_url, aws_access_key_id, **__: Storage(
                    state, endpoint_url, aws_access_key_id
                )
            ),
        )
        update = self._neuron.update_model_with_pseudo_gradient
        me.update_model_with_pseudo_gradient = lambda **arguments: update(me, **arguments)
        return me


def _called(function: Callable[..., Any], me: Any, **arguments: Any) -> Any:
    """Call the function with the arguments that its version takes: 1.2.1 has no `epoch`."""
    takes = inspect.signature(function).parameters
    return function(me, **{name: value for name, value in arguments.items() if name in takes})


def _why(lines: Sequence[str], state: BucketState) -> Iterator[str]:
    """What the validator said about its refusals, without the commitment."""
    text = state.commitment or "x"
    for line in lines:
        if any(word in line for word in ("Error", "failed", "Failed to decode", "NaN")):
            for secret in filter(None, (text, text[64:], text[32:64], text[:32])):
                line = line.replace(secret, "…")
            yield line[:300]


# the child


def ask(checkout: Path, state: BucketState, deadline_s: float = DEADLINE_S) -> dict[str, Any]:
    """The `Validator`'s verdict on a state whose objects are files, with its `version` and
    `commit`; `reason` instead if there is none. Never raises."""
    described = {**vars(state), "objects": {k: str(v) for k, v in state.objects.items()}}
    request = {"checkout": str(checkout.resolve()), "state": described, "cpu_s": deadline_s}
    env = {**without_secrets(os.environ), "PYTHONDONTWRITEBYTECODE": "1"}
    answer = probe.ask("miner_guard.validators.checkout", request, deadline_s, env=env)
    if answer.reason is not None or not isinstance(answer.value, dict):
        return {"reason": answer.reason or "the checkout's validator returned no verdict"}
    return {**answer.value, "commit": commit_of(checkout)}


def commit_of(checkout: Path) -> str:
    """The clone's commit, with `-dirty` if files are changed; `unknown commit` if git has none."""
    return _git(checkout, "describe", "--always", "--dirty", "--exclude=*") or "unknown commit"


def version_of(checkout: Path, read_from: str) -> tuple[str, int] | None:
    """The clone's commit and date in words, with how far it is from the profile's commit and from
    upstream's last fetched one; and the number of commits since the profile's. None for a folder
    that is no clone with the commit that `read_from` names."""
    commit = re.search(r"at ([0-9a-f]{7,40})\b", read_from)
    since = commit and _git(checkout, "rev-list", "--count", f"{commit[1]}..HEAD")
    if commit is None or not since:
        return None
    words = [f"{commit_of(checkout)} of {_git(checkout, 'log', '-1', '--format=%cs')}"]
    if since != "0":
        words.append(f"{counted(int(since), 'commit')} after the profile's {commit[1]}")
    behind = _git(checkout, "rev-list", "--count", "HEAD..@{upstream}")
    words += [f"{behind} behind the last fetched upstream"] if behind not in ("", "0") else []
    return ", ".join(words), int(since)


def _git(folder: Path, *words: str) -> str:
    """What git prints about the folder; empty if it fails."""
    command = ["git", "-C", str(folder), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def confine() -> None:
    """Refuse this process every connection."""

    def refuse(name: str, _: Any) -> None:
        if name in ("socket.connect", "socket.getaddrinfo", "socket.sendto"):
            raise PermissionError("a validator that is asked for a verdict has no network")

    sys.addaudithook(refuse)


def load(checkout: Path) -> Validator:
    """The clone's validator. Raises ValueError with what is missing."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    try:
        return Validator(checkout)
    except ImportError as error:
        raise ValueError(f"{checkout}: {error}; use the miner's Python environment") from error
    except AttributeError as error:
        raise ValueError(
            f"{checkout}: {error}; the guard calls the validator's functions as of 1.2"
        ) from error


def main() -> None:
    """Answer the request on stdin."""
    request = probe.request()
    state = BucketState(**request["state"])
    state.objects = {key: Path(path) for key, path in request["state"]["objects"].items()}
    confine()
    try:
        validator = load(Path(request["checkout"]))
        sizes = [path.stat().st_size for path in state.objects.values() if isinstance(path, Path)]
        model = 4 * sum(math.prod(shape) for shape in state.shapes.values())
        restrict(_SPARE_BYTES + 8 * model + 3 * sum(sizes), request["cpu_s"])
        verdict = validator.ask(state)
    except (ValueError, MemoryError, RuntimeError) as error:
        probe.reply(error=f"{type(error).__name__}: {error}"[:400])
        return
    probe.reply({**verdict, "version": validator.version})


if __name__ == "__main__":
    main()
