"""Reads the lines of a log: removes prefixes and colours, unpacks JSON, and puts each rank's
traceback together up to the exception that ends it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

MAX_LINE = 4096
"""Longer lines are read in pieces of this many bytes."""

OVERLAP = 1024
"""Bytes that consecutive pieces share, so that no message is split."""

MAX_BLOBLESS = 256
"""No word, path or symbol is this long, so it must be encoded data."""

_ANSI = re.compile(
    rb"\x1b(?:_[^\x07\x1b]*(?:\x07|\x1b\\)|\[[0-?]*[ "
    rb"-/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])"
)
_ANSI_WITHOUT_ESC = re.compile(rb"\[(?:\d{1,3}(?:;\d{1,3})*)?m(?![a-z])")
"""Log collectors often drop the ESC."""

_CONTROL = bytes(set(range(32)) - set(b"\t\n") | {127})
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
_RANK_INSIDE = re.compile(
    r"\[rank\s?(\d{1,5})\]|\brank:?\s(\d{1,5})\s\|"
    r"|\(exitcode: -?\d{1,3}\) local_rank: (\d{1,5}) \(pid",  # torchrun of the first to fail
    re.IGNORECASE,
)
_MAX_PREFIXES = 8
_MAX_PREFIX = 400
"""A prefix ends within this many characters."""

_ENCODED = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/=_-"
_IS_ENCODED = bytes(code in _ENCODED for code in range(256))
_BLOB = bytes([1]) * MAX_BLOBLESS
BLOB_LINE = re.compile(rb"\s*[A-Za-z0-9+/=]{48,}\s*")

EXCEPTION = re.compile(
    r"(?:[A-Za-z_]\w*\.)*(?P<name>[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Fault|Failure|Timeout|Violation)"
    r"|[A-Z]\w{0,80}(?:Error|Exception)\w{0,80})(?::\s|\s*$|:$|\()"
)
"""An exception at the beginning of a line."""

_AFTER_FRAMES = re.compile(r"(?:\w+\.)*(?P<name>[A-Z]\w{0,80}|(?:gai|h)?error)(?::\s|$)")
"""An exception whose name reveals little, such as `queue.Empty`; it counts only after frames."""

_MAX_NAME = 400
"""Without it, search time grows with the square of the line's length."""

TRACEBACK = "traceback (most recent call last)"
_IGNORED = ("exception ignored in", "--- logging error ---")
"""Python only prints the traceback that follows; it does not stop the program."""

_RAY = "error): ray::"
"""What Ray prints where an actor's own traceback begins."""

_BEGINS = re.compile(
    r'file "|^\s*file |traceback \(most|error\): ray::|exception ignored in|--- logging error'
)
"""What a line needs to begin a traceback."""

_FRAME = re.compile(
    r'file "([^"]+)", line (\d+)|^file ([^\s:]{1,300}\.py|.:[^\s:]{1,300}\.py):(\d+), in ',
    re.IGNORECASE,
)
_LIBRARIES = ("site-packages/", "dist-packages/", "/lib/python", "<")
"""What the paths of files contain that are not the program's own."""
MAX_STREAMS = 256
"""Ranks whose lines are tracked separately."""

_MAX_TRACEBACK_LINES = 2000
"""A traceback still open after this many lines was cut off."""

_AFTER_IGNORED = 4
"""Lines after an ignored exception that may still belong to it: the logger's message."""

_MAX_CUT_LINES = 200
"""If more lines follow its last frame, the end of the log did not cut the traceback off."""

_MAX_FRAMES = 8192
_RECORD_TEXTS = frozenset(
    {
        *("msg", "message", "@message", "event", "log", "text", "body"),
        *("error", "err", "exception", "exc_info", "stack", "stack_trace", "traceback"),
    }
)
_GUARD_RECORD = {"event", "msg", "run_id"}
_MAX_RECORD_LINES = 500


class LogLine(NamedTuple):
    """A cleaned line."""

    rank: int | None
    number: int
    text: str
    lowered: str


def without_blobs(raw: bytes) -> bytes:
    """Remove encoded data such as base64, which may contain short words by chance."""
    if b" " not in raw and BLOB_LINE.fullmatch(raw):
        return b""
    if len(raw) < MAX_BLOBLESS:
        return raw
    # Searching bytes that are only 0 or 1 is ten times as fast as a regular expression.
    kinds = raw.translate(_IS_ENCODED)
    start, begin, rest = 0, kinds.find(_BLOB), []
    while begin >= 0:
        rest.append(raw[start:begin])
        start = kinds.find(0, begin)
        start = len(raw) if start < 0 else start
        begin = kinds.find(_BLOB, start)
    return b" ".join([*rest, raw[start:]]) if rest else raw


