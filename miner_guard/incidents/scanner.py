"""From raw bytes to sightings, in one pass and with bounded memory.

The same bytes give the same sightings however they are split. A miner repeats the same lines with
other numbers, so lines are compared without their numbers, and only a new shape is searched for the
words that every known error contains. Only lines with such a word are examined one by one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from miner_guard.eventlog.line_templates import LineChunk, TemplateFilter, template
from miner_guard.incidents import own
from miner_guard.incidents.knowledge import Benign, Knowledge, Pattern
from miner_guard.incidents.log_text import MAX_LINE, OVERLAP, clean, excerpt, unwrapped
from miner_guard.incidents.recovery import PendingError, RecoveryTracker
from miner_guard.incidents.sightings import Launched, Passed, Retraction, Seen, Sighting

_EXCEPTION = re.compile(
    r"(?:[A-Za-z_]\w*\.)*(?P<name>[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Fault|Failure|Timeout|Violation)"
    r"|[A-Z]\w{0,80}(?:Error|Exception)\w{0,80})(?::\s|\s*$|:$|\()"
)
_QUALIFIED = re.compile(r"(?:\w+\.)+(?:exc|exceptions?|errors?)\.(?P<name>[A-Z]\w*)(?::\s|\s*$)")
"""An exception whose module marks it as one, such as `torch._dynamo.exc.Unsupported`."""

_MAX_NAME = 400
"""Longest exception name accepted: without a limit the search time is quadratic in the line's
length."""

_IN_TRACEBACK = re.compile(r"(?:[A-Za-z_]\w*\.)+(?P<name>[A-Z]\w*)(?::\s|$)")
"""An exception whose name does not mark it as one, such as `queue.Empty`."""

_FRAME = re.compile(
    r'file "([^"]+)", line \d|^file ([^\s:]{1,300}\.py|.:[^\s:]{1,300}\.py):\d+, in '
)
"""Stack frame lines of Python and IPython."""

_TRACEBACK = "traceback (most recent call last)"
_IGNORED = "exception ignored in"
_CHAINED = ("exception was the direct cause of", "handling of the above exception")
_CHAIN_LINES = 6
"""Lines between an exception and the words that chain it to the next one."""

_TRYING_AGAIN = (
    "retrying",
    "reconnect",
    "trying again",
    "will try again",
    "thrown while requesting",
)
_TRIED_AGAIN = re.compile(
    r"\bretry|(?<!max )(?<!after \d )(?<!after \d\d )\bretries\b|attempt \d+ ?(?:/|of) ?\d+"
    r"|(?<!nccl )\bwarn(?:ing)?\b|userwarning"
)
_WARNING = re.compile(r"\[?w(?:\d{3,4})?[ \]]")
"""How torch and glog begin a warning."""

_UPLOADS = re.compile(r"\bput\b|\bpost\b|upload|push|commit|sav(?:e|ing)\b")
"""Uploads and other outgoing requests: continued training does not show that they recovered."""

_NAN = re.compile(
    r"^(?!.*\b(?:e?val(?:uation|idation)?|valid|test)(?:\b|_))(?!.*(?:stop|exit|abort|terminat))"
    r".*(?:\b|_)(?:nan|inf\w*)(?:\b|_)"
)
"""A non-finite loss that later finite ones clear. Steps reveal nothing about an evaluation, and an
exploded loss is still a number."""

_NOT_A_FAULT = frozenset({"SystemExit", "StopIteration", "GeneratorExit"})
_LAUNCHERS = frozenset(
    {"ChildFailedError", "CalledProcessError", "ProcessRaisedException", "ProcessExitedException"}
)
_MAX_STREAMS = 256
_TRACEBACK_LINES = 2000
"""A traceback still open after this many lines was truncated."""

_TOLD = 800
"""Characters kept of a line: enough for the numbers of an out-of-memory message."""

_MAX_FRAMES = 8192
"""Characters kept of the paths in one traceback."""

_TAIL_LINES = 3
"""Lines after an out-of-memory error that may hold its numbers."""


@dataclass
class _Traceback:
    line: int
    ignored: bool = False
    """Python reports that it continues: the exception was raised in a destructor or at shutdown."""

    frames: str = ""
    raises: str = ""
    """The last source line with a `raise`, for a log that stops before the exception's own line."""


@dataclass(frozen=True)
class _Ended:
    name: str
    frames: str


