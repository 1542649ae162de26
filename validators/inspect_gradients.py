"""The child that opens a gradients file: `python -m validators.inspect_gradients`, see `validators.inspection`.

Loads it as a validator does (`weights_only=True`: tensors and plain containers, no code) and looks at what
came out. Memory and processor time are limited before the file is touched.
"""

from __future__ import annotations

import math
import os
import resource
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from miner_guard import probe
from validators.chunks import layouts
from validators.gradients import ALL_ZERO
from validators.shapes import Shapes, plain_name

_MOST_PROBLEMS = 8
_LONGEST = 200
"""Characters of a problem."""


class Refused(Exception):
    """The file is not one that validators accept; the message says why."""


def main() -> None:
    """Answer with the report that `validators.inspection.inspect_file` describes."""
    request = probe.request()
    try:
        import torch
    except ImportError as error:
        probe.reply(error=f"torch is not there ({error}); validators load the file with it")
        return
    torch.set_num_threads(1)
    path, limits = request["path"], request["limits"]
    try:
        size = os.stat(path).st_size
    except OSError as error:
        probe.reply(error=f"{path}: {error.strerror}")
        return
    shapes = None if request["shapes"] is None else Shapes(request["shapes"], frozenset(request["optional"]))
    probe.reply(examine(torch, path, size, limits, shapes, request["memory_bytes"], request["cpu_s"]))


def examine(
    torch: Any, path: str, size: int, limits: Mapping[str, Any], shapes: Shapes | None,
    memory_bytes: int | None, cpu_s: float,
) -> dict[str, Any]:  # fmt: skip
    """The report on a file of `size` bytes; `memory_bytes` beyond what is taken now limits this process for good."""
    report: dict[str, Any] = {"size_bytes": size, "problems": [], "warnings": [], "params": 0}
    try:
        _check_size(size, limits.get("gradients_max_bytes"))
        if memory_bytes is not None:
            _restrict(memory_bytes + 3 * size, cpu_s)
        _check_claims(path, size)
        return {**report, **_look(torch, _load(torch, path), limits, shapes, size)}
    except Refused as refusal:
        return {**report, "problems": [str(refusal)]}
    except MemoryError:
        return {**report, "problems": [f"needs more memory than is allowed for a file of {size} bytes"]}
    except Exception as error:  # noqa: BLE001 -- torch raises anything on tensors of an odd kind; reported as a problem
        # Not unknown, which lets an upload pass: what can't be judged here a validator can't use either.
        return {**report, "problems": [f"cannot be looked into: {type(error).__name__}: {_gist(str(error))}"]}


def _check_size(size: int, most: int | None) -> None:
    if size == 0:
        raise Refused("the file is empty")
    if most is not None and size > most:
        raise Refused(f"{size} bytes, more than a plausible {most}")


def _check_claims(path: str, size: int) -> None:
    if not zipfile.is_zipfile(path):
        return
    try:
        with zipfile.ZipFile(path) as archive:
            claimed = sum(entry.file_size for entry in archive.infolist())
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise Refused(f"truncated or damaged: {error}") from error
    # torch stores without compression, so contents beyond the file's own size are a bomb or a lie.
    if claimed > size:
        raise Refused(f"claims {claimed} bytes inside a file of {size}")


