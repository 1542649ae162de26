"""States of a miner's bucket and of its chain, built from lines of data.

A line of sn38.jsonl says how a state differs from a good one:

    network    fields of `State`: the network's epoch and blocks, the files' age, the commitment …
    epoch, inner    the epoch that is published, and its inner step
    also       a second epoch, `[epoch, inner]`
    scored     the epoch that `gradients` changes, if not the first
    objects    by key: null (absent), {"json": changes to its fields}, {"text": …},
               {"bytes": a Python expression in `b`}, {"from": another key}
    gradients  by pattern of keys in gradients.pt: a Python expression in `t` (the tensor) and `d`
               (the document), or null (absent); "" is the whole document. Evaluated in order.
    save       arguments of torch.save
    bytes      a Python expression in `b`, the file's bytes
    real       the verdicts, by version, as recorded by `take_verdicts`
"""

from __future__ import annotations

import copy
import fnmatch
import functools
import io
import json
import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

MODEL = "llama-4b-ws-4"
UID = 7
BUCKET = f"{MODEL}-{UID:03d}"
ACCOUNT, READ_KEY, READ_SECRET = "a" * 31 + "1", "b" * 31 + "2", "c" * 63 + "3"
COMMITMENT = ACCOUNT + READ_KEY + READ_SECRET
BLOCK = 6_000_000
NOW = 1_766_500_000.0
SHAPES = {
    "embed_weight": (256, 128),
    "layer_weight": (128, 128),
    "norm_weight": (128,),
    "head_weight": (256, 128),
}
"""Names without dots: the model that stands in for the real one has no submodules."""

_WORDS = {
    "COMMITMENT": COMMITMENT,
    "ACCOUNT": ACCOUNT,
    "READ_KEY": READ_KEY,
    "READ_SECRET": READ_SECRET,
}


@dataclass
class State:
    """Everything that a verdict may depend on."""

    network_epoch: int = 56
    blocks_per_allreduce: int = 400
    blocks_since_allreduce: int = 300
    block: int = BLOCK
    max_upload_interval: int | None = None
    """Seconds; set if failed AllReduces have raised the limit."""

    age: float = 600.0
    """Age of all objects, in seconds."""

    commitment: str | None = COMMITMENT
    bucket: str = BUCKET
    refuse: tuple[str, ...] = ()
    """Keys that the server answers with 400: encrypted with a customer's key."""

    good_keys: tuple[str, ...] = (READ_KEY,)
    objects: dict[str, bytes] = field(default_factory=dict)


def lines(path: Path) -> list[dict[str, Any]]:
    """The states in a file, one JSON object per line."""
    return [
        json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()
    ]


def compressed(seed: int = 1, k: int = 32, scale: float = 1e-3) -> dict[str, Any]:
    """A gradient as produced by the miner's own compressor without the DCT: the k largest values of
    each row."""
    return copy.deepcopy(_compressed(seed, k, scale))


