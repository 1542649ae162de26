"""Applies a gradients document as a validator does, to report anything that would make a validator
raise, skip values or score zero.

Needs torch; opens no file. The inspecting child calls it for a file that it has loaded
(`miner_guard.validators.inspect_gradients`), rank 0 for the document that it is about to write
(`validators.in_memory`): both run the same code, so both report the same problems in the same
words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from miner_guard.validators.decoding import ENORMOUS, Decoded, Format, Unusable, decode, stored
from miner_guard.validators.gradients import ALL_ZERO
from miner_guard.validators.shapes import Shapes, plain_name

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
    document: Mapping[str, Any],
    *,
    limits: Mapping[str, Any],
    shapes: Shapes | None,
    size: int,
    each: Callable[[Iterable[str]], Iterable[str]] = iter,
) -> dict[str, Any]:
    """Report on a document of `size` bytes. Checks the model's parameters if their names are known,
    otherwise the document's.

    `each` wraps the iteration over the names, so that it can release the pages read for one
    parameter before the next. Raises RejectedFile.
    """
    form = Format.of(limits)
    if form.inside is not None:
        inner = document.get(form.inside)
        if not isinstance(inner, dict):
            raise RejectedFile(f"has no {form.inside!r} dictionary containing the gradients")
        document = inner
    key = limits.get("gradients_metadata_key")
    problems: list[str] = []
    if key is not None and key not in document:
        problems.append(f"lacks the key {key!r}, which validators require")
    named = _named(document, form)
    if not named:
        problems.append(f"has no `<param>{form.index_suffix}` and `<param>{form.value_suffix}`")
    # Validators unwrap the model before they read its state, so they know no wrapper's name.
    names = [name for name in named if plain_name(name) == name] if shapes is None else shapes.of
    decoded, wrong, warned = _decoded(
        torch, document, each(names), shapes=shapes, form=form, size=size
    )
    problems += wrong
    if form.complete and shapes is not None:
        held = [name for name in named if document.get(name + form.index_suffix) is not None]
        foreign = [name for name in held if name not in shapes.of]
        problems += [f"{name}: the model has no such parameter" for name in foreign[:1]]
    if named and not problems:
        problems += _worthless(decoded, named, shapes)
    unnamed, missing = _compared(named, decoded, shapes)
    return {
        "params": len(decoded) or (len(named) if wrong else 0),
        "problems": [*map(_shown, problems[:_MAX_PROBLEMS]), *_further(problems)],
        "warnings": [*map(_shown, [*_summed(unnamed), *missing, *warned[:_MAX_PROBLEMS]])],
        "shapes_known": shapes is not None,
    }


def _named(document: Mapping[str, Any], form: Format) -> list[str]:
    """Names of the parameters that have an entry in the file."""
    ends = (form.index_suffix, form.value_suffix)
    return sorted(
        {k[: -len(s)] for k in document for s in ends if isinstance(k, str) and k.endswith(s)}
    )


def _decoded(
    torch: Any,
    document: Mapping[str, Any],
    names: Iterable[str],
    *,
    shapes: Shapes | None,
    form: Format,
    size: int,
) -> tuple[dict[str, Decoded], list[str], list[str]]:
    """Decoded parameters by name, problems that would make a validator raise, and warnings."""
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
                absent = "indices" if entry.indices is None else "values"
                warned.append(f"{name}: {absent} are missing; validators skip the parameter")
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
    elif not any(decoded.something for decoded in applied.values()):
        yield ALL_ZERO
    elif 2 * sum(d.enormous for d in applied.values()) >= sum(d.values for d in applied.values()):
        yield (
            f"values beyond {ENORMOUS:.0e}: the loss after applying them is NaN, which scores zero"
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
