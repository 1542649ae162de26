"""Applies a gradients document as subnet 38's validators do, to report what would make a validator
raise, skip values or score zero.

Needs torch; opens no file. The inspecting child calls `applied` for a file that it has loaded
(`miner_guard.validators.inspection`), rank 0 calls `contents` for the document that it is about to
write: both report the same problems in the same words. It works in blocks: it uses about 30 MB
whatever the size, copies no whole tensor, and never touches a GPU.

`Unusable` marks anything that would make a validator raise, which resets the scores of the whole
file. Anything that a validator silently skips becomes a warning here.
"""

from __future__ import annotations

import functools
import io
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from miner_guard.validators.limits import Limits
from miner_guard.validators.rules import ALL_ZERO
from miner_guard.validators.shapes import Shapes, plain_name

TOO_SMALL = 1e-10
"""Values up to this change no float32 weight of usual size (0.02): it moves by 1e-9 or not at all,
and validators apply 0.7 · 0.5 of a value."""

_BLOCK_ELEMENTS = 1 << 19
"""How many values to check at a time (4 MiB of indices)."""

_INTEGERS = {f"torch.{name}" for name in ("int8", "uint8", "int16", "int32", "int64")}
"""Index dtypes whose minimum and maximum torch finds without a conversion."""

_DENSE_ELEMENTS = 1 << 22
"""How many elements of a decoded gradient to hold in memory at a time (16 MiB of float32)."""


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


class Unusable(Exception):
    """This would make a validator raise and reset the scores; the message says why."""


@dataclass(frozen=True)
class Stored:
    """A parameter's entries in the file; None for a missing one."""

    name: str
    indices: Any
    values: Any
    quantisation: Any


@dataclass(frozen=True)
class Decoded:
    """The effect of applying one parameter's values."""

    change: float
    """The largest change of a weight, here or in an earlier parameter; once it exceeds `TOO_SMALL`,
    none is looked for."""

    values: int
    enormous: int
    """Number of values beyond `gradients_enormous`."""

    warning: str | None = None


def stored(document: Mapping[str, Any], name: str, limits: Limits) -> Stored:
    """The parameter's entries, found by the network's suffixes."""
    suffixes = (limits.gradients_index_suffix, limits.gradients_value_suffix, _QUANTISATION)
    return Stored(name, *(document.get(name + suffix) for suffix in suffixes))


_QUANTISATION = "quant_params"


def decode(
    torch: Any,
    entry: Stored,
    shape: Sequence[int] | None,
    *,
    limits: Limits,
    size: int | None,
    change: float = 0.0,
) -> Decoded:
    """Decode `entry` from a file of `size` bytes for a parameter of `shape` (None: unknown).
    Without a size, looks at types and shapes only. `change`: the largest one that another parameter
    makes. Raises Unusable."""
    indices = _plain(torch, entry.indices, "indices", size)
    values = _plain(torch, entry.values, "values", size)
    convert: Callable[[Any], Any] | None = None
    if size is None:
        dtype = _stated_dtype(entry) or values.dtype
    else:
        values, convert = _conversion(torch, entry, values, size)
        dtype = convert(values[:0] if values.dim() else values).dtype
    dtype = _checked_dtype(torch, dtype, limits)
    if limits.gradients_chunk is None and indices.shape == values.shape:
        indices, values = indices.flatten(), values.flatten()
    target = None if shape is None else scattered_into(shape, limits.gradients_chunk)
    _check_shapes(torch, indices.shape, values.shape, target, dtype=dtype)
    warning = _partial(indices.shape, target)
    if convert is None:
        return Decoded(math.inf, values.numel(), 0, warning)
    values = values[tuple(slice(length) for length in indices.shape)]
    enormous = 0
    for index, value in _blocks(indices, values):
        _check_bounds(torch, index, None if target is None else target[-1])
        used = _computable(convert(value))
        peak = _peak(used)
        floating = used.is_floating_point()
        # Adding a denormal number changes nothing.
        if peak is None or (floating and peak <= torch.finfo(used.dtype).tiny):
            continue
        width = index.shape[-1] if index.dim() else 1
        overflows = floating and peak * width >= torch.finfo(used.dtype).max
        if overflows or peak > TOO_SMALL >= change:
            average = _averaged(torch, index, used, target, whole=overflows)
            change = max(change, average)
        elif change < peak <= TOO_SMALL:
            change = peak
        if (bound := limits.gradients_enormous) is not None and peak > bound:
            enormous += int((used.abs() > bound).sum())
    return Decoded(change, values.numel(), enormous, warning)


