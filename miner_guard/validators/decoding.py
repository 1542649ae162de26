"""Applies a gradients document as subnet 38's validators do, to report what would make a validator
raise, skip values or score zero.

Needs torch; opens no file. The inspecting child calls `applied` for a file that it has loaded
(`miner_guard.validators.inspection`), rank 0 calls `contents` for the document that it is about to
write: both report the same problems in the same words. It works in blocks, copies no whole tensor,
and never touches a GPU.

What would make a validator raise, which resets the scores of the whole file, is a problem; what a
validator silently skips is a warning.
"""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from miner_guard.validators.limits import Limits
from miner_guard.validators.rules import ALL_ZERO
from miner_guard.validators.shapes import Shapes, plain_name

TOO_SMALL = 1e-7
"""Values of this share of a float32 weight's size do not change it: its precision is 1.2e-7, and
validators apply 0.7 · 0.5 of a value."""

_SMALL_WEIGHT = 0.01
"""The size of a small weight of a matrix: where 0.02 is usual, four in ten are smaller than this.
Vectors scale, and are about 1."""

_LARGE = 10.0
"""Smaller values change no activation's order of magnitude."""

INDICES, VALUES, QUANTISATION = "idxs", "vals", "quant_params"
"""Suffixes of a parameter's entries in the document."""

_BLOCK_ELEMENTS = 1 << 22
"""How many elements of a decoded gradient to hold in memory at a time (16 MiB of float32)."""

_MAX_PROBLEMS = 8
_MAX_LENGTH = 200
"""Maximum length of a problem's text."""


class RejectedFile(Exception):
    """Validators do not accept the file; the message says why."""


class Unusable(Exception):
    """This entry would make a validator raise and reset the scores; the message says why."""


@functools.cache
def chunk_edge(length: int, target: int) -> int:
    """The largest divisor of `length` up to `target`."""
    return next(edge for edge in range(min(target, length), 0, -1) if length % edge == 0)