_UNKNOWN_EXCEPTION = Pattern("code_bug", "exception", (), (), None)
_LAUNCHED = Pattern("code_bug", "symptom", (), (), None)


class Scanner:
    """Feed it a log in pieces of any size."""

    def __init__(self, knowledge: Knowledge) -> None:
        self._knowledge = knowledge
        self._carry = b""
        self._open: dict[int | None, _Traceback] = {}
        self._raised: dict[int | None, Sighting] = {}
        """The latest exception of each rank."""

        self._chained: dict[int | None, Sighting] = {}
        """Exceptions that are about to be followed by another in their chain."""

        self._logged: dict[int | None, Sighting] = {}
        """For each rank, the latest error that steps would clear and that a logger printed without
        a traceback."""

        self._tail: Sighting | None = None
        self._tail_line = 0
        self._sieve = TemplateFilter(knowledge.triggers)
        self._course = RecoveryTracker()

        self.line = 1
        """Number of the next line."""

    def feed(self, chunk: bytes) -> list[Seen]:
        """The sightings in the next chunk, as far as its lines are complete."""
        if isinstance(chunk, LineChunk) and not self._carry:
            return self._block(chunk)
        data = self._carry + chunk if self._carry else chunk
        cut = data.rfind(b"\n") + 1
        seen = self._block(data[:cut]) if cut else []
        *complete, self._carry = _pieces(data[cut:])
        for piece in complete:
            seen += self._block(piece)
        return seen

    def finish(self) -> list[Seen]:
        """The sightings in an unfinished last line. A truncated traceback counts as a symptom."""
        rest, self._carry = self._carry, b""
        seen = [*self._block(rest), *self._chained.values()]
        cut_off = {
            rank: t.line
            for rank, t in self._open.items()
            if self.line - t.line < _TRACEBACK_LINES and not t.ignored
        }
        if cut_off:
            rank = max(cut_off, key=cut_off.__getitem__)
            seen += self._cut_off(rank, cut_off[rank], self._open[rank].raises)
        return seen

    def _cut_off(self, rank: int | None, number: int, raises: str) -> list[Sighting]:
        matches = self._knowledge.match(raises.lower()) if raises else []
        if isinstance(matches, Benign) or not matches:
            return [
                Sighting(
                    "code_bug", "symptom", number, "a traceback that the log breaks off in", rank
                )
            ]
        return [
            Sighting(
                p.label,
                p.role,
                number,
                excerpt(raises, _TOLD),
                rank,
                p.cause,
                "",
                p.fix,
                p.restart,
                p.source,
                p.least,
            )
            for p in matches
        ]

    def _block(self, block: bytes) -> list[Seen]:
        """Scan whole lines. Text after the last newline is part of a line whose number stays the
        same."""
        seen: list[Seen] = []
        known = block if isinstance(block, LineChunk) else LineChunk(block)
        shapes, loud = known.templates, self._sieve.matching(known)
        hits = {index for index, text in enumerate(shapes) if text in loud} if loud else set()
        wanted = hits | self._tails(shapes, hits)
        lines = block.split(b"\n") if wanted or self._course.waits else []
        for index in sorted(wanted):
            self._go_on(lines[index], self.line + index, seen)
            if index in hits:
                found: list[Seen] = []
                self._line(lines[index], self.line + index, found)
                seen += self._relevant(found, shapes, index)
        for troubles, number in self._course.overcome(lines, shapes, self.line, self._tried(seen)):
            for trouble in troubles:
                roles = (
                    ("cause", "retry", "warning")
                    if trouble.loss or trouble.raised
                    else ("retry", "warning")
                )
                past = Retraction((trouble.label,), number, None, roles)
                seen.append(past if trouble.needed else Passed((trouble.label,), number))
        self._course.pass_by(shapes)
        self.line += len(shapes) - 1
        return seen

    def _relevant(self, found: list[Seen], shapes: list[bytes], index: int) -> list[Seen]:
        """The sightings on a line that still matter after training has finished."""
        moot = [
            s
            for s in found
            if isinstance(s, Sighting) and self._knowledge.labels[s.label].moot_when_finished
        ]
        return (
            [s for s in found if s not in moot]
            if moot and self._course.finished(shapes, index)
            else found
        )

    def _tried(self, seen: list[Seen]) -> dict[int, set[PendingError]]:
        """The sightings of this block by line, with the errors that continued steps would clear."""
        tried: dict[int, set[PendingError]] = {}
        for s in seen:
            if isinstance(s, Sighting) and s.line >= self.line:
                trouble = self._trouble(s)
                tried.setdefault(s.line, set()).update(() if trouble is None else (trouble,))
        return tried

    def _trouble(self, sighting: Sighting) -> PendingError | None:
        label, text = self._knowledge.labels[sighting.label], sighting.text.lower()
        if sighting.role in ("retry", "warning"):
            needed = label.overcome_by_steps and not _UPLOADS.search(text)
            return (
                PendingError(label.name, needed)
                if label.overcome_by_steps or label.restart == "outage"
                else None
            )
        if sighting.role != "cause":
            return None
        if label.undone_by_losses:
            # An exception ends a run, whatever the other ranks still print.
            printed = not _EXCEPTION.match(sighting.text)
            return PendingError(label.name, loss=True) if printed and _NAN.search(text) else None
        return PendingError(label.name, raised=True) if label.overcome_by_steps else None

    def _tails(self, shapes: list[bytes], hits: set[int]) -> set[int]:
        """The lines that may continue an out-of-memory message."""
        starts = {index for index in hits if b"out of memory" in shapes[index]} | (
            {-1} if self._tail else set()
        )
        return {
            index
            for start in starts
            for index in range(start + 1, min(start + 1 + _TAIL_LINES, len(shapes)))
        }

    def _line(self, line: bytes, number: int, seen: list[Seen]) -> None:
        pieces = [piece for part in _pieces(line) for piece in part.split(b"\r") if piece]
        for piece in pieces:
            if len(pieces) == 1 or self._sieve.holds(template(piece)):
                self._piece(piece, number, seen)

    def _piece(self, raw: bytes, number: int, seen: list[Seen]) -> None:
        rank, text = clean(raw)
        if not text.startswith("{"):
            self._text(rank, text, number, seen)
            return
        for inner, told in unwrapped(rank, text):
            self._text(inner, told, number, seen)

    def _text(self, rank: int | None, text: str, number: int, seen: list[Seen]) -> None:
        lowered = text.lower()
        if self._follow(rank, text, lowered, number):
            return
        if own.launches(lowered):
            seen.append(Launched(number))
            return
        if (incident := own.named(lowered, self._knowledge)) is not None:
            seen.append(Sighting(incident[0].name, incident[1], number, excerpt(text, _TOLD), rank))
            return
        if any(words in lowered for words in _CHAINED):
            self._chain(rank, number, seen)
        matches = [] if self._is_ignored(rank, number) else self._knowledge.match(lowered)
        if isinstance(matches, Benign):
            if matches.cancels:
                seen.append(Retraction(matches.cancels, number, roles=matches.roles))
            return
        ended = self._ends(text, number, rank)
        first = self._chained.pop(rank, None) if ended is not None else None
        if ended is not None:
            told = bool(matches)
            matches = self._knowledge.match_in(ended.frames, lowered, matches) or self._unknown(
                ended.name
            )
            if not told and first is not None and _says_little(matches):
                self._raised[rank] = first
                seen.append(first)
                return
        if ended is not None and ended.frames and ended.name == "FileNotFoundError":
            seen += self._went_past(rank, number)
        for pattern in matches:
            role = _role(pattern, matches, lowered)
            shown = excerpt(text, _TOLD, pattern.first_word(lowered))
            sighting = Sighting(
                pattern.label,
                role,
                number,
                shown,
                rank,
                pattern.cause,
                "",
                pattern.fix,
                pattern.restart,
                pattern.source,
                pattern.least,
            )
            seen.append(sighting)
            if rank not in self._open and (ended is None or not ended.frames):
                self._log(sighting)
            if ended is not None and (rank in self._raised or len(self._raised) < _MAX_STREAMS):
                self._raised[rank] = sighting
            if pattern.label == "cuda_oom" and "total" not in lowered:
                self._tail = sighting

    def _log(self, sighting: Sighting) -> None:
        known = sighting.rank in self._logged or len(self._logged) < _MAX_STREAMS
        if (
            known
            and sighting.role in ("cause", "retry")
            and self._knowledge.labels[sighting.label].overcome_by_steps
        ):
            self._logged[sighting.rank] = sighting

    def _went_past(self, rank: int | None, number: int) -> Iterator[Retraction]:
        """A rank that fails on a missing file got past the error that it logged before."""
        for teller in (rank, None):
            if (passed := self._logged.pop(teller, None)) is not None:
                yield Retraction((passed.label,), number, number - passed.line, ("cause", "retry"))

    def _go_on(self, line: bytes, number: int, seen: list[Seen]) -> None:
        """Append a line to the message that it continues."""
        sighting = self._tail
        if sighting is None or number <= max(sighting.line, self._tail_line) or not line.strip():
            return
        self._tail_line = number
        if number > sighting.line + _TAIL_LINES:
            self._tail = None
            return
        self._tail = replace(sighting, more=excerpt(f"{sighting.more} {clean(line[:MAX_LINE])[1]}"))
        seen.append(self._tail)

    def _follow(self, rank: int | None, text: str, lowered: str, number: int) -> bool:
        """Track the traceback that this rank prints; a log may begin in the middle of one.

        True for a line that only gives a file position or quotes source: the error itself comes at
        the end.
        """
        starts, frame = (
            _TRACEBACK in lowered,
            _FRAME.search(lowered) if 'file "' in lowered or lowered.startswith("file ") else None,
        )
        opened = self._open.get(rank)
        ignored = _IGNORED in lowered or (opened is not None and opened.ignored and starts)
        begins = starts or ignored or (frame is not None and opened is None)
        if begins and (opened is not None or len(self._open) < _MAX_STREAMS):
            self._open[rank] = opened = _Traceback(number, ignored)
        if frame and opened is not None and len(opened.frames) < _MAX_FRAMES:
            opened.frames += (frame[1] or frame[2]).replace("\\", "/") + " "
        inner = lowered.lstrip()
        if opened is not None and inner.startswith("raise "):
            opened.raises = text.strip()
            return True
        return frame is not None and inner.startswith("file ")

    def _chain(self, rank: int | None, number: int, seen: list[Seen]) -> None:
        """The first exception of a chain counts, unless the one that follows is known and the first
        is not."""
        first = self._raised.get(rank)
        if first is None or number - first.line > _CHAIN_LINES:
            return
        if first.label == _UNKNOWN_EXCEPTION.label:
            seen.append(Retraction((first.label,), number, number - first.line))
        self._chained[rank] = first

    def _is_ignored(self, rank: int | None, number: int) -> bool:
        opened = self._open.get(rank)
        return opened is not None and opened.ignored and number - opened.line < _TRACEBACK_LINES

    def _ends(self, text: str, number: int, rank: int | None) -> _Ended | None:
        """The exception that ends a traceback on this line, or that the line names without one."""
        opened = self._open.get(rank)
        inside = opened is not None and 0 <= number - opened.line < _TRACEBACK_LINES
        kinds = (_EXCEPTION, _QUALIFIED, _IN_TRACEBACK) if inside else (_EXCEPTION, _QUALIFIED)
        match = next((found for kind in kinds if (found := kind.match(text, 0, _MAX_NAME))), None)
        if match is None:
            return None
        self._open.pop(rank, None)
        if opened is not None and inside:
            return None if opened.ignored else _Ended(match["name"], opened.frames)
        return _Ended(match["name"], "")

    def _unknown(self, name: str) -> list[Pattern]:
        """A program fault: the default for an unknown exception."""
        if name in _NOT_A_FAULT:
            return []
        return [_LAUNCHED if name in _LAUNCHERS else _UNKNOWN_EXCEPTION]


def _says_little(matches: list[Pattern]) -> bool:
    """An exception without a cause: an unknown one, or an exhausted wait."""
    return bool(matches) and all(
        pattern is _UNKNOWN_EXCEPTION or "" in pattern.frames for pattern in matches
    )


def _role(pattern: Pattern, matches: list[Pattern], lowered: str) -> str:
    """A cause in a warning or retry is a retry; a summary beside a symptom is a symptom."""
    if pattern.role == "cause" and (
        any(w in lowered for w in _TRYING_AGAIN) or _TRIED_AGAIN.search(lowered)
    ):
        return "retry"
    if pattern.role == "symptom" and _WARNING.match(lowered):
        return "warning"
    if pattern.role == "summary" and any(other.role == "symptom" for other in matches):
        return "symptom"
    return pattern.role


def _pieces(line: bytes) -> Iterator[bytes]:
    """A long line in overlapping pieces; the cuts depend on the line alone, not on how it
    arrived."""
    start = 0
    while len(line) - start > MAX_LINE:
        yield line[start : start + MAX_LINE]
        start += MAX_LINE - OVERLAP
    yield line[start:]
