"""Checks gradients before the miner writes them to a file: names, dtypes and shapes only.

Standard library only, and reads no tensor: this runs inside rank 0, on what is about to be
uploaded. For defects of shape, this module and `validators.decoding` use the same words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from validators.chunks import scattered_into
from validators.limits import Limits
from validators.shapes import Shapes, plain_name

_MAX_PROBLEMS = 8


@dataclass(frozen=True)
class Tensors:
    """Headers of a parameter's indices and values."""

    index_shape: tuple[int, ...]
    value_shape: tuple[int, ...]
    value_dtype: str
    """torch's name without `torch.`."""


def outline(document: Any, limits: Limits, shapes: Shapes | None) -> dict[str, Any]:
    """The report of `validators.inspection.inspect_file`, for a dictionary in memory.

    `shapes` are the model's by plain name, if known. `values_read` is False: checks that need the
    values (bounds, NaN, lookup tables) do not run here.
    """
    if not isinstance(document, Mapping):
        return _report([f"holds a {type(document).__name__}, not a dictionary"], 0, shapes)
    problems = []
    key = limits.gradients_metadata_key
    if key is not None and key not in document:
        problems.append(f"lacks the key {key!r}: validators pop it")
    named = _named(document, limits)
    if not named:
        ends = (
            f"`<param>{limits.gradients_index_suffix}` and `<param>{limits.gradients_value_suffix}`"
        )
        problems.append(f"holds no {ends}")
    known = [
        n for n in named if (shapes is None and plain_name(n) == n) or n in (shapes or _NONE).of
    ]
    if named and not known:
        first = named[0]
        why = (
            f"validators know {first} as {plain_name(first)}"
            if plain_name(first) != first
            else "another model's"
        )
        problems.append(
            f"validators know none of its {len(named)} parameters ({why}) and skip them all"
        )
    # Cache per shape: a large model has few distinct shapes.
    judged: dict[tuple[Tensors, tuple[int, ...] | None], str | None] = {}
    for name in known:
        found = _tensors(document, name, limits)
        shape = None if shapes is None else tuple(shapes.of[name])
        if isinstance(found, str):
            problems.append(f"{name}: {found}")
            continue
        if (found, shape) not in judged:
            judged[found, shape] = misfit(found, shape, limits)
        wrong = judged[found, shape]
        if wrong is not None:
            problems.append(f"{name}: {wrong}")
    return _report(problems, len(known), shapes)


_NONE = Shapes({})


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
    names = (k[: -len(index)] for k in document if isinstance(k, str) and k.endswith(index))
    both = (n for n in names if document.get(n + index) is not None)
    return [n for n in both if document.get(n + value) is not None]


def _tensors(document: Mapping[Any, Any], name: str, limits: Limits) -> Tensors | str:
    """Headers of a parameter's tensors, or a problem in words if an entry is not a tensor."""
    indices = document[name + limits.gradients_index_suffix]
    values = document[name + limits.gradients_value_suffix]
    for what, tensor in (("indices", indices), ("values", values)):
        if not hasattr(tensor, "shape") or not hasattr(tensor, "dtype"):
            return f"{what} are a {type(tensor).__name__}, not a tensor"
    dtype = str(values.dtype).removeprefix("torch.")
    if document.get(f"{name}quant_params") is not None:
        # Quantised values get the dtype that their parameters name.
        dtype = _quantised_dtype(document[f"{name}quant_params"]) or dtype
    return Tensors(tuple(indices.shape), tuple(values.shape), dtype)


def _quantised_dtype(parameters: Any) -> str | None:
    last = (
        parameters[-1] if isinstance(parameters, (list, tuple)) and len(parameters) == 5 else None
    )
    return None if last is None else str(last).removeprefix("torch.")


def misfit(tensors: Tensors, shape: Sequence[int] | None, limits: Limits) -> str | None:
    """Why a validator would raise on these headers; None if it would not."""
    expected = limits.gradients_value_dtype
    if expected is not None and tensors.value_dtype != expected:
        return (
            f"values are {tensors.value_dtype}; validators add them to a {expected} tensor, which "
            f"raises. Upload {expected}"
        )
    target = None
    if shape is not None:
        target = scattered_into(shape, limits.gradients_chunk, limits.gradients_layout)
    if limits.gradients_chunk is None and tensors.index_shape == tensors.value_shape:
        return None
    if fits(tensors.index_shape, tensors.value_shape, target):
        return None
    where = "" if target is None else f" for a parameter that is decoded as {list(target)}"
    given = (
        f"indices of shape {list(tensors.index_shape)} and values of {list(tensors.value_shape)}"
    )
    return f"{given}{where}"


def fits(index: tuple[int, ...], values: tuple[int, ...], target: tuple[int, ...] | None) -> bool:
    """Whether torch's scatter along the last dimension accepts these shapes: equal dimension
    counts, and an index no larger than the values anywhere, nor than the target except in the last
    dimension."""
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
