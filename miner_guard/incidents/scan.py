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
    CHAINED,
    EXCEPTION,
    MAX_BLOBLESS,
    MAX_LINE,
    MAX_STREAMS,
    OVERLAP,
    Ended,
    LogLine,
    Tracebacks,
    clean,
    excerpt,
    lines_of,
    pieces,
    without_blobs,
)
from miner_guard.incidents.root import Coped, Evidence, Launched, Passed, Retraction, Sighting

_CHAIN_LINES = 6
"""Maximum number of lines from an exception to the sentence that chains it to the next one."""

_TRYING_AGAIN = re.compile(
    r"retrying|reconnect|trying again|will try again|thrown while requesting"
    r"|\bretry|(?<!max )(?<!after \d )(?<!after \d\d )\bretries\b|attempt \d{1,9} ?(?:/|of) ?\d"
    r"|(?<!nccl )\bwarn(?:ing)?\b|userwarning"
)
_FELL_BACK = re.compile(r"\busing \w{1,20} instead\b|\bfall(?:ing|en|s)? ?back (?:to|on)\b")
_WARNS = re.compile(r"\[?w(?:\d{3,4})?[ \]]")
"""The beginning of a warning from torch or glog, in lower case."""

_QUOTED = 800
"""Characters of a line to quote: enough for the sizes in an out-of-memory message."""

_MAX_DULL = 4096
_TAIL_LINES = 3
"""Lines after an out-of-memory error that may contain its sizes."""

_NOT_A_FAULT = frozenset({"SystemExit", "StopIteration", "GeneratorExit"})
_LAUNCHERS = frozenset(
    {
        *("ChildFailedError", "ProcessRaisedException", "ProcessExitedException"),
        *("CancelledError", "CalledProcessError"),
    }
)
"""Exceptions that are raised because something else failed."""

_LAUNCHED = Pattern("code_bug", "symptom")

_LAUNCH = re.compile(
    r"^.{0,80}?\bminer started\b"
    r"|^setting omp_num_threads environment variable for each process to be "
)
"""The first line of a launch: the guard's, torchrun's."""

_LEVEL = re.compile(r"(?:(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) )*\W{0,4}")
_OWN_ACTIONS = (
    *("ORPHAN KILLED", "MINER STOPPING", "MINER RESTARTING", "STACK DUMP", "EVIDENCE"),
    *("HEALTH ", "ALERT ", "GUARD ", "CHAIN ", "AUDIT ", "UPLOAD ", "REPO "),
)
"""The beginnings of the guard's lines on what it does and measures."""

_REMARKABLE = re.compile(
    r"miner started|omp_num_threads environ|incident |the direct cause of|of the above exception"
)
_INCIDENT = re.compile(r"\bincident (\w{1,60}): .* fix: ")

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

