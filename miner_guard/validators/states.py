"""States of a miner's bucket and chain, to compare the profile with the validators' code on.

`fresh` combines one to three of the mutations in mutations.toml. A line of data says how a state
differs from a good one:

    network    fields of `BucketState`: the network's epoch and blocks, the files' age …
    epoch, inner    the epoch that is published, and its inner step
    also       a second epoch, `[epoch, inner]`
    scored     the epoch that `gradients` changes, if not the first
    objects    by key: null (absent), {"json": changes to its fields}, {"text": …},
               {"bytes": a Python expression in `b`}, {"from": another key}
    gradients  by pattern of keys in gradients.pt: a Python expression in `t` (the tensor) and `d`
               (the document), or null (absent); "" is the whole document. Evaluated in order.
    save       arguments of torch.save
    bytes      a Python expression in `b`, the file's bytes
    seed       of `r`, the random numbers in expressions

A text that begins with `=` is an expression too, in `network` and `json`.
"""

from __future__ import annotations

import copy
import fnmatch
import functools
import io
import json
import math
import random
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping, MutableMapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from miner_guard.validators.checkout import BucketState

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

GOOD = BucketState()
BLOCK, MODEL, UID, BUCKET = GOOD.block, GOOD.model, GOOD.uid, GOOD.bucket
ACCOUNT, READ_KEY, READ_SECRET = "a" * 31 + "1", "b" * 31 + "2", "c" * 63 + "3"
COMMITMENT = ACCOUNT + READ_KEY + READ_SECRET
SHAPES = {
    "embed_weight": (256, 128),
    "layer_weight": (128, 128),
    "norm_weight": (128,),
    "head_weight": (256, 128),
}


def fresh(seed: int) -> tuple[dict[str, Any], BucketState]:
    """A line with one to three random mutations, half of them good in unusual ways, and its
    state."""
    rng = random.Random(seed)
    table = _mutations()
    while True:
        line: dict[str, Any] = {"case": [], "seed": seed}
        for _ in range(rng.choice((1, 1, 2, 2, 3))):
            kind = rng.random() < 0.5
            mutation = rng.choice([m for m in table if bool(m.get("good")) is kind])
            if mutation["name"] not in line["case"]:
                line["case"].append(mutation["name"])
                _merge(line, {k: v for k, v in mutation.items() if k not in ("name", "good")})
        line["case"] = " + ".join(line["case"])
        try:
            return line, build(line)
        except (TypeError, LookupError, AttributeError, RuntimeError, ValueError):
            # One mutation removes what another changes.
            continue


@functools.cache
def _mutations() -> list[dict[str, Any]]:
    text = Path(__file__).with_name("mutations.toml").read_text(encoding="utf-8")
    return [{"name": name, **changes} for name, changes in tomllib.loads(text).items()]


def _merge(line: dict[str, Any], mutation: Mapping[str, Any]) -> None:
    for key, value in mutation.items():
        if isinstance(value, Mapping) and isinstance(line.get(key), dict):
            _merge(line[key], value)
        else:
            line[key] = copy.deepcopy(value)


def lines(path: Path) -> list[dict[str, Any]]:
    """The states in a file, one JSON object per line."""
    return [
        json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()
    ]