def _stated_dtype(entry: Stored) -> Any:
    """The dtype that the quantisation gives to the values, without decoding any; None for values
    that are not quantised."""
    parameters = entry.quantisation
    if not isinstance(parameters, (list, tuple)) or len(parameters) != 5:
        return None
    return getattr(parameters[3], "dtype", None) if parameters[4] is None else parameters[4]


def _conversion(
    torch: Any, entry: Stored, values: Any, size: int
) -> tuple[Any, Callable[[Any], Any]]:
    """Return the values, and a function that turns a slice of them into numbers: it dequantises, or
    returns the slice unchanged."""
    parameters = entry.quantisation
    if parameters is None:
        return values, lambda part: part
    shift = parameters[0] if isinstance(parameters, (list, tuple)) and parameters else None
    if isinstance(shift, torch.Tensor) and shift.numel() != 1:
        # The shift's shape decides which values it applies to, so a slice cannot be decoded on its
        # own.
        return _dequantised(torch, values, parameters, size), lambda part: part
    return values, lambda part: _dequantised(torch, part, parameters, size)


def _blocks(indices: Any, values: Any) -> Iterator[tuple[Any, Any]]:
    """Yield indices and values in blocks of rows with at most `_BLOCK_ELEMENTS` elements: an
    embedding has millions of values, and the checks copy them to wider types."""
    if indices.dim() < 2:
        yield indices, values
        return
    step = max(_BLOCK_ELEMENTS // max(math.prod(indices.shape[1:]), 1), 1)
    for first in range(0, indices.shape[0], step):
        yield indices[first : first + step], values[first : first + step]


def _whole(torch: Any, indices: Any) -> Any:
    with warnings.catch_warnings():
        # torch warns when it drops the imaginary part of a complex index.
        warnings.simplefilter("ignore")
        return indices.to(torch.int64)


def _plain(torch: Any, value: Any, what: str, size: int | None) -> Any:
    if not isinstance(value, torch.Tensor):
        raise Unusable(f"{what} are a {type(value).__name__}, not a tensor")
    if value.layout is not torch.strided or (size is not None and value.device.type != "cpu"):
        raise Unusable(f"{what} are {value.layout} on {value.device}, not a plain tensor")
    # A view with stride 0 can claim any size and costs nothing until an operation reads it.
    if size is not None and value.numel() * value.element_size() > size:
        raise Unusable(f"claims {value.numel()} {what} in a file of {size} bytes")
    return value.detach()


def _dequantised(torch: Any, values: Any, parameters: Any, size: int) -> Any:
    """Dequantise by lookup table: `table[value] + shift`, in the dtype that comes last in
    `parameters`."""
    if not isinstance(parameters, (list, tuple)) or len(parameters) != 5:
        count = (
            len(parameters) if isinstance(parameters, (list, tuple)) else type(parameters).__name__
        )
        raise Unusable(
            f"{count} quantisation parameters; validators unpack shift, scale, offset, "
            "table and dtype"
        )
    shift, _, _, table, dtype = parameters
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise Unusable(
            f"the quantisation specifies its dtype as a {type(dtype).__name__}, not a torch.dtype"
        )
    if not isinstance(shift, (int, float)):
        shift = _plain(torch, shift, "quantisation shifts", size)
    table = _plain(torch, table, "quantisation table entries", size)
    try:
        decoded = table[values.long()] + shift
        return decoded if dtype is None else decoded.to(dtype)
    except (IndexError, RuntimeError, TypeError) as error:
        raise Unusable(
            f"cannot decode the quantised values: {' '.join(str(error).split())[:100]}"
        ) from error


def _checked_dtype(torch: Any, dtype: Any, limits: Limits) -> Any:
    if limits.gradients_value_dtype is None:
        if dtype.is_complex:
            raise Unusable(f"values are {dtype}, not real numbers")
        return dtype
    expected = getattr(torch, limits.gradients_value_dtype)
    if dtype != expected:
        short, name = str(dtype).removeprefix("torch."), limits.gradients_value_dtype
        raise Unusable(
            f"values are {short}; validators add them to a {name} tensor, which raises. "
            f"Upload {name}"
        )
    return expected


def _check_shapes(
    torch: Any,
    index: Sequence[int],
    values: Sequence[int],
    target: tuple[int, ...] | None,
    *,
    dtype: Any,
) -> None:
    # On "meta", torch runs its checks without touching memory. Without the model's shapes, it can
    # only compare indices with values.
    into = tuple(values) if target is None else target
    if target is None and not into:
        return
    headers = f"indices of shape {list(index)} and values of shape {list(values)}"
    meta = {"device": "meta"}
    try:
        zeros = torch.empty(into, dtype=dtype, **meta)
        whole, used = (
            torch.empty(index, dtype=torch.int64, **meta),
            torch.empty(values, dtype=dtype, **meta),
        )
        zeros.scatter_reduce(-1, whole, used, "mean", include_self=False)
    except (RuntimeError, IndexError) as error:
        fit = (
            "do not match"
            if target is None
            else f"do not fit a parameter decoded as {list(target)}"
        )
        raise Unusable(f"{headers} {fit}: {' '.join(str(error).split())[:80]}") from error


def _check_bounds(torch: Any, indices: Any, bound: int | None) -> None:
    if not indices.numel():
        return
    # Find both extremes in one pass, without a copy that takes eight bytes per index.
    plain = indices if str(indices.dtype) in _INTEGERS else _whole(torch, indices)
    minimum, maximum = (int(extreme) for extreme in plain.aminmax())
    if minimum < 0 or (bound is not None and maximum >= bound):
        wrong, last = minimum if minimum < 0 else maximum, "?" if bound is None else bound - 1
        raise Unusable(f"index {wrong} is out of bounds (0 to {last})")


def _computable(tensor: Any) -> Any:
    """Convert to a type that torch can compute with: it supports few operations on float8, unsigned
    integers and bool."""
    if tensor.is_floating_point():
        return tensor.float() if tensor.element_size() == 1 else tensor
    unsupported = ("torch.uint16", "torch.uint32", "torch.uint64", "torch.bool")
    return tensor.long() if str(tensor.dtype) in unsupported else tensor


def _peak(used: Any) -> float | None:
    """The largest magnitude, in one pass; None if there are no values. Raises Unusable for NaN and
    Inf."""
    if not used.numel():
        return None
    minimum, maximum = (float(extreme) for extreme in used.aminmax())
    # Both are NaN if any value is NaN.
    if not math.isfinite(minimum) or not math.isfinite(maximum):
        raise Unusable("NaN or Inf in the values")
    return max(abs(minimum), abs(maximum))


def _averaged(
    torch: Any, indices: Any, used: Any, target: tuple[int, ...] | None, *, whole: bool
) -> float:
    """The largest magnitude after validators average the values of each index; if not `whole`, of
    the first rows that change a weight. Raises Unusable if values with the same index overflow: the
    mean sums them first."""
    rows = _whole(torch, indices)
    rows = rows.reshape(-1, rows.shape[-1] if rows.dim() else 1)
    numbers = used.reshape(rows.shape)
    width = int(rows.max()) + 1 if target is None else target[-1]
    step = max(_DENSE_ELEMENTS // max(width, 1), 1)
    change = 0.0
    for first in range(0, len(rows), step):
        index, value = rows[first : first + step], numbers[first : first + step]
        dense = torch.zeros((len(index), width), dtype=used.dtype)
        dense.scatter_reduce_(-1, index, value, "mean", include_self=False)
        extremes = [float(extreme) for extreme in dense.aminmax()]
        if not all(map(math.isfinite, extremes)):
            raise Unusable("NaN or Inf when validators add up the values for one index")
        change = max(change, *map(abs, extremes))
        if change > TOO_SMALL and not whole:
            break
    return change


def _partial(index: Sequence[int], target: tuple[int, ...] | None) -> str | None:
    if target is None or len(target) < 2 or not math.prod(index):
        return None
    covered, rows = math.prod(index[:-1]), math.prod(target[:-1])
    return (
        None
        if covered == rows
        else f"covers {covered} of {rows} rows; the rest of the parameter stays unchanged"
    )


# the whole document

_MAX_PROBLEMS = 8


_MAX_LENGTH = 200
"""Maximum length of a problem's text."""


class RejectedFile(Exception):
    """Validators do not accept the file; the message says why."""


def gist(text: str) -> str:
    """Extract the phrase that names the cause from torch's long explanation."""
    words = " ".join(text.split()).partition(" Check the documentation")[0]
    for mark in (
        "Unsupported global:",
        "Unsupported operand",
        "WeightsUnpickler error:",
        "PytorchStreamReader",
    ):
        if mark in words:
            return words[words.index(mark) :][:120]
    return words[:120]


def applied(
    torch: Any,
    document: Any,
    *,
    limits: Limits,
    shapes: Shapes | None,
    size: int | None,
    each: Callable[[Iterable[str]], Iterable[str]] = iter,
) -> dict[str, Any]:
    """Report on a document of `size` bytes; without a size, on types and shapes only. Checks the
    model's parameters if their names are known, otherwise the document's.

    `each` wraps the iteration over the names, so that it can release the pages read for one
    parameter before the next. Raises RejectedFile.
    """
    if not isinstance(document, Mapping):
        raise RejectedFile(f"contains a {type(document).__name__}, not a dictionary")
    key = limits.gradients_metadata_key
    index_suffix, value_suffix = limits.gradients_index_suffix, limits.gradients_value_suffix
    problems: list[str] = []
    if key is not None and key not in document:
        problems.append(f"lacks the key {key!r}, which validators require")
    named = _named(document, (index_suffix, value_suffix))
    if not named:
        problems.append(f"has no `<param>{index_suffix}` and `<param>{value_suffix}`")
    # Validators unwrap the model before they read its state, so they know no wrapper's name.
    names = [name for name in named if plain_name(name) == name] if shapes is None else shapes.of
    decoded, wrong, warned = _decoded(
        torch, document, each(names), shapes=shapes, limits=limits, size=size
    )
    problems += wrong
    if named and not problems:
        problems += _worthless(decoded, named, shapes, limits.gradients_enormous)
    unnamed, missing = _compared(named, decoded, shapes)
    return {
        "params": len(decoded) or (len(named) if wrong else 0),
        "problems": [*map(_shown, problems[:_MAX_PROBLEMS]), *_further(problems)],
        "warnings": [*map(_shown, [*_summed(unnamed), *missing, *warned[:_MAX_PROBLEMS]])],
        "shapes_known": shapes is not None,
        "values_read": size is not None,
    }


def _named(document: Mapping[str, Any], suffixes: tuple[str, str]) -> list[str]:
    """Names of the parameters that have an entry in the file."""
    return sorted(
        {k[: -len(s)] for k in document for s in suffixes if isinstance(k, str) and k.endswith(s)}
    )


def _decoded(
    torch: Any,
    document: Mapping[str, Any],
    names: Iterable[str],
    *,
    shapes: Shapes | None,
    limits: Limits,
    size: int | None,
) -> tuple[dict[str, Decoded], list[str], list[str]]:
    """Decoded parameters by name, problems that would make a validator raise, and warnings."""
    applied: dict[str, Decoded] = {}
    problems, warned, change = [], [], 0.0
    for name in names:
        entry = stored(document, name, limits)
        if entry.indices is None or entry.values is None:
            if entry.indices is not None or entry.values is not None:
                absent = "indices" if entry.indices is None else "values"
                warned.append(f"{name}: {absent} are missing; validators skip the parameter")
            continue
        try:
            applied[name] = decode(
                torch,
                entry,
                None if shapes is None else shapes.of.get(name),
                limits=limits,
                size=size,
                change=change,
            )
        except Unusable as why:
            problems.append(f"{name}: {why}")
            continue
        change = applied[name].change
        if (words := applied[name].warning) is not None:
            warned.append(f"{name}: {words}")
    return applied, problems, warned


def _worthless(
    applied: Mapping[str, Decoded],
    named: Sequence[str],
    shapes: Shapes | None,
    enormous: float | None,
) -> Iterator[str]:
    """Yield the reasons why a file that every validator decodes without error still scores zero."""
    wrapped = [name for name in named if plain_name(name) != name]
    if not applied and wrapped:
        yield (
            f"validators skip {wrapped[0]}, which they know as {plain_name(wrapped[0])}, and all "
            "other parameters"
        )
    elif not applied and shapes is not None:
        yield (
            f"none of its {len(named)} parameters belongs to the model being trained; "
            "validators skip them all"
        )
    elif (change := max((d.change for d in applied.values()), default=0.0)) <= 0:
        yield ALL_ZERO
    elif change <= TOO_SMALL:
        yield f"no value is larger than {change:.0e}, too small to change a float32 weight"
    elif 2 * sum(d.enormous for d in applied.values()) >= sum(d.values for d in applied.values()):
        yield (
            f"values beyond {enormous:.0e}: the loss after applying them is NaN, which scores zero"
        )


def _compared(
    named: Sequence[str], applied: Mapping[str, Decoded], shapes: Shapes | None
) -> tuple[list[str], list[str]]:
    """Names in the file that are not in the model, and a warning if the file lacks some of the
    model's parameters."""
    if shapes is None:
        return [name for name in named if plain_name(name) != name], []
    missing = sorted(set(shapes.of) - shapes.optional - set(named))
    words = [f"model parameters are missing: {_first_of(missing)}"] if missing else []
    return [name for name in named if name not in shapes.of], words if applied else []


def _summed(unnamed: Sequence[str]) -> Iterator[str]:
    if unnamed:
        yield (f"validators skip parameters whose names they do not know: {_first_of(unnamed)}")


def _first_of(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _shown(words: str) -> str:
    """Truncate and escape: a file's names may be of any length and contain any characters."""
    return words[:_MAX_LENGTH].encode("utf-8", "backslashreplace").decode()


def _further(problems: Sequence[str]) -> Iterator[str]:
    if len(problems) > _MAX_PROBLEMS:
        yield f"and {len(problems) - _MAX_PROBLEMS} more"


# a document in memory

MAX_BYTES = 4 * 1024**3
"""Only the audit checks larger gradients, because reading them takes longer than 20 s. Subnet 38's
compressor keeps 32 of every 4,096 values: 0.2 GB for a model with 4 billion parameters."""


_READABLE = {"cpu", "meta"}


def contents(torch: Any, document: Any, limits: Limits, shapes: Shapes | None) -> dict[str, Any]:
    """The report of `inspection.inspect_file`, without `size_bytes`, for a dictionary in
    memory.

    If values are on a GPU or too many, looks at types and shapes only; `reason` says why, if these
    have no problem.
    """
    try:
        if not isinstance(document, Mapping):
            return applied(torch, document, limits=limits, shapes=shapes, size=None)
        why = _unread(torch, document)
        if why is None:
            _check_loads(torch, document)
        size = MAX_BYTES if why is None else None
        report = applied(torch, document, limits=limits, shapes=shapes, size=size)
    except RejectedFile as refusal:
        return {"problems": [str(refusal)], "params": 0, "shapes_known": shapes is not None}
    return report if why is None or report["problems"] else {**report, "reason": why}


def _unread(torch: Any, document: Mapping[str, Any]) -> str | None:
    """Return why rank 0 must not read the values; None if it may."""
    tensors = list(_tensors(torch, document.values()))
    if elsewhere := {tensor.device.type for tensor in tensors} - _READABLE:
        return f"the values are on {', '.join(sorted(elsewhere))}"
    claimed = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    if claimed > MAX_BYTES:
        return f"{claimed} bytes is over the limit for pre-upload checks ({MAX_BYTES})"
    return None


def _tensors(torch: Any, values: Iterable[Any], depth: int = 3) -> Iterator[Any]:
    """Yield the tensors among the values, including those in nested containers: a quantisation
    table may be the only tensor on the GPU."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif depth and isinstance(value, (list, tuple)):
            yield from _tensors(torch, value, depth - 1)
        elif depth and isinstance(value, Mapping):
            yield from _tensors(torch, value.values(), depth - 1)


def _check_loads(torch: Any, document: Mapping[str, Any]) -> None:
    """Check that `torch.load(weights_only=True)` accepts everything except the plain tensors: save
    it, then load it as validators do. Raises RejectedFile."""
    rest = dict(_no_plain_tensors(torch, document))
    buffer = io.BytesIO()
    torch.save(rest, buffer)
    buffer.seek(0)
    try:
        torch.load(buffer, map_location="cpu", weights_only=True)
    except Exception as error:
        # Any exception here means that validators cannot load the file either.
        raise RejectedFile(
            f"does not load with weights_only=True: {type(error).__name__}: {gist(str(error))}"
        ) from error


def _no_plain_tensors(torch: Any, document: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in document.items():
        if type(value) is not torch.Tensor:
            yield key, value