def _restrict(memory_bytes: int, cpu_s: float) -> None:
    with open("/proc/self/statm") as file:
        taken = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + memory_bytes, taken + memory_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (int(cpu_s) + 1, int(cpu_s) + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _load(torch: Any, path: str) -> Mapping[str, Any]:
    try:
        document = torch.load(path, map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception as error:
        # A hostile file may raise anything; all of it means refused.
        words = _gist(str(error))
        if "alloc" in words or "memory" in words.lower():
            raise Refused(f"needs more memory than allowed: {words}") from error
        raise Refused(f"does not load with weights_only=True: {type(error).__name__}: {words}") from error
    if not isinstance(document, dict):
        raise Refused(f"holds a {type(document).__name__}, not a dictionary")
    return document


def _gist(text: str) -> str:
    """Of torch's long explanation the part that names the culprit."""
    words = " ".join(text.split()).partition(" Check the documentation")[0]
    for mark in ("Unsupported global:", "Unsupported operand", "WeightsUnpickler error:", "PytorchStreamReader"):
        if mark in words:
            return words[words.index(mark) :][:120]
    return words[:120]


def _look(
    torch: Any, document: Mapping[str, Any], limits: Mapping[str, Any], shapes: Shapes | None, size: int
) -> dict[str, Any]:
    index, value = limits["gradients_index_suffix"], limits["gradients_value_suffix"]
    key = limits.get("gradients_metadata_key")
    problems: list[str] = []
    if key is not None and key not in document:
        problems.append(f"lacks the key {key!r}: validators pop it")
    names = sorted({k[: -len(s)] for k in document for s in (index, value) if isinstance(k, str) and k.endswith(s)})
    plain = {name: plain_name(name) for name in names}
    warnings = []
    if shapes is not None and names and not any(of in shapes.of for of in plain.values()):
        warnings = [f"none of its {len(names)} parameters is of the model that was diagnosed here"]
        shapes = None
    something = False
    for name in names:
        indices, numbers = document.get(name + index), document.get(name + value)
        shape = None if shapes is None else shapes.of.get(plain[name])
        wrong = [
            *_of_parameter(
                torch, name, indices, numbers, shape, shapes is not None, limits.get("gradients_chunk"), size
            ),
            *_of_quantisation(torch, name, document.get(f"{name}quant_params")),
        ]
        problems += wrong
        something = something or bool(wrong) or bool(_computable(numbers).any())
    if not names:
        problems.append(f"holds no `<param>{index}` and `<param>{value}`")
    elif not something:
        problems.append(ALL_ZERO)
    missing = [] if shapes is None else sorted(set(shapes.of) - shapes.optional - set(plain.values()))
    if missing:
        warnings.append(f"{len(missing)} of the model's parameters are missing, {missing[0]} among them")
    return {
        "params": len(names),
        "problems": [*map(_shown, problems[:_MOST_PROBLEMS]), *_further(problems)],
        "warnings": warnings,
        "shapes_known": shapes is not None,
    }


def _shown(words: str) -> str:
    """Of any length and with any characters are a file's names: here they are short, and can be written anywhere."""
    return words[:_LONGEST].encode("utf-8", "backslashreplace").decode()


def _further(problems: Sequence[str]) -> Iterator[str]:
    if len(problems) > _MOST_PROBLEMS:
        yield f"and {len(problems) - _MOST_PROBLEMS} more"


def _of_parameter(
    torch: Any, name: str, indices: Any, numbers: Any, shape: Sequence[int] | None, all_known: bool,
    chunk: int | None, size: int,
) -> Iterator[str]:  # fmt: skip
    for what, tensor in (("indices", indices), ("values", numbers)):
        if not isinstance(tensor, torch.Tensor):
            yield f"{name}: {what} are missing" if tensor is None else f"{name}: {what} are a {type(tensor).__name__}"
            return
        if tensor.layout is not torch.strided or tensor.device.type != "cpu":
            yield f"{name}: {what} are {tensor.layout} on {tensor.device}, not a plain tensor"
            return
        # A view with stride 0 claims any size and costs nothing until somebody computes with it.
        if tensor.numel() * tensor.element_size() > size:
            yield f"{name}: claims {tensor.numel()} {what} in a file of {size} bytes"
            return
    if tuple(indices.shape) != tuple(numbers.shape):
        yield f"{name}: {list(indices.shape)} indices for {list(numbers.shape)} values"
    if indices.is_floating_point() or indices.is_complex() or indices.dtype == torch.bool:
        yield f"{name}: indices are {indices.dtype}, not whole numbers"
        return
    if numbers.is_complex():
        yield f"{name}: values are {numbers.dtype}, not real numbers"
    if not _finite(torch, numbers):
        yield f"{name}: NaN or Inf in the values"
    if shape is None and all_known:
        yield f"{name}: the model has no such parameter"
    yield from _bounds(name, indices, shape, chunk)


def _computable(tensor: Any) -> Any:
    """The same numbers in a type that torch computes with: of float8 and unsigned integers it knows next to nothing."""
    if tensor.is_floating_point():
        return tensor.float() if tensor.element_size() == 1 else tensor
    return tensor.long() if str(tensor.dtype) in ("torch.uint16", "torch.uint32", "torch.uint64") else tensor


def _finite(torch: Any, value: Any) -> bool:
    """Whether a number, or all of a tensor's, are finite; what is neither has none that are not."""
    if isinstance(value, torch.Tensor):
        return bool(torch.isfinite(_computable(value)).all())
    return not isinstance(value, float) or math.isfinite(value)


def _of_quantisation(torch: Any, name: str, parameters: Any) -> Iterator[str]:
    """Shift, scale and lookup table of quantised values: what is NaN there is NaN in the decoded gradient."""
    # Not into lists of lists: a small file can hold more of them than anybody can walk through.
    if not all(_finite(torch, item) for item in (parameters if isinstance(parameters, (list, tuple)) else ())):
        yield f"{name}: NaN or Inf in the quantisation's parameters"


def _bounds(name: str, indices: Any, shape: Sequence[int] | None, chunk: int | None) -> Iterator[str]:
    bound: int | None = None
    if shape is not None:
        fitting = [b for rows, b in layouts(shape, chunk) if rows is None or rows == list(indices.shape[:-1])]
        if not fitting:
            yield f"{name}: indices of shape {list(indices.shape)} for a parameter of {list(shape)}"
            return
        bound = max(fitting)
    if not indices.numel():
        return
    known = _computable(indices)
    least, most = int(known.min()), int(known.max())
    if least < 0 or (bound is not None and most >= bound):
        wrong, last = least if least < 0 else most, "?" if bound is None else bound - 1
        yield f"{name}: index {wrong} is out of bounds (0 to {last})"


if __name__ == "__main__":
    main()
