"""Turns raw bytes into sightings, in one pass and in bounded memory.

The same bytes give the same sightings, however they are split into chunks. A miner prints the same
lines over and over with different numbers, so lines are compared without their numbers, and only
new shapes are searched for trigger words. Every known error contains one, so only lines with a
trigger word are examined individually.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import replace

from miner_guard.eventlog.line_templates import LineChunk, TemplateFilter, template
from miner_guard.incidents import own
from miner_guard.incidents.frame_runs import lines_outside
from miner_guard.incidents.knowledge import Knowledge
from miner_guard.incidents.log_lines import CHAINED, WARNS, LineReader, LogLine, log_line
from miner_guard.incidents.log_text import (
    MAX_BLOBLESS,
    MAX_LINE,
    clean,
    excerpt,
    is_plain,
    json_record,
    pieces,
    unwrapped,
    without_blobs,
)
from miner_guard.incidents.patterns import Benign, Pattern
from miner_guard.incidents.recovery import PendingError, RecoveryTracker, pending
from miner_guard.incidents.regexes import RegexSearch
from miner_guard.incidents.sightings import Launched, Passed, Retraction, Seen, Sighting
from miner_guard.incidents.tracebacks import MAX_STREAMS, CutOff, Ended, Tracebacks
from miner_guard.incidents.unmatched import UNKNOWN_EXCEPTION, UnmatchedErrors, says_little

_CHAIN_LINES = 6
"""Maximum number of lines from an exception to the sentence that chains it to the next one."""

_TRYING_AGAIN = (
    "retrying",
    "reconnect",
    "trying again",
    "will try again",
    "thrown while requesting",
)
_TRIED_AGAIN = RegexSearch(
    r"\bretry|(?<!max )(?<!after \d )(?<!after \d\d )\bretries\b|attempt \d{1,9} ?(?:/|of) ?\d"
    r"|(?<!nccl )\bwarn(?:ing)?\b|userwarning"
)
_FELL_BACK = RegexSearch(r"\busing \w{1,20} instead\b|\bfall(?:ing|en|s)? ?back (?:to|on)\b")
"""How a program reports falling back to an alternative."""

_TOLD = 800
"""How many characters of a line to keep: enough for the sizes in an out-of-memory message."""

_TAIL_LINES = 3
"""Lines after an out-of-memory error that may contain its sizes."""


class Scanner:
    """Finds the known errors in a log that arrives in chunks of any size."""

    def __init__(self, knowledge: Knowledge, *, notices: bool = False) -> None:
        """`notices`: whether to report notices and hints too, even if nothing has failed."""
        self._knowledge = knowledge
        self._notices = notices
        self._carry = b""
        self._reader = LineReader(knowledge.words)
        self._tracebacks = Tracebacks()
        self._unmatched = UnmatchedErrors(knowledge)
        self._read_on = 0
        """Number of the latest line that was read as part of a longer message."""

        self._raised: dict[int | None, Sighting] = {}
        """The latest exception of each rank."""

        self._chained: dict[int | None, Sighting] = {}
        """For each rank, an exception whose successor in the chain has not appeared yet."""

        self._logged: dict[int | None, Sighting] = {}
        """For each rank, the latest error that was logged without a traceback and that further
        steps could clear."""

        self._tail: Sighting | None = None
        self._tail_line = 0
        self._sieve = TemplateFilter(knowledge.triggers)
        self._course = RecoveryTracker()
        self._past: tuple[int, set[bytes]] = (0, set())
        """A line's number, and the words in the pieces read so far."""

        self.line = 1
        """Number of the next line."""

    def feed(self, chunk: bytes) -> list[Seen]:
        """The sightings in the complete lines of the next chunk."""
        if isinstance(chunk, LineChunk) and not self._carry:
            return self._block(chunk)
        data = self._carry + chunk if self._carry else chunk
        cut = data.rfind(b"\n") + 1
        seen = self._block(data[:cut]) if cut else []
        *complete, self._carry = pieces(data[cut:])
        for piece in complete:
            seen += self._block(piece)
        return seen

    def finish(self) -> list[Seen]:
        """The sightings in an unfinished last line, and in a traceback cut off by the end of the
        log."""
        rest, self._carry = self._carry, b""
        seen = [*self._block(rest), *self._chained.values()]
        if (cut := self._tracebacks.cut_off(self.line)) is not None:
            seen += self._cut_off(cut)
        return seen

    def _cut_off(self, cut: CutOff) -> list[Sighting]:
        matches = self._knowledge.match(cut.raises.lower()) if cut.raises else []
        if isinstance(matches, Benign) or not matches:
            named = self._unmatched.cut_off(cut)
            matches = [named] if named else []
        if not matches:
            text_shown = "a traceback cut off by the end of the log"
            return [Sighting("code_bug", "symptom", cut.line, text_shown, cut.rank)]
        shown = excerpt(cut.raises, _TOLD)
        line = log_line(cut.rank, cut.line, cut.raises)
        return [_sighting(p, line, p.role, shown) for p in matches]

    def _block(self, block: bytes) -> list[Seen]:
        """Scan a block of lines. If it does not end with a newline, the next block continues the
        last line under the same number."""
        seen: list[Seen] = []
        known = block if isinstance(block, LineChunk) else LineChunk(block)
        shapes, hot = known.templates, self._sieve.matching(known)
        # Every line that begins a frame is hot, because `file "` is a trigger.
        runs = self._tracebacks.runs(block) if hot or self._tracebacks.quoting else []
        frames = {run.first: run for run in runs}
        hits = lines_outside(runs, shapes, hot) if hot else set()
        indices = hits | self._tails(shapes, hits) | frames.keys()
        waits = self._course.waits or self._unmatched.waits
        lines = block.split(b"\n") if indices or waits else []
        if self._unmatched.waits:
            self._go_on_unmatched(lines, 0, seen)
        for index in sorted(indices):
            if self._tail is not None:
                self._go_on(lines[index], self.line + index, seen)
            if index in frames:
                self._tracebacks.take(frames[index], self.line + index)
            elif index in hits:
                found: list[Seen] = []
                self._line(lines[index], self.line + index, found)
                if found:
                    seen += self._relevant(found, shapes, index)
                if self._unmatched.waits:
                    self._go_on_unmatched(lines, index + 1, seen)
        for troubles, number in self._course.overcome(lines, shapes, self.line, self._tried(seen)):
            for trouble in troubles:
                past = Retraction((trouble.label,), number, None, trouble.roles)
                seen.append(past if trouble.needed else Passed((trouble.label,), number))
        self._course.pass_by(shapes)
        self.line += len(shapes) - 1
        return seen

    def _relevant(self, found: list[Seen], shapes: list[bytes], index: int) -> list[Seen]:
        """A line's sightings, except those that no longer matter because training has finished."""
        labels = self._knowledge.labels
        moot = [s for s in found if isinstance(s, Sighting) and labels[s.label].moot_when_finished]
        return (
            [s for s in found if s not in moot]
            if moot and self._course.finished(shapes, index)
            else found
        )

    def _tried(self, seen: list[Seen]) -> dict[int, set[PendingError]]:
        """The errors that later steps could clear, for each line in this block with a sighting."""
        tried: dict[int, set[PendingError]] = {}
        if not seen:
            # Reading the labels would parse all knowledge files, which takes longer than the scan.
            return tried
        labels = self._knowledge.labels
        for s in seen:
            if isinstance(s, Sighting) and s.line >= self.line and s.role != "notice":
                errors = tried.setdefault(s.line, set())
                if (trouble := pending(s, labels[s.label])) is not None:
                    errors.add(trouble)
        return tried

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
        whole = len(line) < MAX_LINE and self._past[0] != number
        if whole and len(line) < MAX_BLOBLESS and b" " in line and b"\r" not in line:
            self._piece(line, number, seen)
            return
        past = None if whole else self._past_words(number)
        for piece in pieces(line):
            if past and self._repeats(piece, past):
                continue
            short = without_blobs(piece)
            if b"\r" in short:
                for redraw in self._sieve.holding(short.split(b"\r")):
                    self._piece(redraw, number, seen)
            elif (short is piece and len(line) <= MAX_LINE) or self._sieve.holds(template(short)):
                self._piece(short, number, seen, past)

    def _repeats(self, piece: bytes, past: set[bytes]) -> bool:
        """Whether a piece of a long line certainly adds nothing to the earlier pieces, whose words
        are in `past`. Deciding this is several times as fast as reading the piece."""
        return is_plain(piece) and not self._knowledge.adds(piece.decode("ascii").lower(), past)

    def _past_words(self, number: int) -> set[bytes]:
        """The words in the earlier pieces of line `number`."""
        if self._past[0] != number:
            self._past = (number, set())
        return self._past[1]

    def _piece(
        self, raw: bytes, number: int, seen: list[Seen], past: set[bytes] | None = None
    ) -> None:
        line = self._reader.read(raw, number)
        if (record := json_record(line.text)) is not None:
            for teller, message in unwrapped(line.rank, record):
                self._text(log_line(teller, number, message), seen)
            return
        if not past or self._knowledge.adds(line.lowered, past):
            self._text(line, seen, past or frozenset())
        if past is not None:
            past |= self._knowledge.words(line.lowered)

    def _text(self, line: LogLine, seen: list[Seen], past: Set[bytes] = frozenset()) -> None:
        if line.shape.ordinary or not self._belongs(line, seen):
            self._examine(line, seen, past)

    def _belongs(self, line: LogLine, seen: list[Seen]) -> bool:
        """Whether the line is only part of a traceback or of the guard's own output."""
        if self._tracebacks.follow(line):
            return True
        if own.launches(line.lowered):
            seen.append(Launched(line.number))
            return True
        if (incident := own.named(line.lowered, self._knowledge)) is not None:
            label, role = incident
            shown = excerpt(line.text, _TOLD)
            seen.append(Sighting(label.name, role, line.number, shown, line.rank))
            return True
        if any(words in line.lowered for words in CHAINED):
            self._chain(line, seen)
        return False

    def _examine(self, line: LogLine, seen: list[Seen], past: Set[bytes]) -> None:
        ignored = self._tracebacks.ignores(line)
        matches = [] if ignored else self._knowledge.match(line.lowered, past)
        if not isinstance(matches, Benign):
            if not matches and self._notices and not ignored:
                traced = self._tracebacks.is_open(line.rank)
                matches = self._unmatched.line(line, traced=traced)
            self._matched(line, matches, seen)
        elif matches.cancels:
            seen.append(Retraction(matches.cancels, line.number, roles=matches.roles, coped=True))
        elif matches.notice and self._notices:
            shown = excerpt(line.text, _TOLD, matches.pattern.first_word(line.lowered))
            noticed = replace(matches.pattern, label=matches.notice)
            seen.append(_sighting(noticed, line, "notice", shown))

    def _matched(self, line: LogLine, matches: list[Pattern], seen: list[Seen]) -> None:
        """Record a line's matches as sightings. An exception counts even without a match."""
        ended = self._tracebacks.ends(line)
        if ended is not None:
            first, known = self._chained.pop(line.rank, None), bool(matches)
            matches = self._knowledge.match_in(ended.frames, line.lowered, matches, ended.text)
            if not matches or says_little(matches):
                named = self._unmatched.exception(ended, line.text)
                matches = named or matches or self._unmatched.default(ended.name, line.text)
            if not known and first is not None and says_little(matches):
                self._raised[line.rank] = first
                seen.append(first)
                return
            if ended.frames and ended.name == "FileNotFoundError":
                seen += self._went_past(line)
        for pattern in matches:
            shown = excerpt(line.text, _TOLD, pattern.first_word(line.lowered))
            role = _role(pattern, matches, line.lowered)
            found = _sighting(pattern, line, role, shown)
            self._saw(found, line, ended, seen)
            if ended is not None and pattern is UNKNOWN_EXCEPTION:
                self._unmatched.expect_more(found, ended, line)
                self._read_on = line.number

    def _saw(self, found: Sighting, line: LogLine, ended: Ended | None, seen: list[Seen]) -> None:
        seen.append(found)
        rank = found.rank
        if not self._tracebacks.is_open(rank) and (ended is None or not ended.frames):
            self._log(found)
        if ended is not None and (rank in self._raised or len(self._raised) < MAX_STREAMS):
            self._raised[rank] = found
        if found.label == "cuda_oom" and "total" not in line.lowered:
            self._tail = found

    def _log(self, sighting: Sighting) -> None:
        known = sighting.rank in self._logged or len(self._logged) < MAX_STREAMS
        if (
            known
            and sighting.role in ("cause", "retry")
            and self._knowledge.labels[sighting.label].overcome_by_steps
        ):
            self._logged[sighting.rank] = sighting

    def _went_past(self, line: LogLine) -> Iterator[Retraction]:
        """Retract the error that a rank logged before it failed on a missing file, because the rank
        had continued after that error."""
        for teller in (line.rank, None):
            if (passed := self._logged.pop(teller, None)) is not None:
                within = line.number - passed.line
                yield Retraction((passed.label,), line.number, within, ("cause", "retry"))

    def _go_on(self, line: bytes, number: int, seen: list[Seen]) -> None:
        """Append a line to the out-of-memory message that it continues."""
        sighting = self._tail
        if sighting is None or number <= max(sighting.line, self._tail_line) or not line.strip():
            return
        self._tail_line = number
        if number > sighting.line + _TAIL_LINES:
            self._tail = None
            return
        more = excerpt(f"{sighting.more} {clean(line[:MAX_LINE])[1]}")
        self._tail = sighting._replace(more=more)
        seen.append(self._tail)

    def _go_on_unmatched(self, lines: list[bytes], start: int, seen: list[Seen]) -> None:
        """Read the lines that may continue the message of an exception that no pattern matched."""
        for index in range(start, len(lines) - (not lines[-1])):
            if self._unmatched.ends_with(lines[index]):
                return
            number = self.line + index
            if number <= self._read_on:
                # Another piece of a long line that was already read.
                continue
            self._read_on = number
            line = self._reader.read(without_blobs(lines[index][:MAX_BLOBLESS]), number)
            if (named := self._unmatched.go_on(line)) is not None:
                within = number - named.line
                seen += [Retraction((UNKNOWN_EXCEPTION.label,), number, within), named]
                self._raised[named.rank] = named

    def _chain(self, line: LogLine, seen: list[Seen]) -> None:
        """Hold the first exception in a chain. It is the one that counts, unless a pattern matches
        only the next one."""
        first = self._raised.get(line.rank)
        if first is None or line.number - first.line > _CHAIN_LINES:
            return
        if first.label == UNKNOWN_EXCEPTION.label:
            seen.append(Retraction((first.label,), line.number, line.number - first.line))
        self._chained[line.rank] = first


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


def _role(pattern: Pattern, matches: list[Pattern], lowered: str) -> str:
    """The line's role. A cause in a warning or retry counts as a retry, or as a warning if the
    program falls back to an alternative. A summary that appears with a symptom counts as a
    symptom."""
    if pattern.role in ("cause", "retry") and _FELL_BACK.found_in(lowered):
        return "warning"
    if pattern.role == "cause" and (
        any(w in lowered for w in _TRYING_AGAIN) or _TRIED_AGAIN.found_in(lowered)
    ):
        return "retry"
    if pattern.role == "symptom" and WARNS.match(lowered):
        return "warning"
    if pattern.role == "summary" and any(other.role == "symptom" for other in matches):
        return "symptom"
    return pattern.role
