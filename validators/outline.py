"""What can be reported of gradients before they are written to a file: names, types and shapes
alone.

Standard library only, and no tensor is read: this runs inside rank 0, on what is about to go out.
Where a tensor's shape decides, the words of `validators.decoding` and of this module are the same.
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
    """A parameter's indices and values, by what their headers say."""

    index_shape: tuple[int, ...]
    value_shape: tuple[int, ...]
    value_dtype: str
    """torch's name without `torch.`."""


def outline(document: Any, limits: Limits, shapes: Shapes | None) -> dict[str, Any]:
    """The report of `validators.inspection.inspect_file`, of a dictionary in memory.

    `shapes` are the model's by plain name, where they are known. What needs the values themselves
    (bounds, NaN, lookup tables) is not reported: `values_read` is False.
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
    # A large model has few shapes, and many parameters of each.
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
    """Parameters of which the document has both indices and values; validators skip the others."""
    index, value = limits.gradients_index_suffix, limits.gradients_value_suffix
    names = (k[: -len(index)] for k in document if isinstance(k, str) and k.endswith(index))
    both = (n for n in names if document.get(n + index) is not None)
    return [n for n in both if document.get(n + value) is not None]


def _tensors(document: Mapping[Any, Any], name: str, limits: Limits) -> Tensors | str:
    """Headers of a parameter's tensors; words where one is no tensor."""
    indices = document[name + limits.gradients_index_suffix]
    values = document[name + limits.gradients_value_suffix]
    for what, tensor in (("indices", indices), ("values", values)):
        if not hasattr(tensor, "shape") or not hasattr(tensor, "dtype"):
            return f"{what} are a {type(tensor).__name__}, not a tensor"
    dtype = str(values.dtype).removeprefix("torch.")
    if document.get(f"{name}quant_params") is not None:
        # What the lookup table gives is known from the table's own type alone.
        dtype = _quantised_dtype(document[f"{name}quant_params"]) or dtype
    return Tensors(tuple(indices.shape), tuple(values.shape), dtype)


def _quantised_dtype(parameters: Any) -> str | None:
    last = (
        parameters[-1] if isinstance(parameters, (list, tuple)) and len(parameters) == 5 else None
    )
    return None if last is None else str(last).removeprefix("torch.")


def misfit(tensors: Tensors, shape: Sequence[int] | None, limits: Limits) -> str | None:
    """Why a validator would raise on them, by their headers; None where it would not."""
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
    """Whether torch's scatter along the last dimension takes these shapes: as many dimensions, and
    an index that is nowhere larger than the values or, but for the last, than the target."""
    if 0 in index:
        return True
    # torch takes a single number for a vector of one.
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
