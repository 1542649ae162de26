"""Turns a log into evidence, in one pass and in bounded memory: lines that indicate a label, and
lines that show that the program coped.

Every known error contains a trigger word, so a block of lines is searched for these words once, and
only the lines that hold one are read. The same bytes give the same evidence, however they are split
into chunks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from miner_guard.incidents.knowledge import (
    UNKNOWN_EXCEPTION,
    Knowledge,
    Label,
    Match,
    Pattern,
    in_traceback,
)
from miner_guard.incidents.logs import (
    BLOB_LINE,
    EXCEPTION,
    MAX_BLOBLESS,
    MAX_LINE,
    OVERLAP,
    Ended,
    LogLine,
    Tracebacks,
    excerpt,
    lines_of,
    pieces,
    without_blobs,
)
from miner_guard.incidents.root import Evidence, Launched, Retraction, Sighting

_TRYING_AGAIN = re.compile(
    r"retrying|reconnect|trying again|will try again|thrown while requesting"
    r"|\bretry|(?<!max )(?<!after \d )(?<!after \d\d )\bretries\b|attempt \d{1,9} ?(?:/|of) ?\d"
    r"|(?<!nccl )\bwarn(?:ing)?\b|userwarning"
)
_WARNS = re.compile(r"\[?w(?:\d{3,4})?[ \]]")
"""The beginning of a warning from torch or glog, in lower case."""

_QUOTED = 800
"""Characters of a line to quote: enough for the sizes in an out-of-memory message."""

_NOT_A_FAULT = frozenset({"SystemExit", "StopIteration", "GeneratorExit"})
_LAUNCHERS = frozenset(
    {
        *("ChildFailedError", "ProcessRaisedException", "ProcessExitedException"),
        *("CancelledError", "CalledProcessError"),
    }
)
"""Exceptions that are raised because something else failed."""

_LAUNCHED = Pattern("code_bug", "symptom")

_CHAINED = "during handling of the above exception"
_CHAIN_LINES = 400
"""The longest chain of tracebacks, in lines."""

_GUARD_LAUNCHES, _TORCHRUN_LAUNCHES = "miner started", "setting omp_num_threads environment var"
"""What the first line of a launch says, in lower case; torchrun's begins with it."""

_LEVEL = re.compile(r"(?:(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) )*\W{0,4}")
_GUARD_ACTIONS = (
    *("ORPHAN KILLED", "MINER STOPPING", "MINER RESTARTING", "STACK DUMP", "EVIDENCE"),
    *("HEALTH ", "ALERT ", "GUARD ", "CHAIN ", "AUDIT ", "UPLOAD ", "REPO ", "VERDICT: "),
)
"""The beginnings of the guard's lines on what it does and measures."""

_INCIDENT = re.compile(r"\bincident (\w{1,60}): .* fix: ")
"""The guard's line on an incident, in lower case."""

_LOSS = re.compile(rb"loss\b\W{0,4}\d")
_NOT_TRAINING = (b"val_", b"valid_", b"validation_", b"test_")
_STEP = re.compile(rb"\bstep\b\W{0,3}\d.{0,60}\bloss(?!\W{0,4}(?:nan|inf))")
_NUMBERS = re.compile(rb"\bstep\b\W{0,4}(\d+)")
_ZERO = re.compile(rb"(?:\b|_)loss\b\W{0,4}0(?:\.0*)?(?:[^\d.]|$)")
_NAME = 16
"""How many bytes before `loss` may hold the rest of the metric's name."""

_STEPS, _SOUND_STEPS, _MANY_STEPS = 2, 4, 10
"""Steps required after an error, since a single one may be another rank's late output; after a bad
loss, since other ranks may print finite losses for a while; and after an exception: once it has
ended a rank, the others take only a few more."""

_AWAITED = 500
"""Lines after an error within which these steps must appear."""

_UPLOADS = re.compile(r"(?<!\w)(?:put|post)\b|upload|push|commit|sav(?:e|ing)\b")
"""Outgoing requests: continued training does not show that they recovered."""

_NAN = re.compile(
    r"^(?!.*\b(?:e?val(?:uation|idation)?|valid|test)(?:\b|_))(?!.*(?:stop|exit|abort|terminat))"
    r".*(?:\b|_)(?:nan|inf\w*)(?:\b|_)"
)
"""A non-finite loss, which later finite losses clear. Steps say nothing about an evaluation loss,
and an exploded loss is still a number."""


class _Pending(NamedTuple):
    """An error that later steps may clear."""

    label: str
    steps: int
    roles: tuple[str, ...] = ("cause", "exception", "retry", "warning")
    loss: bool = False
    """Whether the loss itself is bad. A loss of 0 after it is as bad as NaN."""

    needed: bool = True
    """Whether training needs what failed. If not, steps show only that it continues without it."""