def clean(raw: bytes) -> tuple[int | None, str]:
    """The rank in a line's prefix, and the line's text, with any spaces after the prefix."""
    if b"\x1b" in raw:
        raw = _ANSI.sub(b"", raw)
    if b"[" in raw:
        raw = _ANSI_WITHOUT_ESC.sub(b"", raw)
    text = raw.translate(None, _CONTROL).decode("utf-8", "replace")
    rank: int | None = None
    for _ in range(0 if text.startswith('  File "') else _MAX_PREFIXES):
        prefix = _PREFIX.match(text, 0, _MAX_PREFIX)
        if prefix is None:
            break
        named = next((value for value in prefix.groups() if value is not None), None)
        rank = int(named) if named is not None else rank
        text = text[prefix.end() :]
    beginning = text[:_MAX_PREFIX] if rank is None else ""
    if ("ank" in beginning or "ANK" in beginning) and (inside := _RANK_INSIDE.search(beginning)):
        rank = int(inside[1] or inside[2] or inside[3])
    return rank, text.rstrip()


def pieces(line: bytes) -> Iterator[bytes]:
    """Split a long line into overlapping pieces, at offsets that depend only on the line."""
    start = 0
    while len(line) - start > MAX_LINE:
        yield line[start : start + MAX_LINE]
        start += MAX_LINE - OVERLAP
    yield line[start:]


def lines_of(raw: bytes, number: int) -> Iterator[LogLine]:
    """A raw line's text; if it is a JSON record, the lines in its fields and the rest of it."""
    rank, text = clean(raw)
    record = _record(text)
    if record is None:
        yield LogLine(rank, number, text, text.lower())
        return
    for owner, inner in _unpacked(rank, record):
        yield LogLine(owner, number, inner, inner.lower())


def _record(text: str) -> Mapping[str, object] | None:
    if not (text.startswith('{"') and text.endswith("}")):
        return None
    try:
        record = json.loads(text)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _unpacked(rank: int | None, record: Mapping[str, object]) -> Iterator[tuple[int | None, str]]:
    owner = record.get("rank")
    rank = owner if rank is None and isinstance(owner, int) else rank
    if record.keys() >= _GUARD_RECORD:
        # The guard's own record: the other fields quote the lines that it explains.
        yield rank, str(record["msg"])
        return
    level = str(record.get("level", record.get("levelname", ""))).lower()
    mark = " [warning]" if level.startswith("warn") else ""
    texts = {
        key: value
        for key, value in record.items()
        if isinstance(value, str) and (key.lower() in _RECORD_TEXTS or "\n" in value)
    }
    yield rank, json.dumps({key: value for key, value in record.items() if key not in texts})
    for value in texts.values():
        for line in value.splitlines()[:_MAX_RECORD_LINES]:
            named, inner = clean(line.encode(errors="replace"))
            yield rank if named is None else named, inner + mark


