"""Cleans up a log line: removes prefixes, colour codes and extra spaces."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

MAX_LINE = 16384
"""Longer lines are scanned in pieces of this many bytes."""

OVERLAP = 1024
"""Bytes that consecutive pieces of a line share, so that no message is split."""

_ANSI = re.compile(
    rb"\x1b(?:_[^\x07\x1b]*(?:\x07|\x1b\\)|\[[0-?]*[ "
    rb"-/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])"
)
_ANSI_WITHOUT_ESC = re.compile(rb"\[(?:\d{1,3}(?:;\d{1,3})*)?m(?![a-z])")
"""The ESC is optional, because log collectors often drop it."""

CONTROL = bytes(set(range(32)) - set(b"\t\n") | {127})
"""Control characters that `clean` removes."""

_PREFIX = re.compile(
    r"""
    (?: \d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|\s?[+-]\d\d:?\d\d)?(?::\s|[\s|]+)  # loguru, pm2 --time
      | \[\d{4}-\d\d-\d\d[T _]\d\d:\d\d:\d\d(?:[.,]\d+)?\]\s*
      | \d{1,3}\|[\w.@-]{1,40}\s*\|\s?                                              # pm2
      | \[(?:default|rank)\s?(?P<rank_a>\d{1,5})\]:\s?                              # torchrun --tee, torch
      | \[\d+,(?P<rank_b>\d{1,5})\]<(?:stdout|stderr|stddiag)>:\s?                  # mpirun
      | (?P<rank_c>\d\d?|[1-3]\d\d):\s(?=\s*\S)                                             # srun -l
      | \((?:[\w./:-]+\s+)?pid=\d+(?:,\s*ip=[\d.]+)?\)\s?                           # ray, vLLM
      | [A-Z][a-z]{2}\s+\d{1,2}\s\d\d:\d\d:\d\d\s\S+\s[\w.@/-]+(?:\[\d+\])?:\s?          # syslog
      | (?:stderr|stdout)\s*[|:]\s?
      | (?:\|\s*)?(?:ERROR|CRITICAL|FATAL|INFO|DEBUG|SUCCESS)\s*\|\s?(?:[\w.]+:[\w.<>]+:\d+\s[|-]\s?)?
      | [\w.-]{1,60}\s+\|\s                                                         # docker compose
      | (?:ERROR|INFO)\s\d\d-\d\d\s\d\d:\d\d:\d\d\s\[[\w./]+:\d+\]\s?                 # vLLM
      | [EIF]\d{4}\s\d\d:\d\d:\d\d(?:\.\d+)?\s+\d+\s[\w./-]+:\d+\]\s?                  # glog
      | (?:-\s)?(?:[\w.]+\s)?-\s(?:ERROR|INFO|CRITICAL)\s-\s                                     # logging
      | \|?\s*(?:\[\w+\]\s*)?rank\s(?P<rank_d>\d{1,5})\s*\|\s?                      # subnet 38
    )
    """,
    re.VERBOSE | re.IGNORECASE,
)
_FRAME = '  File "'
_RANK_INSIDE = re.compile(
    r"\[rank\s?(\d{1,5})\]|\brank:?\s(\d{1,5})\s\|"
    r"|\(exitcode: -?\d{1,3}\) local_rank: (\d{1,5}) \(pid",  # torchrun of the first to fail
    re.IGNORECASE,
)
_MAX_PREFIXES = 8
_MAX_PREFIX = 400
"""A prefix ends within this many characters."""


_ENCODED = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/=_-"
_IS_ENCODED = bytes(1 if code in _ENCODED else 0 for code in range(256))
MAX_BLOBLESS = 256
"""No word, path or symbol is this long, so it must be encoded data."""

_BLOB = bytes([1]) * MAX_BLOBLESS

_BLOB_LINE = re.compile(rb"\s*[A-Za-z0-9+/=]{48,}\s*")


def without_blobs(raw: bytes) -> bytes:
    """Remove encoded data such as base64, which may contain short words by chance. The result is
    empty if the line contains nothing else."""
    if b" " not in raw and _BLOB_LINE.fullmatch(raw):
        return b""
    if len(raw) < len(_BLOB):
        return raw
    # Searching bytes that are only 0 or 1 is ten times as fast as using a regular expression.
    kinds = raw.translate(_IS_ENCODED)
    start, begin, kept = 0, kinds.find(_BLOB), []
    while begin >= 0:
        kept.append(raw[start:begin])
        start = kinds.find(0, begin)
        start = len(raw) if start < 0 else start
        begin = kinds.find(_BLOB, start)
    return b" ".join([*kept, raw[start:]]) if kept else raw


def without_colours(raw: bytes) -> bytes:
    """Remove terminal colour codes."""
    # Two searches that each begin with a fixed byte are several times as fast as one search
    # with alternatives.
    if b"\x1b" in raw:
        raw = _ANSI.sub(b"", raw)
    return _ANSI_WITHOUT_ESC.sub(b"", raw) if b"[" in raw else raw


def is_plain(raw: bytes) -> bool:
    """Whether `clean` removes at most a prefix and trailing spaces."""
    return (
        raw.isascii()
        and len(raw.translate(None, CONTROL)) == len(raw)
        and _ANSI_WITHOUT_ESC.search(raw) is None
    )


def clean(raw: bytes) -> tuple[int | None, str]:
    """The rank in a line's prefix, and the line's text, with any spaces after the prefix kept."""
    text = without_colours(raw).translate(None, CONTROL).decode("utf-8", "replace")
    rank: int | None = None
    # A stack frame, the most common line in a log full of errors, has no prefix.
    for _ in range(0 if text.startswith(_FRAME) else _MAX_PREFIXES):
        prefix = _PREFIX.match(text, 0, _MAX_PREFIX)
        if prefix is None:
            break
        named = next((value for value in prefix.groups() if value is not None), None)
        rank = int(named) if named is not None else rank
        text = text[prefix.end() :]
    beginning = text[:_MAX_PREFIX] if rank is None else ""
    if ("ank" in beginning or "ANK" in beginning) and (inside := _RANK_INSIDE.search(beginning)):
        rank = int(inside.group(1) or inside.group(2) or inside.group(3))
    return rank, text.rstrip()


_WORDS = frozenset(
    {
        "msg",
        "message",
        "@message",
        "event",
        "log",
        "text",
        "body",
        "error",
        "err",
        "exception",
        "exc_info",
        "stack",
        "stack_trace",
        "traceback",
    }
)
_OWN = {"event", "msg", "run_id"}
_MAX_TRACEBACK_LINES = 500
"""Maximum number of lines to take from one JSON line."""


def unwrapped(rank: int | None, record: Mapping[str, object]) -> Iterator[tuple[int | None, str]]:
    """The log lines in the fields of a JSON record, and the rest of the record, each with its
    rank."""
    teller = record.get("rank")
    rank = teller if rank is None and isinstance(teller, int) else rank
    if record.keys() >= _OWN:
        # In the guard's own records, the message is complete, and the other fields quote the
        # lines that it explains.
        yield rank, str(record["msg"])
        return
    level = (
        " [warning]"
        if str(record.get("level", record.get("levelname", ""))).lower().startswith("warn")
        else ""
    )
    texts = {
        k: v for k, v in record.items() if isinstance(v, str) and (k.lower() in _WORDS or "\n" in v)
    }
    yield rank, json.dumps({key: value for key, value in record.items() if key not in texts})
    for value in texts.values():
        for line in value.splitlines()[:_MAX_TRACEBACK_LINES]:
            named, inner = clean(line.encode(errors="replace"))
            yield rank if named is None else named, inner + level


def json_record(text: str) -> dict[str, object] | None:
    """The JSON object that makes up the line; None if it is not one."""
    if not (text.startswith('{"') and text.endswith("}")):
        return None
    try:
        record = json.loads(text)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def excerpt(text: str, limit: int = 400, at: int = 0) -> str:
    """Make a line readable: collapse whitespace, and keep `limit` characters from just before
    offset `at`."""
    if not at and len(text) <= limit and text.isprintable() and "  " not in text:
        return text.strip()
    before = max(0, at - limit // 4)
    short = " ".join(text[before : before + 4 * limit].split())
    if before:
        short = "…" + short
    return short if len(short) <= limit else short[: limit - 1] + "…"


def pieces(line: bytes) -> Iterator[bytes]:
    """Split a long line into overlapping pieces. The split points depend only on the line, not on
    how it arrived."""
    start = 0
    while len(line) - start > MAX_LINE:
        yield line[start : start + MAX_LINE]
        start += MAX_LINE - OVERLAP
    yield line[start:]
