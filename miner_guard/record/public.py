"""What a raw line of the miner's output may say outside this machine.

A list of secrets' shapes is never complete: a new service invents a new prefix. So a line that goes
into an incident, an alert, a report or the bundle keeps only what cannot be a secret: ordinary
words, numbers, identifiers made of words, paths, and file names with line numbers. Everything else
becomes `[…]`. Standard library only; takes time linear in the text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

GONE = "[…]"

_RUN = re.compile(r"[\w.+/=~@%:-]+|\s+|.", re.DOTALL)
"""Splits a line into runs that a secret could fill, white space, and single other characters."""

_ATOM = re.compile(r"[A-Za-z]+|[^A-Za-z]+")
_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[A-Z]")

_NUMBER = re.compile(
    r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d{1,15})(?:\.\d{1,12})?(?:e[+-]?\d{1,3})?"
    r"(?:%|[a-zA-Zµ]{1,3}(?:/s|/it)?|it/s|ms|bytes|tokens|seconds|MiB|GiB|KiB)?"
)
_STAMP = re.compile(
    r"\d{4}-\d\d-\d\dT?(?:\d\d:\d\d:\d\d(?:[.,]\d{1,9})?Z?)?|\d{1,2}:\d\d(?::\d\d(?:[.,]\d{1,9})?)?"
)
_VERSION = re.compile(
    r"v?\d{1,4}(?:\.\d{1,6}){1,4}(?:\.?(?:post|dev|rc|a|b)\d{1,3})?(?:\+(?:cu\d{2,3}|cpu))?"
)
_SMALL = re.compile(r"[A-Za-z]{1,8}\d{1,4}|\d{1,4}[A-Za-z]{1,4}|[a-z]\d{1,2}[a-z]|x86|amd64|sm\d\d")
"""Names with a number, such as `rank0`, `c10d`, `bf16`, `H100` or `cu121`: short enough that a
secret cannot hide in one."""

_JOINT = re.compile(r"([._/:=+@%~-]+)")
_MAX_WORD = 24
_MAX_ACRONYM = 8
_SURE = 12
"""A lower-case word of at most this length needs a vowel; a longer one also the mix of an ordinary
word."""

_MIN_VOWELS, _MAX_VOWELS = 0.26, 0.62
_CONSONANTS = re.compile(
    r"[bcdfghjklmnpqrstvwxz]{6}|q[^u]|[jqv][bcdfghjkmnpqrvwxz]|([a-z])\1\1", re.IGNORECASE
)

_NAMED_SECRET = re.compile(
    r"(?i)(\b(?:[\w-]{0,32}[_-])?(?:pass(?:word|wd|phrase)?|pwd|pw|token|secret|key|auth|credential|api_?key"
    r"|access_?key|private_?key|seed|pin|otp|cookie|session(?:id)?|signature|sig|login|bearer|basic)s?"
    r"(?:[\"']|\\{1,4}[\"'])?\s{0,3}(?::=|[=:])\s{0,3}|\b(?:authorization|x-[\w-]{1,32})(?:[\"'])?\s{0,3}[=:]\s{0,3}"
    r"(?:[\"'])?(?:\w{1,12}\s)?|\b(?:bearer|basic|token|password|passphrase)\s)(?P<value>[^\s,;)}\]]{3,})"
)
"""After such a name even an ordinary word is a secret."""

_USER_AT = re.compile(r"(://)[^\s/@\"']{1,512}@")
_PLAIN_VALUE = re.compile(
    r"[\"']?(?:\d{1,9}(?:\.\d+)?|none|null|true|false|error|invalid|missing|expired|is|was|not|must|cannot|required|unset|empty)\b[\"'.]*",
    re.IGNORECASE,
)

_STOP = re.compile(
    r"the|and|for|was|not|has|are|from|been|were|but|its|did|had|her|him|his|off|our|per|too|via|who"
    r"|why|yet|failed|error|warning|using|loading|found|file|line|step|loss|rank|device|module"
    r"|training|redacted"
)
"""Frequent words of logs that are not in the list of mnemonic words (BIP 39); they end a phrase."""

_PHRASE_WORDS = 8
"""So many words in a row that could all be of a mnemonic are taken for one. A phrase has 12 to 24;
a truncated line may hold fewer."""

_CANDIDATE = re.compile(r"[A-Za-z]+")
_GAP = re.compile(r"(?=\d*[^\dA-Za-z])[^A-Za-z/_=]{1,24}")
_LONE = re.compile(r"(?m)^[^A-Za-z\n]{0,24}[a-z]{3,8}[^A-Za-z\n]{0,8}$")


def public(text: str) -> str:
    """Return `text` without anything that could be a secret."""
    text = _USER_AT.sub(rf"\1{GONE}@", text)
    text = _NAMED_SECRET.sub(_hide_value, text)
    text = _without_phrases(text)
    return "".join(_shown(run) for run in _RUN.findall(text.replace(GONE, "\0"))).replace(
        "\0", GONE
    )


def public_values(value: Any) -> Any:
    """`value` with `public` applied to every string in it; the keys of mappings stay."""
    if isinstance(value, Mapping):
        return {key: public_values(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [public_values(each) for each in value]
    return public(value) if isinstance(value, str) else value


def _hide_value(match: re.Match[str]) -> str:
    value = match["value"]
    if _PLAIN_VALUE.fullmatch(value) or match.string.startswith(f" {GONE}", match.end()):
        return match[0]
    return match[0][: -len(value)] + GONE


def _without_phrases(text: str) -> str:
    """Hide mnemonics: on one line, numbered, as JSON, or one word a line."""
    text = _LONE.sub(GONE, text)
    hidden: list[tuple[int, int]] = []
    row: list[re.Match[str]] = []

    def end() -> None:
        if len(row) >= _PHRASE_WORDS:
            hidden.append((row[0].start(), row[-1].end()))
        row.clear()

    for word in _CANDIDATE.finditer(text):
        if row and not _GAP.fullmatch(text, row[-1].end(), word.start()):
            end()
        if 3 <= len(word[0]) <= 8 and word[0].islower() and not _STOP.fullmatch(word[0]):
            row.append(word)
        else:
            end()
    end()
    for start, stop in reversed(hidden):
        text = text[:start] + GONE + text[stop:]
    return text


def _shown(run: str) -> str:
    if not run.strip() or (not run[0].isalnum() and len(run) == 1):
        return run
    pieces = _JOINT.split(run)
    if all(_harmless(piece) for piece in pieces[::2]) and len(run) <= 256:
        return run
    if _STAMP.fullmatch(run.strip(".:")) or _NUMBER.fullmatch(run.strip(".:")):
        return run
    if run.startswith(("/", "~/", "./")) or ":" in run or "=" in run:
        # Of a path, an assignment or an address the harmless parts stay.
        return "".join(
            piece if place % 2 or _harmless(piece) else GONE for place, piece in enumerate(pieces)
        )
    return GONE


def _harmless(piece: str) -> bool:
    """Return True if a piece without separators is a word, a number or a short name."""
    if piece in ("", "\0") or (piece.isdigit() and len(piece) <= 15):
        return True
    if _NUMBER.fullmatch(piece) or _SMALL.fullmatch(piece) or _VERSION.fullmatch(piece):
        return True
    if not piece.isascii():
        return not any(char.isascii() and char.isalnum() for char in piece)
    words = (
        piece.rstrip("0123456789") if len(piece) - len(piece.rstrip("0123456789")) <= 3 else piece
    )
    return words.isalpha() and len(words) <= 2 * _MAX_WORD and _is_name(words)


def _is_name(letters: str) -> bool:
    if len(letters) <= 3:
        return True
    parts = _PART.findall(letters)
    if len(parts) > 2 and len(letters) < 4 * len(parts):
        return False
    return all(_is_word(part) for part in parts)


def _is_word(letters: str) -> bool:
    """Return True if the letters look like a word or an acronym."""
    if len(letters) <= 3 or (letters.isupper() and len(letters) <= _MAX_ACRONYM):
        return True
    if len(letters) > _MAX_WORD or _CONSONANTS.search(letters):
        return False
    share = sum(char in "aeiouyAEIOUY" for char in letters) / len(letters)
    if len(letters) <= _SURE:
        return share > 0 or len(letters) <= 5
    return _MIN_VOWELS <= share <= _MAX_VOWELS