_FINISHED = re.compile(
    rb"^(?!.*\b(?:epoch|stage|fold|round|batch|warm ?up|not|before|until|when|step)\b).*"
    rb"(?:\b(?:training|train|pre ?training|fine ?tuning|run)\b(?: \w+){0,3} "
    rb"(?:finished|completed?|done|ended)\b"
    rb"|\b(?:finished|completed|done|end of)(?: with)? training\b)"
    rb"|\btrain_runtime\b|max_(?:steps|epochs)\S* reached"
)
_FINISHED_LINES, _FINISHED_BYTES = 100, 16384
"""How far back from an exit to search for a report that training finished."""

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
        self._before = b""
        """The end of the text before the current block."""

        self._dull: set[bytes] = set()
        """Recent lines that showed nothing, for programs that repeat them."""

        self._tracebacks = Tracebacks()
        self._recovery = _Recovery()
        self._raised: dict[int | None, Sighting] = {}
        """The latest exception of each rank."""

        self._chained: dict[int | None, Sighting] = {}
        """For each rank, an exception whose successor in the chain has not appeared yet."""

        self._logged: dict[int | None, Sighting] = {}
        """For each rank, the latest error that was logged without a traceback and that further
        steps could clear."""

        self._tail: Sighting | None = None
        """An out-of-memory error whose sizes may follow."""

        self.line = 1
        """Number of the next line."""

    def feed(self, chunk: bytes) -> list[Evidence]:
        """The evidence in the complete lines of the next chunk."""
        data = self._carry + chunk if self._carry else chunk
        cut = data.rfind(b"\n") + 1
        last = data.rfind(b"\n", 0, cut - 1) + 1 if cut else 0
        if data.find(b'File "', last, cut) >= 0 and cut - last < MAX_LINE:
            # The next line quotes this frame's source.
            cut = last
        evidence = self._block(data[:cut]) if cut else []
        rest = data[cut:]
        while len(rest) > MAX_LINE and b"\n" not in rest:
            evidence += self._block(rest[:MAX_LINE])
            rest = rest[MAX_LINE - OVERLAP :]
        self._carry = rest
        return evidence

    def finish(self) -> list[Evidence]:
        """The evidence in an unfinished last line, and in a traceback cut off by the end."""
        rest, self._carry = self._carry, b""
        evidence = [*self._block(rest), *self._chained.values()]
        if (cut := self._tracebacks.cut_off(self.line)) is not None:
            rank, opened = cut
            line = LogLine(rank, opened.line, opened.raises, opened.raises.lower())
            match = self._knowledge.match(line.lowered) if opened.raises else Match()
            shown = line.text or "a traceback cut off by the end of the log"
            for pattern in match.patterns or (_LAUNCHED,):
                evidence.append(_sighting(pattern, line, pattern.role, excerpt(shown, _QUOTED)))
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
            if self._tail is not None:
                self._go_on(block[start:end], number, evidence)
            before = len(evidence)
            following = block[end + 1 : end + 1 + _QUOTED].partition(b"\n")[0]
            self._line(block[start:end], number, following, evidence)
            self._failed(number, evidence, before, block[:end])
            if self._recovery.waits(number):
                self._step(block[start:end], number, evidence)
            at = min(end + 1, len(block))
            number += end < len(block)
        if at < len(block):
            self._quiet(block[at:], number, evidence)
        self.line = number + block.count(b"\n", at)
        self._before = (self._before + block[-_FINISHED_BYTES:])[-_FINISHED_BYTES:]
        return evidence

    def _quiet(self, lines: bytes, number: int, evidence: list[Evidence]) -> None:
        """Process lines without a trigger word: they may print steps, or the sizes of an error."""
        if self._tail is None and not self._recovery.waits(number):
            return
        for place, line in enumerate(lines.split(b"\n"), number):
            if self._tail is not None:
                self._go_on(line, place, evidence)
            if self._recovery.waits(place):
                self._step(line, place, evidence)
            elif self._tail is None:
                return

    def _step(self, line: bytes, number: int, evidence: list[Evidence]) -> None:
        for error in self._recovery.step(line[:MAX_LINE].lower(), number):
            past = Retraction((error.label,), number, None, error.roles)
            evidence.append(past if error.needed else Passed((error.label,), number))

    def _failed(self, number: int, evidence: list[Evidence], before: int, text: bytes) -> None:
        """Note the faults on a line, and drop those that no longer matter because training has
        finished."""
        if len(evidence) == before:
            return
        labels = self._knowledge.labels
        sightings = [s for s in evidence[before:] if isinstance(s, Sighting)]
        moot = [s for s in sightings if labels[s.label].moot_when_finished]
        if moot and _finished(self._before + text[-_FINISHED_BYTES:]):
            evidence[before:] = [item for item in evidence[before:] if item not in moot]
            return
        for sighting in sightings:
            if sighting.role != "notice" and sighting.line == number:
                self._recovery.failed(number, _pending(sighting, labels[sighting.label]))

    def _line(self, line: bytes, number: int, following: bytes, evidence: list[Evidence]) -> None:
        if len(line) < MAX_BLOBLESS and b"\r" not in line and BLOB_LINE.fullmatch(line) is None:
            if line in self._dull and not self._tracebacks.any_open:
                return
            before = len(evidence)
            self._read(line, number, following, evidence)
            if len(evidence) == before and not self._tracebacks.any_open:
                if len(self._dull) >= _MAX_DULL:
                    self._dull.clear()
                self._dull.add(line)
            return
        for piece in pieces(line):
            # Each redraw of a progress bar is a line of its own.
            for part in without_blobs(piece).split(b"\r"):
                if part and self._knowledge.triggers.found_in(part):
                    self._read(part, number, b"", evidence)

    def _read(self, raw: bytes, number: int, following: bytes, evidence: list[Evidence]) -> None:
        for line in lines_of(raw, number):
            source = clean(following)[1] if 'file "' in line.lowered else ""
            if self._tracebacks.follow(line, source):
                continue
            if _REMARKABLE.search(line.lowered) is not None:
                if _LAUNCH.search(line.lowered) is not None:
                    self._tracebacks, self._tail = Tracebacks(), None
                    evidence.append(Launched(number))
                    continue
                if self._named(line, evidence):
                    continue
                if any(words in line.lowered for words in CHAINED):
                    self._chain(line, evidence)
            if not _own_action(line.text):
                self._examine(line, evidence)

    def _named(self, line: LogLine, evidence: list[Evidence]) -> bool:
        """Process a line in which the guard names an incident."""
        incident = _INCIDENT.search(line.lowered)
        label = self._knowledge.labels.get(incident[1]) if incident else None
        if incident is None or label is None:
            return False
        role = "retry" if "warning" in line.lowered[: min(incident.start(), 80)] else label.role
        shown = excerpt(line.text, _QUOTED)
        evidence.append(Sighting(label.name, role, line.number, shown, line.rank))
        return True

    def _examine(self, line: LogLine, evidence: list[Evidence]) -> None:
        match = Match() if self._tracebacks.ignores(line) else self._knowledge.match(line.lowered)
        if match.benign is None:
            self._matched(line, match, evidence)
        elif match.benign.cancels:
            benign = match.benign
            evidence.append(Coped(benign.cancels, line.number, roles=benign.roles))
        elif match.benign.notice and self._notices:
            shown = excerpt(line.text, _QUOTED, match.benign.first_word(line.lowered))
            notice = _sighting(match.benign, line, "notice", shown)
            evidence.append(notice._replace(label=match.benign.notice))

    def _matched(self, line: LogLine, match: Match, evidence: list[Evidence]) -> None:
        """Record a line's matches. An exception counts even without a match."""
        patterns = match.patterns
        ended = self._tracebacks.ends(line)
        if ended is not None:
            first = self._chained.pop(line.rank, None)
            unmatched = not patterns
            patterns = in_traceback(match, ended.paths, ended.text) or _by_default(ended, line)
            little = patterns and all(p is UNKNOWN_EXCEPTION or p.says_little for p in patterns)
            if unmatched and first is not None and little:
                # The first exception of the chain counts.
                self._raised[line.rank] = first
                evidence.append(first)
                return
            if ended.paths and ended.name == "FileNotFoundError":
                evidence += self._went_past(line)
        for pattern in patterns:
            shown = excerpt(line.text, _QUOTED, pattern.first_word(line.lowered))
            sighting = _sighting(pattern, line, _role(pattern, patterns, line.lowered), shown)
            evidence.append(sighting)
            self._track(sighting, ended)
            if sighting.label == "cuda_oom" and "total" not in line.lowered:
                self._tail = sighting

    def _track(self, sighting: Sighting, ended: Ended | None) -> None:
        rank = sighting.rank
        if ended is not None and (rank in self._raised or len(self._raised) < MAX_STREAMS):
            self._raised[rank] = sighting
        logged = not self._tracebacks.is_open(rank) and (ended is None or not ended.paths)
        if (
            logged
            and (rank in self._logged or len(self._logged) < MAX_STREAMS)
            and sighting.role in ("cause", "retry")
            and self._knowledge.labels[sighting.label].overcome_by_steps
        ):
            self._logged[rank] = sighting

    def _went_past(self, line: LogLine) -> Iterator[Retraction]:
        """Retract the error that a rank logged before it failed on a missing file, because the rank
        had continued after that error."""
        for rank in (line.rank, None):
            if (passed := self._logged.pop(rank, None)) is not None:
                within = line.number - passed.line
                yield Retraction((passed.label,), line.number, within, ("cause", "retry"))

    def _go_on(self, line: bytes, number: int, evidence: list[Evidence]) -> None:
        """Append a line to the out-of-memory message that it continues."""
        sighting = self._tail
        if sighting is None or number <= sighting.line or not line.strip():
            return
        if number > sighting.line + _TAIL_LINES:
            self._tail = None
            return
        more = excerpt(f"{sighting.more} {clean(line[:MAX_LINE])[1]}")
        self._tail = sighting._replace(more=more)
        evidence.append(self._tail)

    def _chain(self, line: LogLine, evidence: list[Evidence]) -> None:
        """Hold the first exception in a chain. It is the one that counts, unless a pattern matches
        only the next one."""
        first = self._raised.get(line.rank)
        if first is None or line.number - first.line > _CHAIN_LINES:
            return
        if first.label == UNKNOWN_EXCEPTION.label:
            evidence.append(Retraction((first.label,), line.number, line.number - first.line))
        self._chained[line.rank] = first