def excerpt(text: str, limit: int = 400, at: int = 0) -> str:
    """Collapse whitespace, and take `limit` characters from just before offset `at`."""
    before = max(0, at - limit // 4)
    short = " ".join(text[before : before + 4 * limit].split())
    if before:
        short = "…" + short
    return short if len(short) <= limit else short[: limit - 1] + "…"


def exception_name(text: str, *, after_frames: bool = False) -> str | None:
    """The exception that begins a line. `after_frames`: whether the line ends a traceback, where
    names that reveal little count too."""
    match = EXCEPTION.match(text, 0, _MAX_NAME)
    if match is None:
        match = _AFTER_FRAMES.match(text, 0, _MAX_NAME) if after_frames else None
        return None if match is None else match["name"]
    if text.lower().rstrip().endswith(f": {TRACEBACK}:"):
        # The exception's message is another process's traceback, which ends in the error itself.
        return None
    return match["name"]


@dataclass
class Traceback:
    """One rank's frames up to now."""

    line: int
    ignored: bool = False
    """Python ignored the exception, in a destructor or at shutdown."""

    ended: int = 0
    """The line of the exception that ended an ignored traceback."""

    last: int = 0
    """The line of the latest frame."""

    paths: str = ""
    """The frames' files in lower case, separated by spaces."""

    user_frame: str = ""
    """The lowest frame in the program's own code, such as `train.py, line 7`."""

    def goes_on(self, number: int) -> bool:
        """Whether a traceback that starts on line `number` belongs to the ignored one: it is its
        first, or is chained to it by a sentence between two blank lines."""
        return not self.ended or 2 <= number - self.ended <= 4


class Ended(NamedTuple):
    """An exception with its traceback; without one, `paths` and `own` are empty."""

    name: str
    paths: str = ""
    user_frame: str = ""

    @property
    def where(self) -> str:
        """The program's own lowest frame, and the package of the innermost one, for fixes."""
        innermost = self.paths.rstrip().rpartition(" ")[2].partition("-packages/")[2]
        return f"frame={self.user_frame}\nwithin={innermost.partition('/')[0]}"


class Tracebacks:
    """The open traceback of each rank; a log may begin in the middle of one."""

    def __init__(self) -> None:
        self._open: dict[int | None, Traceback] = {}

    def follow(self, line: LogLine) -> bool:
        """Process a line; return True if it only gives a file position or quotes source."""
        lowered, opened = line.lowered, self._open.get(line.rank)
        if opened is None and _BEGINS.search(lowered) is None:
            return False
        inner = lowered.lstrip()
        positions = inner.startswith("file ")
        ray = _RAY in lowered and lowered.rstrip().endswith(")")
        starts = ray or TRACEBACK in lowered
        frame = _FRAME.search(line.text) if positions or 'file "' in lowered else None
        ignored = any(words in lowered for words in _IGNORED) or (
            opened is not None and opened.ignored and starts and opened.goes_on(line.number)
        )
        # A warning may quote a frame, but a frame at the start of a line is part of a traceback.
        if starts or ignored or (frame is not None and positions and opened is None):
            opened = self._begin(line, ignored=ignored)
        if frame is not None and opened is not None:
            opened.last = line.number
            path = (frame[1] or frame[3]).replace("\\", "/")
            opened.paths = f"{opened.paths}{path.lower()} "[:_MAX_FRAMES]
            if not any(part in path for part in _LIBRARIES):
                opened.user_frame = f"{path}, line {frame[2] or frame[4]}"
        # When several ranks print at once, a quoted source line may not follow its frame.
        quoted = line.text.startswith("    ") and not line.text[4:5].isspace()
        if ray or (opened and inner.startswith("raise ")) or (positions and frame):
            return True
        return bool(opened and opened.paths and quoted)

    def _begin(self, line: LogLine, *, ignored: bool) -> Traceback | None:
        if line.rank not in self._open and len(self._open) >= MAX_STREAMS:
            return None
        self._open[line.rank] = begun = Traceback(line.number, ignored)
        return begun

    def ignores(self, line: LogLine) -> bool:
        """Whether the line belongs to an exception that Python ignored."""
        opened = self._current(line.rank, line.number)
        if opened is None or not opened.ignored:
            return False
        if not opened.ended and exception_name(line.text, after_frames=True) is not None:
            opened.ended = line.number
        return True

    def _current(self, rank: int | None, number: int) -> Traceback | None:
        opened = self._open.get(rank)
        recent = opened is not None and number - opened.line < _MAX_TRACEBACK_LINES
        if opened is not None and opened.ended and number > opened.ended + _AFTER_IGNORED:
            recent = False
        return opened if recent else None

    def ends(self, line: LogLine) -> Ended | None:
        """The exception on this line, with its traceback if it ends one."""
        # If only the message names a rank, the lines of its traceback name none.
        rank = None if line.rank not in self._open and "[rank" in line.lowered else line.rank
        opened = self._current(rank, line.number)
        name = exception_name(line.text, after_frames=opened is not None)
        if name is None:
            return None
        self._open.pop(rank, None)
        if opened is None:
            return Ended(name)
        return None if opened.ignored else Ended(name, opened.paths, opened.user_frame)

    def cut_off(self, number: int) -> tuple[int | None, int] | None:
        """Rank and first line of the latest traceback still open at line `number`, where the log
        ends."""
        cut = [
            (rank, opened.line)
            for rank, opened in self._open.items()
            if number - max(opened.line, opened.last) < _MAX_CUT_LINES and not opened.ignored
        ]
        return max(cut, key=lambda pair: pair[1], default=None)