def scattered_into(shape: Sequence[int], target: int | None) -> tuple[int, ...] | None:
    """The shape that validators scatter a parameter's values into, along its last dimension.

    For a matrix of `y·h` rows and `x·w` columns: `(y, h, x·w)`; for a vector: `(x, w)`. None if
    unknown: without a `target`, and for a parameter of zero or more than two dimensions, which
    subnet 38's model does not have.
    """
    if target is None or len(shape) not in (1, 2):
        return None
    edge = chunk_edge(shape[0], target)
    if len(shape) == 1:
        return (shape[0] // edge, edge)
    return (shape[0] // edge, edge, shape[1])


@dataclass
class Application:
    """A document being applied, parameter by parameter."""

    torch: Any
    document: Mapping[str, Any]
    limits: Limits
    size: int
    """Bytes of the file: no tensor in it can be larger."""

    decoded: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    change: float = 0.0
    """The largest change of a weight so far, as a share of its size. Once it exceeds `TOO_SMALL`,
    values of one index are not averaged any more, unless they may overflow."""

    large: dict[str, tuple[float, int]] = field(default_factory=dict)
    """For parameters with large values: the largest, and how many are within a tenth of it."""

    def add(self, name: str, shape: Sequence[int] | None) -> None:
        """Apply one parameter of `shape` (None: unknown)."""
        indices, values = (self.document.get(name + suffix) for suffix in (INDICES, VALUES))
        if indices is None or values is None:
            if indices is not None or values is not None:
                absent = "indices" if indices is None else "values"
                self.warnings.append(f"{name}: {absent} are missing; validators skip the parameter")
            return
        try:
            self._decode(name, indices, values, shape)
        except Unusable as why:
            self.problems.append(f"{name}: {why}")
        else:
            self.decoded.add(name)

    def _decode(self, name: str, indices: Any, values: Any, shape: Sequence[int] | None) -> None:
        torch, limits = self.torch, self.limits
        quantised = self.document.get(name + QUANTISATION)
        indices, values = self._plain(indices, "indices"), self._plain(values, "values")
        if quantised is not None:
            values = self._dequantised(values, quantised)
        dtype = _checked_dtype(torch, values.dtype, limits)
        target = None if shape is None else scattered_into(shape, limits.gradients_chunk)
        _check_shapes(torch, indices.shape, values.shape, target, dtype=dtype)
        if (words := _partial(indices.shape, target)) is not None:
            self.warnings.append(f"{name}: {words}")
        values = values[tuple(slice(length) for length in indices.shape)]
        width = None if target is None else target[-1]
        for index, value in _rows(indices, values, width):
            index = index.to(torch.int64)
            _check_bounds(index, width)
            # torch supports few operations on float8, unsigned integers and bool.
            plain = value.is_floating_point() and value.element_size() > 1
            largest = self._apply(name, index, value if plain else value.double(), width)
            vector = shape is not None and len(shape) == 1
            self.change = max(self.change, largest / (1.0 if vector else _SMALL_WEIGHT))

    def _apply(self, name: str, index: Any, used: Any, width: int | None) -> float:
        """Apply a block of rows of indices and values; the largest change of a weight."""
        torch, largest = self.torch, _peak(used)
        numbers = torch.finfo(used.dtype)
        # Adding a denormal number changes nothing.
        if largest is None or largest <= numbers.tiny:
            return 0.0
        if largest > _LARGE:
            before, counted = self.large.get(name, (0.0, 0))
            count = int((used.abs() > largest / 10).sum())
            count += counted if before > largest / 10 else 0
            self.large[name] = max((largest, count), (before, counted))
        if largest * index.shape[-1] >= numbers.max or self.change <= TOO_SMALL:
            # Validators average the values of one index: opposite ones cancel, and the sum of large
            # ones overflows.
            width = int(index.max()) + 1 if width is None else width
            dense = torch.zeros((len(index), width), dtype=used.dtype)
            dense.scatter_reduce_(-1, index, used, "mean", include_self=False)
            largest = _peak(dense, "when validators add up the values for one index") or 0.0
        return largest

    def _plain(self, value: Any, what: str) -> Any:
        torch = self.torch
        if not isinstance(value, torch.Tensor):
            raise Unusable(f"{what} are a {type(value).__name__}, not a tensor")
        if value.layout is not torch.strided or value.device.type != "cpu":
            raise Unusable(f"{what} are {value.layout} on {value.device}, not a plain tensor")
        # A view with stride 0 can claim any size and costs nothing until an operation reads it.
        if value.numel() * value.element_size() > self.size:
            raise Unusable(f"claims {value.numel()} {what} in a file of {self.size} bytes")
        return value.detach()

    def _dequantised(self, values: Any, parameters: Any) -> Any:
        """Dequantise by lookup table: `table[value] + shift`, in the dtype that comes last in
        `parameters`."""
        if not isinstance(parameters, (list, tuple)) or len(parameters) != 5:
            listed = isinstance(parameters, (list, tuple))
            count = len(parameters) if listed else type(parameters).__name__
            raise Unusable(
                f"{count} quantisation parameters; validators unpack shift, scale, offset, "
                "table and dtype"
            )
        shift, _, _, table, dtype = parameters
        if dtype is not None and not isinstance(dtype, self.torch.dtype):
            raise Unusable(
                f"the quantisation specifies its dtype as a {type(dtype).__name__}, not a "
                "torch.dtype"
            )
        if not isinstance(shift, (int, float)):
            shift = self._plain(shift, "quantisation shifts")
        table = self._plain(table, "quantisation table entries")
        try:
            decoded = table[values.long()] + shift
            return decoded if dtype is None else decoded.to(dtype)
        except (IndexError, RuntimeError, TypeError) as error:
            raise Unusable(
                f"cannot decode the quantised values: {' '.join(str(error).split())[:100]}"
            ) from error


def _rows(indices: Any, values: Any, width: int | None) -> Iterator[tuple[Any, Any]]:
    """Yield indices and values as matrices of few rows: an embedding has millions of values, and
    the checks copy them to wider types."""
    columns = indices.shape[-1] if indices.dim() else 1
    rows = (math.prod(indices.shape[:-1]), columns)
    indices, values = indices.reshape(rows), values.reshape(rows)
    step = max(_BLOCK_ELEMENTS // max(columns, width or 0, 1), 1)
    for first in range(0, len(indices), step):
        yield indices[first : first + step], values[first : first + step]


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
    try:
        zeros, used = (torch.empty(size, dtype=dtype, device="meta") for size in (into, values))
        whole = torch.empty(index, dtype=torch.int64, device="meta")
        zeros.scatter_reduce(-1, whole, used, "mean", include_self=False)
    except (RuntimeError, IndexError) as error:
        fit = (
            "do not match"
            if target is None
            else f"do not fit a parameter decoded as {list(target)}"
        )
        raise Unusable(f"{headers} {fit}: {' '.join(str(error).split())[:80]}") from error


def _check_bounds(indices: Any, bound: int | None) -> None:
    if not indices.numel():
        return
    minimum, maximum = (int(extreme) for extreme in indices.aminmax())
    if minimum < 0 or (bound is not None and maximum >= bound):
        wrong, last = minimum if minimum < 0 else maximum, "?" if bound is None else bound - 1
        raise Unusable(f"index {wrong} is out of bounds (0 to {last})")


def _peak(used: Any, where: str = "in the values") -> float | None:
    """The largest magnitude, in one pass; None if there are no values. Raises Unusable for NaN and
    Inf."""
    if not used.numel():
        return None
    # Both are NaN if any value is NaN.
    extremes = [float(extreme) for extreme in used.aminmax()]
    if not all(map(math.isfinite, extremes)):
        raise Unusable(f"NaN or Inf {where}")
    return max(map(abs, extremes))


def _partial(index: Sequence[int], target: tuple[int, ...] | None) -> str | None:
    if target is None or len(target) < 2 or not math.prod(index):
        return None
    covered, rows = math.prod(index[:-1]), math.prod(target[:-1])
    if covered == rows:
        return None
    return f"covers {covered} of {rows} rows; the rest of the parameter stays unchanged"


# the whole document


_TOKENS = 2000
"""At least so many tokens go into the loss that validators compute."""

_FEW = 8
"""So few outputs are all negative for one token in 256."""


def overflows(
    large: Mapping[str, tuple[float, int]], shapes: Mapping[str, Sequence[int]], max_: float
) -> bool:
    """Whether activations exceed `max_`, which makes the loss NaN, if parameters have `large`
    weights (size, and how many) and all others have one of 1.

    Parameters act in the order of `shapes`: vectors scale the normalised state, matrices of its
    width act on it, and two in a row that lead to another width are multiplied (a gate). Measured
    on Llama blocks of random weights in float32 (hidden size 512 and 1024, 1 and 4 layers): NaN
    from values of 1e9 that are equal, from 1e10 with random signs; without attention and gate, at
    width 128: from 1e19.
    """
    hidden, spread, width = 0.0, 1.0, 0
    wide, wide_shape, usual = 1.0, None, 1.0
    *_, last = shapes
    for name, shape in shapes.items():
        size, count = large.get(name, (1.0, math.prod(shape)))
        share = count / max(math.prod(shape), 1)
        if not width:
            hidden, spread, width = size, share, shape[-1] if shape else 0
        elif len(shape) == 1:
            # The square of an enormous state is Inf, which makes the normalised one 0. Sums of
            # several products may be 30 times as large as one.
            everywhere = 30 * (hidden if spread * width >= 8 else usual)
            hidden, spread = 0.0 if everywhere * everywhere > max_ else size, share
            usual = 1.0
        elif len(shape) == 2 and width in shape:
            # Without a few pairs of a large activation and a large weight, there is no product.
            met = _TOKENS * spread * count > 5
            out = hidden * size if met else max(hidden, size)
            if shape[1] == width and shape[0] != width:
                wide = out * (wide if shape == wide_shape else 1.0)
                out, wide_shape = wide, shape
            elif shape[0] == width and wide_shape is not None:
                out, wide_shape = wide * size, None
            # A sum of products of random signs grows with the root of their number; the loss of a
            # batch is a sum over its tokens.
            sums = max(math.sqrt(width * spread * count / math.prod(shape)) / 2, 1.0)
            if out * (10 if name == last else sums) > max_:
                return True
            # With few large weights, some tokens meet none, or only negative products, which
            # the activation function makes 0.
            if shape[0] == width and count > _FEW:
                usual = max(usual, usual * size)
            if shape[0] == width and out > hidden:
                hidden, spread = out, min(spread * count / width, 1.0)
    return False


def applied(
    torch: Any, document: Any, *, limits: Limits, shapes: Shapes | None, size: int
) -> dict[str, Any]:
    """Report on a document of `size` bytes. Checks the model's parameters if their names are known,
    otherwise the document's. Raises RejectedFile."""
    if not isinstance(document, Mapping):
        raise RejectedFile(f"contains a {type(document).__name__}, not a dictionary")
    key = limits.gradients_metadata_key
    application = Application(torch, document, limits, size)
    if key is not None and key not in document:
        application.problems.append(f"lacks the key {key!r}, which validators require")
    texts = [name for name in document if isinstance(name, str)]
    named = sorted({t[: -len(s)] for t in texts for s in (INDICES, VALUES) if t.endswith(s)})
    if not named:
        application.problems.append(f"has no `<param>{INDICES}` and `<param>{VALUES}`")
    # Validators unwrap the model before they read its state, so they know no wrapper's name.
    wrapped = [name for name in named if plain_name(name) != name]
    names = [n for n in named if n not in wrapped] if shapes is None else list(shapes.of)
    for name in names:
        application.add(name, None if shapes is None else shapes.of[name])
    if named and not application.problems:
        application.problems += _worthless(application, named, wrapped, shapes)
    unnamed = wrapped if shapes is None else [name for name in named if name not in shapes.of]
    warnings = application.warnings[:_MAX_PROBLEMS]
    missing = [] if shapes is None else sorted(set(shapes.of) - shapes.optional - set(named))
    if missing and application.decoded:
        warnings.insert(0, f"model parameters are missing: {_first_of(missing)}")
    if unnamed:
        words = f"validators skip parameters whose names they do not know: {_first_of(unnamed)}"
        warnings.insert(0, words)
    more = len(application.problems) - _MAX_PROBLEMS
    return {
        "params": len(application.decoded) or (len(named) if application.problems else 0),
        "problems": [
            *map(_shown, application.problems[:_MAX_PROBLEMS]),
            *([f"and {more} more"] if more > 0 else []),
        ],
        "warnings": [*map(_shown, warnings)],
        "shapes_known": shapes is not None,
    }


def _worthless(
    application: Application, named: Sequence[str], wrapped: Sequence[str], shapes: Shapes | None
) -> Iterator[str]:
    """Yield the reasons why a file that every validator decodes without error still scores zero."""
    change = application.change
    if not application.decoded and wrapped:
        yield (
            f"validators skip {wrapped[0]}, which they know as {plain_name(wrapped[0])}, and all "
            "other parameters"
        )
    elif not application.decoded:
        yield (
            f"none of its {len(named)} parameters belongs to the model being trained; "
            "validators skip them all"
        )
    elif change <= 0:
        yield ALL_ZERO
    elif change <= TOO_SMALL:
        yield f"too small to change a float32 weight: at most by {change:.0e} of its size"
    elif shapes is not None and (scale := application.limits.gradients_scale) is not None:
        weights = {name: (scale * size, n) for name, (size, n) in application.large.items()}
        if overflows(weights, shapes.of, application.torch.finfo(application.torch.float32).max):
            most = max(size for size, _ in application.large.values())
            yield f"values of {most:.0e}: the loss after applying them is NaN, which scores zero"


def _first_of(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _shown(words: str) -> str:
    """Truncate and escape: a file's names may be of any length and contain any characters."""
    return words[:_MAX_LENGTH].encode("utf-8", "backslashreplace").decode()


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


# a document in memory

MAX_BYTES = 4 * 1024**3
"""Only the audit checks larger gradients, because reading them takes longer than 20 s. Subnet 38's
compressor keeps 32 of every 4,096 values: 0.2 GB for a model with 4 billion parameters."""


def contents(torch: Any, document: Any, limits: Limits, shapes: Shapes | None) -> dict[str, Any]:
    """The report of `inspection.inspect_file`, without `size_bytes`, for a dictionary in
    memory. If values are on a GPU or too many, `reason` says so, and the audit judges them."""
    try:
        if isinstance(document, Mapping):
            if (why := _unread(torch, document)) is not None:
                return {"problems": [], "params": None, "reason": why}
            _check_loads(torch, document)
        return applied(torch, document, limits=limits, shapes=shapes, size=MAX_BYTES)
    except RejectedFile as refusal:
        return {"problems": [str(refusal)], "params": 0, "shapes_known": shapes is not None}


def _unread(torch: Any, document: Mapping[str, Any]) -> str | None:
    """Return why rank 0 must not read the values; None if it may."""
    tensors = list(_tensors(torch, document.values()))
    # Reading a tensor on a GPU synchronises it.
    if elsewhere := {tensor.device.type for tensor in tensors} - {"cpu", "meta"}:
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
        elif depth and isinstance(value, (list, tuple, Mapping)):
            inner = value.values() if isinstance(value, Mapping) else value
            yield from _tensors(torch, inner, depth - 1)


def _check_loads(torch: Any, document: Mapping[str, Any]) -> None:
    """Check that `torch.load(weights_only=True)` accepts everything except the plain tensors: save
    it, then load it as validators do. Raises RejectedFile."""
    rest = {key: value for key, value in document.items() if type(value) is not torch.Tensor}
    buffer = io.BytesIO()
    torch.save(rest, buffer)
    buffer.seek(0)
    load(torch, buffer)


def load(torch: Any, source: Any, **how: Any) -> Any:
    """Load a file as validators do. Raises RejectedFile, and MemoryError."""
    try:
        return torch.load(source, map_location="cpu", weights_only=True, **how)
    except MemoryError:
        raise
    except Exception as error:
        # A hostile file may raise any exception; every one means rejection.
        words = gist(str(error))
        if "alloc" in words or "memory" in words.lower():
            raise RejectedFile(f"needs more memory than allowed: {words}") from error
        raise RejectedFile(
            f"does not load with weights_only=True: {type(error).__name__}: {words}"
        ) from error