def _own_action(text: str) -> bool:
    """Whether the guard reports what it does or measures, which is no evidence."""
    level = _LEVEL.match(text)
    return text.startswith(_OWN_ACTIONS, 0 if level is None else level.end())


def _finished(text: bytes) -> bool:
    """Whether the last lines of `text` report the end of training."""
    lines = text.lower().split(b"\n")[-_FINISHED_LINES - 1 :]
    return any(_FINISHED.search(line[:1024].translate(None, b"0123456789+-.")) for line in lines)


def _by_default(ended: Ended, line: LogLine) -> Sequence[Pattern]:
    """A bug in the program, or a symptom if a launcher reports that something else failed."""
    if ended.name in _NOT_A_FAULT:
        return ()
    # torch.multiprocessing raises a bare Exception and prints the worker's traceback after it.
    empty = line.text.rstrip(": ") == "Exception"
    return (_LAUNCHED if empty or ended.name in _LAUNCHERS else UNKNOWN_EXCEPTION,)


def _sighting(pattern: Pattern, line: LogLine, role: str, shown: str) -> Sighting:
    return Sighting(
        pattern.label,
        role,
        line.number,
        shown,
        line.rank,
        cause=pattern.cause,
        fix=pattern.fix,
        restart=pattern.restart,
        source=pattern.source,
        least=pattern.least,
    )


def _role(pattern: Pattern, patterns: Sequence[Pattern], lowered: str) -> str:
    """The line's role. A cause in a warning or retry counts as a retry, or as a warning if the
    program falls back to an alternative. A summary that appears with a symptom counts as a
    symptom."""
    if pattern.role in ("cause", "retry") and _FELL_BACK.search(lowered):
        return "warning"
    if pattern.role == "cause" and _TRYING_AGAIN.search(lowered):
        return "retry"
    if pattern.role == "symptom" and _WARNS.match(lowered):
        return "warning"
    if pattern.role == "summary" and any(other.role == "symptom" for other in patterns):
        return "symptom"
    return pattern.role
