"""One parameter's values, decoded as a validator decodes them. For the inspecting child alone: it
needs torch.

What a validator would raise on is `Unusable`: it resets the scores of the whole file. What it skips
without a word is no error there, and is said as a warning here.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from validators.chunks import scattered_into

ENORMOUS = 5e18
"""Values about here, times the learning rates of an evaluation (0.7 · 0.5), have squares and
products that float32 can't hold. Measured with the validators' own code: with half of all values
at 1e19 the loss is NaN, at 1e18 it is not; one such value or parameter leaves it finite."""

_DENSE_ELEMENTS = 1 << 22
"""Elements of a decoded gradient that are held at a time (16 MiB of float32)."""


class Unusable(Exception):
    """A validator raises on this and resets the scores; the message says why."""


@dataclass(frozen=True)
class Format:
    """How a network writes a parameter's compressed gradient; fields of `Limits` without
    `gradients_`."""

    index_suffix: str = "idxs"
    value_suffix: str = "vals"
    quant_suffix: str = "quant_params"
    chunk: int | None = None
    dct: bool = False
    value_dtype: str | None = None

    @classmethod
    def of(cls, limits: Mapping[str, Any]) -> Format:
        """From the limits by name."""
        known = {name: limits.get(f"gradients_{name}") for name in cls.__dataclass_fields__}
        return cls(**{name: value for name, value in known.items() if value is not None})


@dataclass(frozen=True)
class Stored:
    """What the file holds of one parameter; None for what it lacks."""

    name: str
    indices: Any
    values: Any
    quantisation: Any


@dataclass(frozen=True)
class Decoded:
    """What applying it would do."""

    something: bool
    """At least one value is neither zero nor denormal: the model would not be the same after it."""

    values: int
    enormous: int
    """How many of the values are beyond `ENORMOUS`."""

    warning: str | None = None


def stored(document: Mapping[str, Any], name: str, form: Format) -> Stored:
    """The parameter's entries by the network's suffixes."""
    suffixes = (form.index_suffix, form.value_suffix, form.quant_suffix)
    return Stored(name, *(document.get(name + suffix) for suffix in suffixes))


def decode(
    torch: Any, entry: Stored, shape: Sequence[int] | None, form: Format, size: int
) -> Decoded:
    """Decode `entry` of a file of `size` bytes for a parameter of `shape` (None: unknown). Raises
    Unusable."""
    indices = _plain(torch, entry.indices, "indices", size)
    values = _plain(torch, entry.values, "values", size)
    if entry.quantisation is not None:
        values = _dequantised(torch, values, entry.quantisation, size)
    dtype = _checked_dtype(torch, values, form)
    with warnings.catch_warnings():
        # Of a complex index torch drops the imaginary part, and says so.
        warnings.simplefilter("ignore")
        whole = indices.to(torch.int64)
    if form.chunk is None and whole.shape == values.shape:
        whole, values = whole.flatten(), values.flatten()
    target = None if shape is None else scattered_into(shape, form.chunk, form.dct)
    _check_shapes(torch, whole, values, target, dtype)
    _check_bounds(whole, None if target is None else target[-1])
    used = _computable(values[tuple(slice(length) for length in whole.shape)])
    _check_finite(torch, whole, used, target)
    magnitude = used.abs()
    something = bool(
        (magnitude > (torch.finfo(used.dtype).tiny if used.is_floating_point() else 0)).any()
    )
    enormous = int((magnitude > ENORMOUS).sum())
    return Decoded(something, used.numel(), enormous, _partial(whole, target))


def _plain(torch: Any, value: Any, what: str, size: int) -> Any:
    if not isinstance(value, torch.Tensor):
        raise Unusable(f"{what} are a {type(value).__name__}, not a tensor")
    if value.layout is not torch.strided or value.device.type != "cpu":
        raise Unusable(f"{what} are {value.layout} on {value.device}, not a plain tensor")
    # A view with stride 0 claims any size and costs nothing until somebody computes with it.
    if value.numel() * value.element_size() > size:
        raise Unusable(f"claims {value.numel()} {what} in a file of {size} bytes")
    return value.detach()


def _dequantised(torch: Any, values: Any, parameters: Any, size: int) -> Any:
    """Values by their lookup table: `table[value] + shift` in the type that is named last."""
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
            f"the quantisation names its type as a {type(dtype).__name__}, not as a torch.dtype"
        )
    if not isinstance(shift, (int, float)):
        shift = _plain(torch, shift, "quantisation shifts", size)
    table = _plain(torch, table, "quantisation table entries", size)
    try:
        decoded = table[values.long()] + shift
        return decoded if dtype is None else decoded.to(dtype)
    except (IndexError, RuntimeError, TypeError) as error:
        raise Unusable(
            f"the quantised values do not decode: {' '.join(str(error).split())[:100]}"
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
            "tensor, which raises. "
            f"Upload {form.value_dtype}"
        )
    return expected


def _check_shapes(
    torch: Any, whole: Any, values: Any, target: tuple[int, ...] | None, dtype: Any
) -> None:
    # On "meta" torch checks all that it would check, and touches no memory.
    # Without the model's shapes only what indices and values say of each other can be checked.
    into = tuple(values.shape) if target is None else target
    if target is None and not into:
        return
    given = f"indices of shape {list(whole.shape)} and values of shape {list(values.shape)}"
    try:
        zeros = torch.empty(into, dtype=dtype, device="meta")
        zeros.scatter_reduce(-1, whole.to("meta"), values.to("meta"), "mean", include_self=False)
    except (RuntimeError, IndexError) as error:
        where = "" if target is None else f" for a parameter that is decoded as {list(target)}"
        raise Unusable(f"{given}{where}: {' '.join(str(error).split())[:80]}") from error


def _check_bounds(whole: Any, bound: int | None) -> None:
    if not whole.numel():
        return
    least, most = int(whole.min()), int(whole.max())
    if least < 0 or (bound is not None and most >= bound):
        wrong, last = least if least < 0 else most, "?" if bound is None else bound - 1
        raise Unusable(f"index {wrong} is out of bounds (0 to {last})")


def _computable(tensor: Any) -> Any:
    """The same numbers in a type that torch computes with: of float8 and unsigned integers it knows
    next to nothing."""
    if tensor.is_floating_point():
        return tensor.float() if tensor.element_size() == 1 else tensor
    return (
        tensor.long()
        if str(tensor.dtype) in ("torch.uint16", "torch.uint32", "torch.uint64")
        else tensor
    )


def _check_finite(torch: Any, whole: Any, used: Any, target: tuple[int, ...] | None) -> None:
    if not torch.isfinite(used).all():
        raise Unusable("NaN or Inf in the values")
    if not used.numel() or not used.is_floating_point() or whole.dim() == 0:
        return
    # The mean of values with one index is their sum first.
    peak = float(used.abs().max())
    if peak * whole.shape[-1] < torch.finfo(used.dtype).max:
        return
    width = int(whole.max()) + 1 if target is None else target[-1]
    rows, numbers = whole.reshape(-1, whole.shape[-1]), used.reshape(-1, whole.shape[-1])
    step = max(_DENSE_ELEMENTS // max(width, 1), 1)
    for first in range(0, len(rows), step):
        index, value = rows[first : first + step], numbers[first : first + step]
        dense = torch.zeros((len(index), width), dtype=used.dtype)
        if not torch.isfinite(
            dense.scatter_reduce_(-1, index, value, "mean", include_self=False)
        ).all():
            raise Unusable("NaN or Inf where values of one index are added up")


def _partial(whole: Any, target: tuple[int, ...] | None) -> str | None:
    if target is None or len(target) < 2 or not whole.numel():
        return None
    covered, rows = math.prod(whole.shape[:-1]), math.prod(target[:-1])
    return (
        None
        if covered == rows
        else f"covers {covered} of {rows} rows, the rest of the parameter stays as it is"
    )


def _short(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