def compressed(seed: int = 1, k: int = 32, scale: float = 1e-3) -> dict[str, Any]:
    """A gradient as produced by the miner's own compressor without the DCT: the k largest values of
    each row."""
    g = torch.Generator().manual_seed(seed)
    out: dict[str, Any] = {}
    for name, shape in SHAPES.items():
        rows = (shape[0] // 64, 64) if len(shape) == 2 else (shape[0] // 64,)
        width = shape[1] if len(shape) == 2 else 64
        largest = min(k, width)
        places = torch.argsort(torch.rand(*rows, width, generator=g), dim=-1)[..., :largest]
        out[name + "idxs"] = places.to(torch.int16)
        out[name + "vals"] = torch.randn(*rows, largest, generator=g) * scale
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


_SCOPE: dict[str, Any] = {
    "torch": torch,
    "json": json,
    "nan": math.nan,
    "inf": math.inf,
    "BLOCK": BLOCK,
    "ACCOUNT": ACCOUNT,
    "READ_KEY": READ_KEY,
    "READ_SECRET": READ_SECRET,
    "COMMITMENT": COMMITMENT,
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


def build(line: Mapping[str, Any]) -> BucketState:
    """The state that a line of data describes."""
    scope = {**_SCOPE, "r": random.Random(line.get("seed", 0))}
    network: dict[str, Any] = {
        "commitment": COMMITMENT,
        "good_keys": (READ_KEY,),
        "account": ACCOUNT,
    }
    for name, value in line.get("network", {}).items():
        if isinstance(value, str) and name in ("commitment", "good_keys"):
            value = "=" + value.removeprefix("=")
        network[name] = _value(value, scope)
        if isinstance(network[name], list):
            network[name] = tuple(network[name])
    state = BucketState(**network)
    state.shapes = SHAPES
    epoch, inner = line.get("epoch", state.network_epoch), line.get("inner", 84)
    state.objects = dict(_epoch(epoch, inner))
    if "also" in line:
        state.objects |= dict(_epoch(*line["also"]))
    if {"gradients", "save", "bytes"} & line.keys():
        scored = f"epoch-{line.get('scored', epoch)}/gradients.pt"
        state.objects[scored] = _gradients(line, scope)
    for key, change in line.get("objects", {}).items():
        _change(state.objects, key, change, scope)
    return state


def _epoch(epoch: int, inner: int) -> Iterator[tuple[str, bytes]]:
    config = {"architectures": ["LlamaForCausalLM"], "hidden_size": 128, "inner_step": 84}
    metadata = {"run": 5, "outer_step": epoch, "inner_step": inner, "peer_id": "12D3KooWtest"}
    yield "metadata.json", json.dumps(metadata).encode()
    yield f"epoch-{epoch}/gradients.pt", saved(compressed())
    blocks = [BLOCK - 150, BLOCK - 100, BLOCK - 50]
    yield f"epoch-{epoch}/config.json", json.dumps({**config, "block_list": blocks}).encode()
    yield f"epoch-{epoch}/metadata.json", json.dumps(metadata).encode()


def _gradients(line: Mapping[str, Any], scope: Mapping[str, Any]) -> bytes:
    document: Any = compressed()
    for pattern, expression in line.get("gradients", {}).items():
        document = edited(document, pattern, expression, scope)
    data = saved(document, **line.get("save", {}))
    if "bytes" in line:
        data = eval(line["bytes"], {**scope, "b": data})
    assert isinstance(data, bytes)
    return data


def edited(
    document: Any, pattern: str, expression: str | None, scope: Mapping[str, Any] = _SCOPE
) -> Any:
    """The document with the matching keys replaced or dropped."""
    if pattern == "":
        return eval(str(expression), {**scope, "d": document})
    for key in fnmatch.filter(list(document), pattern) or [pattern]:
        if expression is None:
            del document[key]
        else:
            document[key] = eval(expression, {**scope, "t": document.get(key), "d": document})
    return document


def _change(
    objects: MutableMapping[str, Any],
    key: str,
    change: Mapping[str, Any] | None,
    scope: Mapping[str, Any],
) -> None:
    if change is None:
        del objects[key]
        return
    if "from" in change:
        objects[key] = objects.pop(change["from"])
    if "json" in change:
        fields = json.loads(objects.get(key, b"{}"))
        fields |= {k: _value(v, scope) for k, v in change["json"].items()}
        fields = {k: v for k, v in fields.items() if v != "<absent>"}
        objects[key] = json.dumps(fields).encode()
    if "text" in change:
        objects[key] = change["text"].encode()
    if "bytes" in change:
        objects[key] = eval(change["bytes"], {**scope, "b": objects.get(key, b"")})


def _value(value: Any, scope: Mapping[str, Any]) -> Any:
    if isinstance(value, str) and value.startswith("="):
        return eval(value[1:], dict(scope))
    return value