def _pending(sighting: Sighting, label: Label) -> _Pending | None:
    text = sighting.text.lower()
    if sighting.role in ("retry", "warning"):
        needed = label.overcome_by_steps and not _UPLOADS.search(text)
        waits = label.overcome_by_steps or label.restart == "outage"
        roles = ("retry", "warning")
        return _Pending(label.name, _STEPS, roles, needed=needed) if waits else None
    if sighting.role not in ("cause", "exception"):
        return None
    if label.undone_by_losses:
        # An exception ends the run, no matter what the other ranks still print.
        printed = not EXCEPTION.match(sighting.text) and _NAN.search(text)
        return _Pending(label.name, _SOUND_STEPS, loss=True) if printed else None
    return _Pending(label.name, _MANY_STEPS) if label.overcome_by_steps else None


class _Recovery:
    """The errors that steps may still clear."""

    def __init__(self) -> None:
        self._errors: dict[_Pending, set[object]] = {}
        self._latest = 0

    def waits(self, number: int) -> bool:
        """Whether a step on line `number` could clear an error."""
        if self._errors and number - self._latest > _AWAITED:
            self._errors.clear()
        return bool(self._errors)

    def failed(self, number: int, error: _Pending | None) -> None:
        """A line shows a fault, which steps may clear if it is an `error`."""
        self.waits(number - 1)
        if number != self._latest:
            # A later fault may be a consequence of the non-finite loss.
            self._errors = {e: steps for e, steps in self._errors.items() if not e.loss}
        if error is not None:
            self._errors[error] = set()
        self._latest = number

    def step(self, line: bytes, number: int) -> Iterator[_Pending]:
        """The errors that a line in lower case clears."""
        if number == self._latest or not _prints_step(line):
            return
        step = tuple(_NUMBERS.findall(line)) or number
        for error, steps in list(self._errors.items()):
            if not (error.loss and _ZERO.search(line)):
                steps.add(step)
            if len(steps) >= error.steps:
                del self._errors[error]
                yield error


def _prints_step(line: bytes) -> bool:
    for loss in _LOSS.finditer(line):
        before = line[max(0, loss.start() - _NAME) : loss.start()]
        if not before[-1:].isalnum() and not before.endswith(_NOT_TRAINING):
            return True
    return _STEP.search(line) is not None


