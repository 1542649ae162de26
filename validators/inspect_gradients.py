"""Child process that opens a gradients file: `python -m validators.inspect_gradients`, see
`validators.inspection`.

Loads the file as a validator does (`weights_only=True`: tensors and plain containers, no code) and
checks the result. Limits memory and CPU time before it touches the file.
"""

from __future__ import annotations

import os
import resource
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from miner_guard.system import probe
from validators.decoding import ENORMOUS, Decoded, Format, Unusable, decode, stored
from validators.gradients import ALL_ZERO
from validators.mapped_file import MappedFile
from validators.shapes import Shapes, plain_name

_MAX_PROBLEMS = 8
_ZIP = b"PK\x03\x04"
_MAX_LENGTH = 200
"""Maximum characters of a problem."""


class RejectedFile(Exception):
    """Validators do not accept the file; the message says why."""


def main() -> None:
    """Write the report that `validators.inspection.inspect_file` describes."""
    request = probe.request()
    try:
        import torch
    except ImportError as error:
        probe.reply(error=f"torch cannot be imported ({error}); validators load the file with it")
        return
    torch.set_num_threads(1)
    path, limits = request["path"], request["limits"]
    try:
        size = os.stat(path).st_size
    except OSError as error:
        probe.reply(error=f"{path}: {error.strerror}")
        return
    shapes = (
        None
        if request["shapes"] is None
        else Shapes(request["shapes"], frozenset(request["optional"]))
    )
    probe.reply(
        examine(
            torch,
            path,
            size,
            limits=limits,
            shapes=shapes,
            memory_bytes=request["memory_bytes"],
            cpu_s=request["cpu_s"],
        )
    )


def examine(
    torch: Any,
    path: str,
    size: int,
    *,
    limits: Mapping[str, Any],
    shapes: Shapes | None,
    memory_bytes: int | None,
    cpu_s: float,
) -> dict[str, Any]:
    """The report on a file of `size` bytes. Permanently limits this process to `memory_bytes`
    beyond its current use."""
    report: dict[str, Any] = {"size_bytes": size, "problems": [], "warnings": [], "params": 0}
    try:
        _check_size(size, limits.get("gradients_max_bytes"))
        if memory_bytes is not None:
            _restrict(memory_bytes + 3 * size, cpu_s)
        _check_claims(path, size)
        return {
            **report,
            **_look(
                torch, _load(torch, path), MappedFile(path), limits=limits, shapes=shapes, size=size
            ),
        }
    except RejectedFile as refusal:
        return {**report, "problems": [str(refusal)]}
    except MemoryError:
        return {
            **report,
            "problems": [f"needs more memory than is allowed for a file of {size} bytes"],
        }
    except Exception as error:  # noqa: BLE001 -- torch may raise anything on unusual tensors; reported as a problem
        # Reject instead of `unknown`, which lets an upload pass: a file that fails here fails in a
        # validator too.
        return {
            **report,
            "problems": [f"cannot be inspected: {type(error).__name__}: {_gist(str(error))}"],
        }


def _check_size(size: int, most: int | None) -> None:
    if size == 0:
        raise RejectedFile("the file is empty")
    if most is not None and size > most:
        raise RejectedFile(f"{size} bytes, more than a plausible {most}")


def _check_claims(path: str, size: int) -> None:
    if not zipfile.is_zipfile(path):
        return
    try:
        with zipfile.ZipFile(path) as archive:
            claimed = sum(entry.file_size for entry in archive.infolist())
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise RejectedFile(f"truncated or damaged: {error}") from error
    # torch stores without compression, so contents larger than the file indicate a zip bomb or a
    # false header.
    if claimed > size:
        raise RejectedFile(f"claims {claimed} bytes inside a file of {size}")


