"""Decodes one parameter's values the way a validator does. Only for the inspecting child: needs
torch.

`Unusable` marks anything that would make a validator raise, which resets the scores of the whole
file. Anything that a validator silently skips becomes a warning here.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from miner_guard.validators.chunks import scattered_into

ENORMOUS = 5e18
"""Magnitude at which values, once multiplied by an evaluation's learning rates (0.7 · 0.5), have
squares and products that overflow float32. Measured with the validators' own code: the loss is NaN
if half of all values are 1e19, but not if they are 1e18; a single such value or parameter leaves it
finite."""

_BLOCK_ELEMENTS = 1 << 19
"""How many values to check at a time (4 MiB of indices)."""

_INTEGERS = {f"torch.{name}" for name in ("int8", "uint8", "int16", "int32", "int64")}
"""Index dtypes whose minimum and maximum torch finds without a conversion."""

_DENSE_ELEMENTS = 1 << 22
"""How many elements of a decoded gradient to hold in memory at a time (16 MiB of float32)."""


class Unusable(Exception):
    """This would make a validator raise and reset the scores; the message says why."""


@dataclass(frozen=True)
class Format:
    """How a network encodes a parameter's compressed gradient. The fields are those of `Limits`
    that begin with `gradients_`, without that prefix."""

    index_suffix: str = "idxs"
    value_suffix: str = "vals"
    quant_suffix: str = "quant_params"
    chunk: int | None = None
    layout: str = "rows"
    value_dtype: str | None = None
    inside: str | None = None
    packed_bits: int | None = None
    topk: int | None = None
    complete: bool = False
    quant_scale: tuple[float, float] | None = None

    @classmethod
    def of(cls, limits: Mapping[str, Any]) -> Format:
        """Select this class's fields from the limits."""
        known = {name: limits.get(f"gradients_{name}") for name in cls.__dataclass_fields__}
        return cls(**{name: value for name, value in known.items() if value is not None})


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

    something: bool
    """Whether at least one value is neither zero nor denormal, in which case applying the values
    would change the model."""

    values: int
    enormous: int
    """Number of values beyond `ENORMOUS`."""

    warning: str | None = None


def stored(document: Mapping[str, Any], name: str, form: Format) -> Stored:
    """The parameter's entries, found by the network's suffixes."""
    suffixes = (form.index_suffix, form.value_suffix, form.quant_suffix)
    return Stored(name, *(document.get(name + suffix) for suffix in suffixes))


def decode(
    torch: Any, entry: Stored, shape: Sequence[int] | None, *, form: Format, size: int
) -> Decoded:
    """Decode `entry` from a file of `size` bytes for a parameter of `shape` (None: unknown). Raises
    Unusable."""
    indices = _plain(torch, entry.indices, "indices", size)
    values = _plain(torch, entry.values, "values", size)
    if form.packed_bits is not None:
        indices = _unpacked(torch, indices, values, form.packed_bits)
    if form.quant_scale is not None:
        _check_quantisation(torch, entry, form.quant_scale)
    values, convert = _conversion(torch, entry, values, form=form, size=size)
    dtype = _checked_dtype(torch, convert(values[:0] if values.dim() else values), form)
    if form.chunk is None and indices.shape == values.shape:
        indices, values = indices.flatten(), values.flatten()
    target = None if shape is None else scattered_into(shape, form.chunk, form.layout)
    _check_shapes(torch, indices.shape, values.shape, target, dtype=dtype)
    if form.topk is not None and target is not None:
        _check_topk(indices.shape, target, form.topk)
    values = values[tuple(slice(length) for length in indices.shape)]
    something, enormous = False, 0
    for index, value in _blocks(indices, values):
        _check_bounds(torch, index, None if target is None else target[-1])
        used = _computable(convert(value))
        peak = _peak(used)
        if peak is None:
            continue
        _check_sums(torch, index, used, target, peak=peak)
        minimum = torch.finfo(used.dtype).tiny if used.is_floating_point() else 0
        something = something or peak > minimum
        if peak > ENORMOUS:
            enormous += int((used.abs() > ENORMOUS).sum())
    return Decoded(something, values.numel(), enormous, _partial(indices.shape, target))


def _conversion(
    torch: Any, entry: Stored, values: Any, *, form: Format, size: int
) -> tuple[Any, Callable[[Any], Any]]:
    """Return the values, and a function that turns a slice of them into numbers: it dequantises, or
    returns the slice unchanged."""
    parameters = entry.quantisation
    if parameters is None or not (form.quant_scale is None or values.dtype == torch.uint8):
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


def _plain(torch: Any, value: Any, what: str, size: int) -> Any:
    if not isinstance(value, torch.Tensor):
        raise Unusable(f"{what} are a {type(value).__name__}, not a tensor")
    if value.layout is not torch.strided or value.device.type != "cpu":
        raise Unusable(f"{what} are {value.layout} on {value.device}, not a plain tensor")
    # A view with stride 0 can claim any size and costs nothing until an operation reads it.
    if value.numel() * value.element_size() > size:
        raise Unusable(f"claims {value.numel()} {what} in a file of {size} bytes")
    return value.detach()


