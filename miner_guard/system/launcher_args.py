"""Reads arguments from a launcher's command line. Pure; works for any launcher."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def value_of(command: Sequence[str], *names: str) -> str | None:
    """The value of the last argument with one of these names (`--name=value` or `--name value`);
    None if the command has no such argument.

    The last one wins, as in argument parsers. `-` and `_` in a name are equivalent, as in torchrun.
    """
    flags = {_normalised(name) for name in names}
    words = list(_words(command))
    value = None
    for place, word in enumerate(words):
        name, equals, after = word.partition("=")
        if name.startswith("--") and _normalised(name) in flags:
            value = after if equals else (words[place + 1] if place + 1 < len(words) else None)
    return value


def number_of(command: Sequence[str], *names: str) -> int | None:
    """`value_of` as a whole number; None if the value is not a whole number, as in
    `--nproc-per-node=gpu`."""
    value = value_of(command, *names)
    return int(value) if value is not None and value.isascii() and value.isdigit() else None


def _normalised(name: str) -> str:
    return name.replace("_", "-")


def _words(command: Sequence[str]) -> Iterator[str]:
    """The command's arguments, split at white space: `sh -c "torchrun --nnodes 2 train.py"` passes
    the launcher's command line as one argument."""
    for word in command:
        yield from word.split() or [word]