class Scanner:
    """Reads one log that arrives in chunks of any size."""

    def __init__(self, knowledge: Knowledge, *, notices: bool = False) -> None:
        """`notices`: whether to report notices too, even if nothing has failed."""
        self._knowledge = knowledge
        self._notices = notices
        self._carry = b""
        self._tracebacks = Tracebacks()
        self._recovery = _Recovery()
        self._raised: tuple[str, ...] = ()
        """Labels of the latest exception."""

        self._handled: tuple[str, ...] = ()
        """Labels of the exception that was being handled when the next one was raised."""

        self.line = 1
        """Number of the next line."""

    def feed(self, chunk: bytes) -> list[Evidence]:
        """The evidence in the complete lines of the next chunk."""
        data = self._carry + chunk if self._carry else chunk
        cut = data.rfind(b"\n") + 1
        evidence = self._block(data[:cut]) if cut else []
        rest = data[cut:]
        while len(rest) > MAX_LINE:
            evidence += self._block(rest[:MAX_LINE])
            rest = rest[MAX_LINE - OVERLAP :]
        self._carry = rest
        return evidence

    def finish(self) -> list[Evidence]:
        """The evidence in an unfinished last line, and in a traceback cut off by the end."""
        rest, self._carry = self._carry, b""
        evidence = self._block(rest)
        if (cut := self._tracebacks.cut_off(self.line)) is not None:
            text = "a traceback cut off by the end of the log"
            evidence.append(Sighting(_LAUNCHED.label, _LAUNCHED.role, cut[1], text, cut[0]))
        return evidence

    def _block(self, block: bytes) -> list[Evidence]:
        """Scan a block of lines. If it does not end with a newline, the next block continues the
        last line under the same number."""
        evidence: list[Evidence] = []
        at, number = 0, self.line
        for start, end in self._knowledge.triggers.lines_in(block):
            if start > at:
                self._quiet(block[at:start], number, evidence)
                number += block.count(b"\n", at, start)
            matches = list(self._line(block[start:end], number))
            for sighting in matches:
                if isinstance(sighting, Sighting) and sighting.role != "notice":
                    label = self._knowledge.labels[sighting.label]
                    self._recovery.failed(number, _pending(sighting, label))
            evidence += matches
            if self._recovery.waits(number):
                self._step(block[start:end], number, evidence)
            at = min(end + 1, len(block))
            number += end < len(block)
        if at < len(block):
            self._quiet(block[at:], number, evidence)
        self.line = number + block.count(b"\n", at)
        return evidence

    def _quiet(self, lines: bytes, number: int, evidence: list[Evidence]) -> None:
        """Process lines without a trigger word: they may print steps."""
        if not self._recovery.waits(number):
            return
        for place, line in enumerate(lines.split(b"\n"), number):
            if not self._recovery.waits(place):
                return
            self._step(line, place, evidence)

    def _step(self, line: bytes, number: int, evidence: list[Evidence]) -> None:
        for error in self._recovery.step(line[:MAX_LINE].lower(), number):
            evidence.append(Retraction((error.label,), number, None, error.roles, error.needed))

    def _line(self, line: bytes, number: int) -> Iterator[Evidence]:
        if len(line) < MAX_BLOBLESS and b"\r" not in line and BLOB_LINE.fullmatch(line) is None:
            yield from self._read(line, number)
            return
        for piece in pieces(line):
            # Each redraw of a progress bar is a line of its own.
            for part in without_blobs(piece).split(b"\r"):
                if part and self._knowledge.triggers.found_in(part):
                    yield from self._read(part, number)

    def _read(self, raw: bytes, number: int) -> Iterator[Evidence]:
        for line in lines_of(raw, number):
            if self._tracebacks.follow(line):
                continue
            launches = _GUARD_LAUNCHES in line.lowered[:100]
            if launches or line.lowered.startswith(_TORCHRUN_LAUNCHES):
                self._tracebacks = Tracebacks()
                yield Launched(number)
            elif (named := self._named(line)) is not None:
                yield named
            elif not _is_guard_action(line.text) and not self._tracebacks.ignores(line):
                yield from self._examine(line)

    def _named(self, line: LogLine) -> Sighting | None:
        """The incident that a line of the guard names."""
        incident = _INCIDENT.search(line.lowered) if "incident " in line.lowered else None
        label = self._knowledge.labels.get(incident[1]) if incident else None
        if incident is None or label is None:
            return None
        role = "retry" if "warning" in line.lowered[: min(incident.start(), 80)] else label.role
        return Sighting(label.name, role, line.number, excerpt(line.text, _QUOTED), line.rank)

    def _examine(self, line: LogLine) -> Iterator[Evidence]:
        match = self._knowledge.match(line.lowered)
        if match.benign is None:
            yield from self._matched(line, match)
        elif match.benign.cancels:
            yield Retraction(match.benign.cancels, line.number, roles=match.benign.roles)
        elif match.benign.notice and self._notices:
            notice = _sighting(match.benign, line, "notice")
            yield notice._replace(label=match.benign.notice)

    def _matched(self, line: LogLine, match: Match) -> Iterator[Evidence]:
        """A line's matches. An exception counts even without a match."""
        patterns = match.patterns
        ended = self._tracebacks.ends(line)
        if line.lowered.startswith(_CHAINED):
            self._handled = self._raised
        if ended is not None:
            patterns = in_traceback(match, ended.paths) or _by_default(ended, line)
            if ended.name == "KeyboardInterrupt" and self._handled:
                # The program was coping with that exception when somebody stopped it.
                yield Retraction(self._handled, line.number, _CHAIN_LINES, ("cause", "exception"))
            self._raised, self._handled = tuple(p.label for p in patterns), ()
        frame = "" if ended is None else ended.where
        for pattern in patterns:
            role = _role(pattern, patterns, line.lowered)
            yield _sighting(pattern, line, role)._replace(frame=frame)


def _is_guard_action(text: str) -> bool:
    """Whether the guard reports what it does or measures, which is no evidence."""
    level = _LEVEL.match(text)
    return text.startswith(_GUARD_ACTIONS, 0 if level is None else level.end())


def _by_default(ended: Ended, line: LogLine) -> Sequence[Pattern]:
    """A bug in the program, or a symptom if a launcher reports that something else failed."""
    if ended.name in _NOT_A_FAULT:
        return ()
    # torch.multiprocessing raises a bare Exception and prints the worker's traceback after it.
    empty = line.text.rstrip(": ") == "Exception"
    return (_LAUNCHED if empty or ended.name in _LAUNCHERS else UNKNOWN_EXCEPTION,)


def _sighting(pattern: Pattern, line: LogLine, role: str) -> Sighting:
    return Sighting(
        pattern.label,
        role,
        line.number,
        excerpt(line.text, _QUOTED, pattern.first_word(line.lowered)),
        line.rank,
        cause=pattern.cause,
        fix=pattern.fix,
        restart=pattern.restart,
        source=pattern.source,
        least=pattern.least,
    )


def _role(pattern: Pattern, patterns: Sequence[Pattern], lowered: str) -> str:
    """The line's role. A cause in a warning or retry counts as a retry, a symptom that torch only
    warns of as a warning. A summary that appears with a symptom counts as a symptom."""
    if pattern.role == "cause" and _TRYING_AGAIN.search(lowered):
        return "retry"
    if pattern.role == "symptom" and _WARNS.match(lowered):
        return "warning"
    if pattern.role == "summary" and any(other.role == "symptom" for other in patterns):
        return "symptom"
    return pattern.role