def _unpacked(torch: Any, packed: Any, values: Any, bits: int) -> Any:
    """Unpack 12-bit indices, two to every three bytes. Byte 0 holds the low eight bits of the first
    index; byte 1 its high four bits, below the low four of the second; byte 2 the high eight bits
    of the second."""
    if bits != 12:
        raise Unusable(f"this version cannot read {bits}-bit indices")
    if packed.dtype != torch.uint8:
        kind = _short(packed.dtype)
        raise Unusable(f"indices are {kind}; validators accept only 12 bits packed in uint8")
    count = values.numel()
    if count == 0 or count % 2 or packed.numel() != count * 3 // 2:
        raise Unusable(
            f"{packed.numel()} bytes of packed indices for {count} values; validators expect an "
            "even number of values and three bytes for every two indices"
        )
    low, middle, high = packed.flatten().to(torch.int64).reshape(-1, 3).unbind(-1)
    first, second = low | ((middle & 0x0F) << 8), (middle >> 4) | (high << 4)
    return torch.stack((first, second), -1).reshape(values.shape)


def _check_quantisation(torch: Any, entry: Stored, scale_range: tuple[float, float]) -> None:
    """Templar's validators check these quantisation parameters before they use them."""
    if entry.quantisation is None:
        raise Unusable("quantisation parameters are missing")
    parameters = entry.quantisation
    if not isinstance(parameters, (list, tuple)) or len(parameters) != 5:
        raise Unusable("quantisation parameters are not shift, scale, offset, table and dtype")
    shift, scale, _, table, _ = parameters
    if not isinstance(shift, torch.Tensor) or not bool(torch.isfinite(shift).all()):
        raise Unusable("the quantisation shift is not a finite tensor")
    minimum, maximum = scale_range
    if isinstance(scale, float) and not minimum <= abs(scale) <= maximum:
        raise Unusable(f"the quantisation scale {scale} is not between {minimum} and {maximum}")
    if isinstance(table, torch.Tensor) and not bool(torch.isfinite(table).all()):
        raise Unusable("the quantisation table contains NaN or Inf")


def _check_topk(index: Sequence[int], target: tuple[int, ...], topk: int) -> None:
    """Require every chunk to hold exactly as many values as the network's top-k, and the chunks to
    cover the whole parameter."""
    expected = min(topk, target[-1])
    if not index or index[-1] != expected:
        given = index[-1] if index else 1
        raise Unusable(f"{given} values per chunk; validators accept exactly {expected}")
    if tuple(index[:-1]) != target[:-1]:
        raise Unusable(
            f"the file has {list(index[:-1])} chunks, but the parameter has {list(target[:-1])}"
        )


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


def _checked_dtype(torch: Any, values: Any, form: Format) -> Any:
    if form.value_dtype is None:
        if values.is_complex():
            raise Unusable(f"values are {values.dtype}, not real numbers")
        return values.dtype
    expected = getattr(torch, form.value_dtype)
    if values.dtype != expected:
        raise Unusable(
            f"values are {_short(values.dtype)}; validators add them to a {form.value_dtype} "
            f"tensor, which raises. Upload {form.value_dtype}"
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
    given = f"indices of shape {list(index)} and values of shape {list(values)}"
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
        raise Unusable(f"{given} {fit}: {' '.join(str(error).split())[:80]}") from error


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


def _check_sums(
    torch: Any, indices: Any, used: Any, target: tuple[int, ...] | None, *, peak: float
) -> None:
    """Raise Unusable if values with the same index overflow when a validator averages them: the
    mean sums them first."""
    if not used.is_floating_point() or indices.dim() == 0:
        return
    if peak * indices.shape[-1] < torch.finfo(used.dtype).max:
        return
    whole = _whole(torch, indices)
    width = int(whole.max()) + 1 if target is None else target[-1]
    rows, numbers = whole.reshape(-1, whole.shape[-1]), used.reshape(-1, whole.shape[-1])
    step = max(_DENSE_ELEMENTS // max(width, 1), 1)
    for first in range(0, len(rows), step):
        index, value = rows[first : first + step], numbers[first : first + step]
        dense = torch.zeros((len(index), width), dtype=used.dtype)
        if not torch.isfinite(
            dense.scatter_reduce_(-1, index, value, "mean", include_self=False)
        ).all():
            raise Unusable("NaN or Inf when validators add up the values for one index")


def _partial(index: Sequence[int], target: tuple[int, ...] | None) -> str | None:
    if target is None or len(target) < 2 or not math.prod(index):
        return None
    covered, rows = math.prod(index[:-1]), math.prod(target[:-1])
    return (
        None
        if covered == rows
        else f"covers {covered} of {rows} rows; the rest of the parameter stays unchanged"
    )


def _short(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