@functools.cache
def _compressed(seed: int, k: int, scale: float) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    out: dict[str, Any] = {}
    for name, shape in SHAPES.items():
        rows = (shape[0] // 64, 64) if len(shape) == 2 else (shape[0] // 64,)
        width = shape[1] if len(shape) == 2 else 64
        kept = min(k, width)
        index = torch.argsort(torch.rand(*rows, width, generator=g), dim=-1)[..., :kept].to(
            torch.int16
        )
        out[name + "idxs"], out[name + "vals"] = (
            index,
            torch.randn(*rows, kept, generator=g) * scale,
        )
    out["metadata"] = {"block": BLOCK - 60, "inner_step": 84, "outer_step": 56, "loss": 3.1}
    return out


def quantised(d: dict[str, Any]) -> dict[str, Any]:
    """The document with 8-bit values and their lookup tables."""
    g = torch.Generator().manual_seed(2)
    for name in SHAPES:
        shape = d[name + "vals"].shape
        d[name + "vals"] = torch.randint(0, 256, shape, dtype=torch.uint8, generator=g)
        table = torch.linspace(-1e-3, 1e-3, 256)
        d[name + "quant_params"] = (torch.tensor(0.0), 1e-5, 128, table, torch.float32)
    return d


def dct_layout(d: dict[str, Any], bound: int = 4096) -> dict[str, Any]:
    """The matrices as produced by the compressor with the DCT."""
    g = torch.Generator().manual_seed(3)
    for name, rows in (("embed_weight", 4), ("head_weight", 4), ("layer_weight", 2)):
        d[name + "idxs"] = torch.randint(0, bound, (rows, 2, 32), generator=g).to(torch.int16)
        d[name + "vals"] = torch.randn(rows, 2, 32, generator=g) * 1e-3
    return d


def poke(t: torch.Tensor, value: float, *places: int) -> torch.Tensor:
    """The tensor with one value replaced: the first, or the one at `places`."""
    changed = t.clone()
    changed[places or (0,) * t.dim()] = value
    return changed


_SCOPE = {
    "torch": torch,
    "nan": math.nan,
    "inf": math.inf,
    "compressed": compressed,
    "quantised": quantised,
    "dct_layout": dct_layout,
    "poke": poke,
    "Fraction": Fraction,
    "OrderedDict": OrderedDict,
    "SHAPES": SHAPES,
}


def saved(document: Any, **how: Any) -> bytes:
    """The bytes that torch.save writes for it."""
    buffer = io.BytesIO()
    torch.save(document, buffer, **how)
    return buffer.getvalue()


def build(line: Mapping[str, Any]) -> State:
    """The state that a line of data describes."""
    network = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in line.get("network", {}).items()
    }
    for name in ("commitment", "good_keys"):
        if isinstance(network.get(name), str):
            network[name] = eval(network[name], dict(_WORDS))
    state = State(**network)
    epoch, inner = line.get("epoch", state.network_epoch), line.get("inner", 84)
    state.objects = dict(_epoch(epoch, inner))
    if "also" in line:
        state.objects |= dict(_epoch(*line["also"]))
    scored = f"epoch-{line.get('scored', epoch)}/gradients.pt"
    if {"gradients", "save", "bytes"} & line.keys():
        state.objects[scored] = _gradients(line)
    for key, change in line.get("objects", {}).items():
        _change(state.objects, key, change)
    return state


def _epoch(epoch: int, inner: int) -> Iterator[tuple[str, bytes]]:
    config = {"architectures": ["LlamaForCausalLM"], "hidden_size": 128, "inner_step": 84}
    metadata = {"run": 5, "outer_step": epoch, "inner_step": inner, "peer_id": "12D3KooWtest"}
    yield "metadata.json", json.dumps(metadata).encode()
    yield f"epoch-{epoch}/gradients.pt", saved(compressed())
    blocks = [BLOCK - 150, BLOCK - 100, BLOCK - 50]
    yield f"epoch-{epoch}/config.json", json.dumps({**config, "block_list": blocks}).encode()
    yield f"epoch-{epoch}/metadata.json", json.dumps(metadata).encode()


def _gradients(line: Mapping[str, Any]) -> bytes:
    document: Any = compressed()
    for pattern, expression in line.get("gradients", {}).items():
        document = edited(document, pattern, expression)
    data = saved(document, **line.get("save", {}))
    if "bytes" in line:
        data = eval(line["bytes"], {"b": data})
    assert isinstance(data, bytes)
    return data


def edited(document: Any, pattern: str, expression: str | None) -> Any:
    """The document with the matching keys replaced or dropped."""
    if pattern == "":
        return _value(expression, d=document)
    matching = fnmatch.filter(list(document), pattern) or [pattern]
    for key in matching:
        if expression is None:
            del document[key]
        else:
            document[key] = _value(expression, t=document.get(key), d=document)
    return document


def _value(expression: str | None, **names: Any) -> Any:
    assert expression is not None
    return eval(expression, {**_SCOPE, **names})


def _change(objects: dict[str, bytes], key: str, change: Mapping[str, Any] | None) -> None:
    if change is None:
        del objects[key]
    elif "json" in change:
        fields = json.loads(objects[key]) | change["json"]
        objects[key] = json.dumps(
            {k: as_json(v) for k, v in fields.items() if v != "<absent>"}
        ).encode()
    elif "text" in change:
        objects[key] = change["text"].encode()
    elif "bytes" in change:
        objects[key] = eval(
            change["bytes"], {"b": objects.get(key, b""), "json": json, "BLOCK": BLOCK}
        )
    else:
        objects[key] = objects.pop(change["from"])


def as_json(value: Any) -> Any:
    """`=` begins an expression of BLOCK: `=[BLOCK - 50]`."""
    if isinstance(value, str) and value.startswith("="):
        return eval(value[1:], {"BLOCK": BLOCK, "nan": math.nan, "inf": math.inf})
    return value