def _restrict(memory_bytes: int, cpu_s: float) -> None:
    with open("/proc/self/statm") as file:
        taken = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + memory_bytes, taken + memory_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (int(cpu_s) + 1, int(cpu_s) + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _load(torch: Any, path: str) -> Mapping[str, Any]:
    try:
        # Map the file, so that a parameter's values occupy memory only while in use; torch's older
        # format does not support mapping.
        with open(path, "rb") as file:
            mapped = file.read(4) == _ZIP
        document = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except MemoryError:
        raise
    except Exception as error:
        # A hostile file may raise any exception; every one means rejection.
        words = _gist(str(error))
        if "alloc" in words or "memory" in words.lower():
            raise RejectedFile(f"needs more memory than allowed: {words}") from error
        raise RejectedFile(
            f"does not load with weights_only=True: {type(error).__name__}: {words}"
        ) from error
    if not isinstance(document, dict):
        raise RejectedFile(f"holds a {type(document).__name__}, not a dictionary")
    return document


def _gist(text: str) -> str:
    """The phrase of torch's long explanation that names the cause."""
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


def _look(
    torch: Any,
    document: Mapping[str, Any],
    pages: MappedFile,
    *,
    limits: Mapping[str, Any],
    shapes: Shapes | None,
    size: int,
) -> dict[str, Any]:
    """Apply the file as a validator does: by the model's parameter names if known, else by the
    file's."""
    form = Format.of(limits)
    if form.inside is not None:
        inner = document.get(form.inside)
        if not isinstance(inner, dict):
            raise RejectedFile(f"lacks a dictionary {form.inside!r}, which holds the gradients")
        document = inner
    key = limits.get("gradients_metadata_key")
    problems: list[str] = []
    if key is not None and key not in document:
        problems.append(f"lacks the key {key!r}: validators pop it")
    named = _named(document, form)
    if not named:
        problems.append(f"holds no `<param>{form.index_suffix}` and `<param>{form.value_suffix}`")
    # Validators unwrap the model before they read its state, so they know no wrapper's name.
    names = [name for name in named if plain_name(name) == name] if shapes is None else shapes.of
    each = pages.released_after_each(names)
    applied, wrong, warned = _applied(torch, document, each, shapes=shapes, form=form, size=size)
    problems += wrong
    if form.complete and shapes is not None:
        held = [name for name in named if document.get(name + form.index_suffix) is not None]
        foreign = [name for name in held if name not in shapes.of]
        problems += [f"{name}: the model has no such parameter" for name in foreign[:1]]
    if named and not problems:
        problems += _worthless(applied, named, shapes)
    unnamed, missing = _compared(named, applied, shapes)
    return {
        "params": len(applied) or (len(named) if wrong else 0),
        "problems": [*map(_shown, problems[:_MAX_PROBLEMS]), *_further(problems)],
        "warnings": [*map(_shown, [*_summed(unnamed), *missing, *warned[:_MAX_PROBLEMS]])],
        "shapes_known": shapes is not None,
    }


def _named(document: Mapping[str, Any], form: Format) -> list[str]:
    """Names of the parameters with any entry in the file."""
    ends = (form.index_suffix, form.value_suffix)
    return sorted(
        {k[: -len(s)] for k in document for s in ends if isinstance(k, str) and k.endswith(s)}
    )


def _applied(
    torch: Any,
    document: Mapping[str, Any],
    names: Iterable[str],
    *,
    shapes: Shapes | None,
    form: Format,
    size: int,
) -> tuple[dict[str, Decoded], list[str], list[str]]:
    """Decoded parameters by name, what a validator would raise on, and warnings."""
    applied: dict[str, Decoded] = {}
    problems, warned = [], []
    for name in names:
        entry = stored(document, name, form)
        if form.complete and (entry.indices is None or entry.values is None):
            problems.append(
                f"{name}: indices or values are missing, and validators accept only whole models"
            )
            continue
        if entry.indices is None or entry.values is None:
            if entry.indices is not None or entry.values is not None:
                lacking = "indices" if entry.indices is None else "values"
                warned.append(f"{name}: {lacking} are missing, validators skip the parameter")
            continue
        try:
            applied[name] = decode(
                torch, entry, None if shapes is None else shapes.of.get(name), form=form, size=size
            )
        except Unusable as why:
            problems.append(f"{name}: {why}")
            continue
        if (words := applied[name].warning) is not None:
            warned.append(f"{name}: {words}")
    return applied, problems, warned


def _worthless(
    applied: Mapping[str, Decoded], named: Sequence[str], shapes: Shapes | None
) -> Iterator[str]:
    """Why a file that every validator decodes without error still scores zero."""
    wrapped = [name for name in named if plain_name(name) != name]
    if not applied and wrapped:
        yield (
            f"{wrapped[0]}: validators know this parameter as {plain_name(wrapped[0])} and "
            "skip it, like all others"
        )
    elif not applied and shapes is not None:
        yield (
            f"none of its {len(named)} parameters belongs to the model in training; "
            "validators skip them all"
        )
    elif not any(decoded.something for decoded in applied.values()):
        yield ALL_ZERO
    elif 2 * sum(d.enormous for d in applied.values()) >= sum(d.values for d in applied.values()):
        yield f"values beyond {ENORMOUS:.0e}: the loss after them is NaN, which scores zero"


def _compared(
    named: Sequence[str], applied: Mapping[str, Decoded], shapes: Shapes | None
) -> tuple[list[str], list[str]]:
    """Names that the model lacks, and a warning if the file lacks some of the model's
    parameters."""
    if shapes is None:
        return [name for name in named if plain_name(name) != name], []
    missing = sorted(set(shapes.of) - shapes.optional - set(named))
    words = (
        [f"{len(missing)} of the model's parameters are missing, {missing[0]} among them"]
        if missing
        else []
    )
    return [name for name in named if name not in shapes.of], words if applied else []


def _summed(unnamed: Sequence[str]) -> Iterator[str]:
    if unnamed:
        yield (
            f"validators skip {len(unnamed)} parameters whose names they do not know, "
            f"{unnamed[0]} among them"
        )


def _shown(words: str) -> str:
    """Truncate and escape: a file's names may be of any length and contain any characters."""
    return words[:_MAX_LENGTH].encode("utf-8", "backslashreplace").decode()


def _further(problems: Sequence[str]) -> Iterator[str]:
    if len(problems) > _MAX_PROBLEMS:
        yield f"and {len(problems) - _MAX_PROBLEMS} more"


if __name__ == "__main__":
    main()
