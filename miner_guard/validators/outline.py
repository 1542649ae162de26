"""Checks gradients before the miner writes them to a file: names, dtypes and shapes only.

Standard library only, and reads no tensor: this runs inside rank 0, on gradients about to be
uploaded. This module and `miner_guard.validators.decoding` describe wrong shapes in the same words.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from miner_guard.validators.limits import Limits
from miner_guard.validators.shapes import Shapes, plain_name

_MAX_PROBLEMS = 8


@functools.cache
def chunk_edge(length: int, target: int) -> int:
    """The largest divisor of `length` up to `target`."""
    return next(edge for edge in range(min(target, length), 0, -1) if length % edge == 0)


def scattered_into(shape: Sequence[int], target: int | None) -> tuple[int, ...] | None:
    """The shape that validators scatter a parameter's values into, along its last dimension.

    For a matrix of `y·h` rows and `x·w` columns: `(y, h, x·w)`; for a vector: `(x, w)`. Without a
    `target`, indices address the whole tensor. None for a parameter of zero or more than two
    dimensions, which subnet 38's model does not have.
    """
    if target is None:
        return (math.prod(shape),)
    if len(shape) not in (1, 2):
        return None
    edge = chunk_edge(shape[0], target)
    if len(shape) == 1:
        return (shape[0] // edge, edge)
    return (shape[0] // edge, edge, shape[1])


@dataclass(frozen=True)
class Tensors:
    """Headers of a parameter's indices and values."""

    index_shape: tuple[int, ...]
    value_shape: tuple[int, ...]
    value_dtype: str
    """torch's name without `torch.`."""


def outline(document: Any, limits: Limits, shapes: Shapes | None) -> dict[str, Any]:
    """The report of `miner_guard.validators.inspection.inspect_file`, for a dictionary in memory.

    `shapes` are the model's by plain name, if known. `values_read` is False: checks that need the
    values (bounds, NaN, lookup tables) do not run here.
    """
    if not isinstance(document, Mapping):
        return _report([f"contains a {type(document).__name__}, not a dictionary"], 0, shapes)
    problems = []
    key = limits.gradients_metadata_key
    if key is not None and key not in document:
        problems.append(f"lacks the key {key!r}, which validators require")
    named = _named(document, limits)
    if not named:
        ends = (
            f"`<param>{limits.gradients_index_suffix}` and `<param>{limits.gradients_value_suffix}`"
        )
        problems.append(f"has no {ends}")
    if shapes is None:
        known = [name for name in named if plain_name(name) == name]
    else:
        known = [name for name in named if name in shapes.of]
    if named and not known:
        first = named[0]
        why = (
            f"validators know {first} as {plain_name(first)}"
            if plain_name(first) != first
            else "they belong to a different model"
        )
        problems.append(
            f"validators know none of its {len(named)} parameters ({why}) and skip them all"
        )
    problems += _misfits(document, known, limits, shapes)
    return _report(problems, len(known), shapes)


def _report(problems: Sequence[str], params: int, shapes: Shapes | None) -> dict[str, Any]:
    kept = [words[:200] for words in problems[:_MAX_PROBLEMS]]
    return {
        "problems": kept,
        "params": params,
        "shapes_known": shapes is not None,
        "values_read": False,
    }


def _named(document: Mapping[Any, Any], limits: Limits) -> list[str]:
    """Parameters with both indices and values; validators skip the others."""
    index, value = limits.gradients_index_suffix, limits.gradients_value_suffix
    length, get = len(index), document.get
    names = [k[:-length] for k in document if isinstance(k, str) and k.endswith(index)]
    return [n for n in names if get(n + index) is not None and get(n + value) is not None]


def _misfits(
    document: Mapping[Any, Any], names: Sequence[str], limits: Limits, shapes: Shapes | None
) -> Iterator[str]:
    """Problems that would make validators raise, by parameter."""
    index, value = limits.gradients_index_suffix, limits.gradients_value_suffix
    # A large model has few distinct headers: judge each once. The key holds torch's own objects,
    # because converting them would cost more than the judgement.
    judged: dict[Any, str | None] = {}
    for name in names:
        indices, values = document[name + index], document[name + value]
        quantised = document.get(f"{name}quant_params")
        shape = None if shapes is None else tuple(shapes.of[name])
        try:
            key = (indices.shape, values.shape, values.dtype, shape)
        except AttributeError:
            yield f"{name}: {_not_tensors(indices, values)}"
            continue
        if quantised is not None:
            # Quantised values get the dtype that their parameters name.
            key = (*key[:2], _quantised_dtype(quantised) or values.dtype, shape)
        if key not in judged:
            dtype = str(key[2]).removeprefix("torch.")
            tensors = Tensors(tuple(indices.shape), tuple(values.shape), dtype)
            judged[key] = misfit(tensors, shape, limits)
        if (wrong := judged[key]) is not None:
            yield f"{name}: {wrong}"


def _not_tensors(indices: Any, values: Any) -> str:
    for what, entry in (("indices", indices), ("values", values)):
        if not hasattr(entry, "shape") or not hasattr(entry, "dtype"):
            return f"{what} are a {type(entry).__name__}, not a tensor"
    return "indices and values have no shape"


def _quantised_dtype(parameters: Any) -> str | None:
    """The dtype that the parameters give for the dequantised values; if they give none, that of the
    lookup table."""
    if not isinstance(parameters, (list, tuple)) or len(parameters) != 5:
        return None
    named = getattr(parameters[3], "dtype", None) if parameters[4] is None else parameters[4]
    return None if named is None else str(named).removeprefix("torch.")


def misfit(tensors: Tensors, shape: Sequence[int] | None, limits: Limits) -> str | None:
    """Return why a validator would raise on these headers; None if it would not."""
    expected = limits.gradients_value_dtype
    if expected is not None and tensors.value_dtype != expected:
        return (
            f"values are {tensors.value_dtype}; validators add them to a {expected} tensor, which "
            f"raises. Upload {expected}"
        )
    target = None
    if shape is not None:
        target = scattered_into(shape, limits.gradients_chunk)
    if limits.gradients_chunk is None and tensors.index_shape == tensors.value_shape:
        return None
    if fits(tensors.index_shape, tensors.value_shape, target):
        return None
    given = (
        f"indices of shape {list(tensors.index_shape)} and values of shape "
        f"{list(tensors.value_shape)}"
    )
    fit = "do not match" if target is None else f"do not fit a parameter decoded as {list(target)}"
    return f"{given} {fit}"


def fits(index: tuple[int, ...], values: tuple[int, ...], target: tuple[int, ...] | None) -> bool:
    """Return whether torch's scatter along the last dimension accepts these shapes. All must
    have the same number of dimensions, and the index must not be larger than the values in any
    dimension, or larger than the target in any but the last."""
    if 0 in index:
        return True
    # torch treats a scalar as a vector of length one.
    index, values, target = (
        index or (1,),
        values or (1,),
        None if target is None else target or (1,),
    )
    if len(index) != len(values) or any(i > v for i, v in zip(index, values, strict=True)):
        return False
    if target is None:
        return True
    if len(index) != len(target):
        return False
    return all(i <= t for i, t in zip(index[:-1], target[:-1], strict=True))
