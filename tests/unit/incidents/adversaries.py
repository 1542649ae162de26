"""Texts designed to make each pattern as slow as possible: every beginning of a match, repeated to
fill the text."""

from __future__ import annotations

import base64
import random
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from miner_guard.incidents.knowledge import Pattern

if sys.version_info >= (3, 11):
    from re import _constants as sre
    from re import _parser as sre_parse
else:
    import sre_constants as sre
    import sre_parse

_CATEGORIES = {
    sre.CATEGORY_DIGIT: "7",
    sre.CATEGORY_SPACE: " ",
    sre.CATEGORY_WORD: "a",
    sre.CATEGORY_NOT_DIGIT: "a",
    sre.CATEGORY_NOT_SPACE: "a",
    sre.CATEGORY_NOT_WORD: "-",
}
_PROBES = "a 7-.:/_(\"'=\\qz"


def adversaries(pattern: str, size: int) -> Iterator[str]:
    """Texts of about `size` characters, without duplicates."""
    seen: set[str] = set()
    for prefix, loop in _beginnings(list(sre_parse.parse(pattern))):
        for text in (
            _repeat(prefix, size),
            prefix + _repeat(loop, size),
            _repeat(prefix + loop * 8, size),
        ):
            if text and text not in seen:
                seen.add(text)
                yield text


def _repeat(unit: str, size: int) -> str:
    return unit * (size // len(unit)) if unit else ""


def _beginnings(items: list[Any]) -> Iterator[tuple[str, str]]:
    """The texts that match the first items of a sequence, with a unit that one of its loops
    accepts."""
    done = ""
    for op, argument in items:
        for inner, loop in _inside(op, argument):
            yield done + inner, loop
        done += _witness(op, argument)
        yield done, ""


def _inside(op: Any, argument: Any) -> Iterator[tuple[str, str]]:
    if op is sre.BRANCH:
        for branch in argument[1]:
            yield from _beginnings(list(branch))
    elif op is sre.SUBPATTERN:
        yield from _beginnings(list(argument[3]))
    elif op in (sre.MAX_REPEAT, sre.MIN_REPEAT):
        yield "", "".join(_witness(*item) for item in argument[2])
        yield from _beginnings(list(argument[2]))
    elif op in (sre.ASSERT, sre.ASSERT_NOT):
        yield from _beginnings(list(argument[1]))


def _witness(op: Any, argument: Any) -> str:
    """A short text that the item matches; the first alternative of a choice."""
    if op is sre.LITERAL:
        return chr(argument)
    if op is sre.NOT_LITERAL:
        return next(probe for probe in _PROBES if ord(probe) != argument)
    if op is sre.ANY:
        return "a"
    if op is sre.IN:
        return _member(argument)
    if op is sre.BRANCH:
        return "".join(_witness(*item) for item in argument[1][0])
    if op is sre.SUBPATTERN:
        return "".join(_witness(*item) for item in argument[3])
    if op in (sre.MAX_REPEAT, sre.MIN_REPEAT):
        return "".join(_witness(*item) for item in argument[2]) * max(argument[0], 1)
    return ""


def _member(members: list[Any]) -> str:
    if members[0][0] is sre.NEGATE:
        out = [m for m in members if m[0] is not sre.NEGATE]
        return next(probe for probe in _PROBES if not any(_holds(m, probe) for m in out))
    op, argument = members[0]
    if op is sre.CATEGORY:
        return _CATEGORIES[argument]
    return chr(argument[0] if op is sre.RANGE else argument)


def _holds(member: Any, text: str) -> bool:
    op, argument = member
    if op is sre.LITERAL:
        return ord(text) == argument
    if op is sre.RANGE:
        return bool(argument[0] <= ord(text) <= argument[1])
    return {
        sre.CATEGORY_DIGIT: text.isdigit(),
        sre.CATEGORY_SPACE: text.isspace(),
        sre.CATEGORY_WORD: text.isalnum() or text == "_",
    }.get(argument, True)


def distinct(entries: Iterable[Pattern]) -> list[Pattern]:
    """Entries with a regex, keeping only one of those that differ just in numbers, as Xid entries
    do."""
    kinds = {re.sub(r"\d+", "0", e.expression): e for e in entries if e.expression is not None}
    return list(kinds.values())


def hostile() -> dict[str, bytes]:
    """Text without an error that once held up the guard."""
    chance = random.Random(5)
    raw = chance.randbytes(3_000_000)

    def metagraph(extra: str) -> bytes:
        neuron = (
            '{"uid":%d,"hotkey":"5F%030x","coldkey":"5G%030x","stake":%f,"axon":"10.0.0.1:8091"'
        )
        return ",".join(
            neuron % (uid, chance.getrandbits(120), chance.getrandbits(120), chance.random())
            + f"{extra}}}"
            for uid in range(256)
        ).encode()

    plain = metagraph("")
    return {
        "base64 on one line": base64.b64encode(raw) + b"\n",
        "base64 in lines": base64.encodebytes(raw),
        "random bytes": raw,
        "NULs": bytes(4_000_000),
        "a metagraph of 256 neurons a line": (b'{"neurons":[' + plain + b"]}\n") * 100,
        "metagraphs on one line": plain * 100 + b"\n",
        "a metagraph whose keys are trigger words": (
            b'{"neurons":[' + metagraph(',"error":null,"timeout":12,"failed":0') + b"]}\n"
        )
        * 100,
        "a metagraph full of trigger words": (
            b'{"neurons":['
            + metagraph(',"permission":"denied? no wallet","status":"error 429, retrying"')
            + b"]}\n"
        )
        * 100,
        "one word of a pattern over and over": b"hotkey " * 500_000 + b"\n",
        "trigger words on lines of a megabyte": (
            b"wallet permission denied password hotkey " * 25_000 + b"\n"
        )
        * 3,
    }
