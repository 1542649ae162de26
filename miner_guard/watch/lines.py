"""Reads the lines that a miner prints: steps in any known form, phases, pushes."""

from __future__ import annotations

import functools
import math
import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Union

from miner_guard.validators import profiles

_NUMBER = (
    r"[-+]?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+\.?\d*|\.\d+)(?:[eE][-+]?\d{1,3})?"
    r"|nan|[-+]?inf(?:inity)?"
)
_UNIT = r"ms|secs?|seconds?|s|mins?|minutes?|hrs?|hours?|days?|[KMGT]i?B|M|%"
_SECONDS = {"ms": 1e-3, "s": 1.0, "sec": 1.0, "secs": 1.0, "second": 1.0, "seconds": 1.0, "": 1.0}
_GIB = {"mb": 2**-10, "mib": 2**-10, "gb": 1.0, "gib": 1.0, "tb": 2**10, "tib": 2**10}
"""torch counts in powers of two, whatever unit a trainer prints."""

_STEP_UNIT = r"(?:it|iter|iters|iteration|step|steps|batch|batches)"
_PER_SECOND = re.compile(rf"(?<![\w.])(\d+(?:\.\d+)?)\s?{_STEP_UNIT}/s(?:ec)?\b")
_SECONDS_PER = re.compile(rf"(?<![\w.])(\d+(?:\.\d+)?)\s?(ms|s)/{_STEP_UNIT}\b")
_TIME_CELL = re.compile(
    r"(?:^|\|)\s*(?:(\d+)h\s+)?(?:(\d+)m\s+)?(\d+(?:\.\d+)?)\s?(ms|s)\s*(?=\||$)"
)
"""A column that holds only a duration: `| 250.00 ms |`, `| 1m 23s |`."""

_BAR = re.compile(
    r"(?P<done>\d+)/(?P<total>\d+)(?:\s\[[\d:]+<|\s\[[=>.]{3,}\]|\s[━╸╺]{3,})"
    r"|[━╸╺]{3,}\s(?P<rich>\d+)/(?P<whole>\d+)\b"
)
"""A progress bar from tqdm, Keras or rich; rich prints the count after the bar."""

_COUNTER = re.compile(r"\[\s{0,8}(\d+)/\s{0,8}(\d+)(\s{0,4}\(\s{0,4}\d+(?:\.\d+)?%\s?\))?\]")
"""`[ 10/5005]`, `[640/60000 (1%)]`: batches or samples within an epoch; `[0/100] [ 10/5005]`: the
last one, after the epoch's."""

_BATCH = re.compile(r"batch[\s:=]{1,3}\d+(?!\d|\s?/)", re.IGNORECASE)
_OF_EPOCHS = re.compile(r"\bepochs?\W{0,3}$", re.IGNORECASE)

_MIN_SAMPLES = 10_000
"""A counter with a percentage and at least this total counts samples, not batches."""

_HEADER = re.compile(r"\b(?:step|batch|iter|iteration)\W{1,4}\d+\s?/\s?\d+", re.IGNORECASE)
"""`[step=1/739328]`, `-- STEP: 50/3984`: the heading of a step whose loss is on a line below."""

_TRAINS = re.compile(
    r"\s*train(?:ing)?(?: (?:progress|loop|steps?|epoch))?[\s:\d/]*\d%", re.IGNORECASE
)
"""The description of a progress bar that shows training itself: `Training Progress:  3%|`."""

_EVALUATION_HEADING = re.compile(
    r"\W{0,12}(?:eval\w*|valid\w*|test\w*)\b[^\d=:]{0,40}$", re.IGNORECASE
)

_BATCH_SIZE = re.compile(r"batch=\d+\b(?!\s?/)", re.IGNORECASE)
"""`batch=4` is the size of a batch; steps are printed as `batch 4`, `batch: 4`, `batch=4/100`."""

_RANK = re.compile(r"\[default(\d+)\]|\brank[ :=]{0,2}(\d+)\b", re.IGNORECASE)
_EVALUATION = re.compile(
    r"\b(?:eval\w*|val|valid\w*|test\w*)(?: (?:set|results?))?(?:[\s:|\[\](),./%\d-]|eta)*$",
    re.IGNORECASE,
)
"""Matches the text before a line's first field if the loss is an evaluation loss (torchtitan's
`validate step: 10 loss: …`, DETR's `Test:  [  0/196]  eta: 0:05:10  loss: …`)."""

_WHOLE = re.compile(r"\d{1,3}(?:,\d{3})+|\d+")
_SEPARATORS = re.compile(r"[ _./-]+")
_LOSS_WORD = re.compile(r"\bloss\b.{0,24}\d", re.IGNORECASE)
_STEP_WORD = re.compile(r"\b(?:step|iter|iteration|batch)\W{1,4}\d", re.IGNORECASE)


@dataclass(frozen=True)
class StepLine:
    """The step that one line reports. Fields the line lacks are None."""

    outer: int | None = None
    epoch: int | None = None
    inner: int | None = None
    """The inner step; None if the line has a loss but no step number."""

    loss: float | None = None
    lr: float | None = None
    grad_norm: float | None = None
    seconds: float | None = None
    gpu_gb: float | None = None
    partial: bool = False
    """True for a progress bar or a micro-batch, whose step ends when the next one begins."""

    rank: int | None = None
    """The rank that the line names."""

    maybe_elapsed: bool = False
    """True if `seconds` may be the time since the start, because the line calls it just `time`."""

    samples: bool = False
    """True if the number may count samples, in which case the difference between two lines may not
    be a number of steps."""

    total: int | None = None
    """The progress bar's total; None without a progress bar."""

    trains: bool = False
    """True if the progress bar says that it shows training."""

    heading: bool = False
    """True if the step's values are on the lines below; without a number, those of an
    evaluation."""


@dataclass(frozen=True)
class _Field:
    place: int
    start: int
    value: str
    unit: str


class Grammar:
    """Parses step lines, with the names of quantities in watch/patterns.toml."""

    def __init__(self, vocabulary: Mapping[str, Any]) -> None:
        names = vocabulary["names"]
        self._names = {
            _plain(name): (quantity, place)
            for quantity, spelled in names.items()
            for place, name in enumerate(spelled)
        }
        by_length = sorted((name for spelled in names.values() for name in spelled), key=len)
        either = "|".join(_spelling(name) for name in reversed(by_length))
        self._field = re.compile(
            rf"(?<![\w./-])(?P<name>{either})(?:\s?\((?P<of>{_UNIT})\))?[\s:=#'\"\[(]{{1,24}}"
            rf"(?P<value>{_NUMBER})(?:\s?(?P<unit>{_UNIT})(?![\w/])|\s?/\s{{0,8}}\d+(?![\d/])"
            r"|(?![\w/]|[.:-]\d| of\b))",
            re.IGNORECASE,
        )
        bars = "|".join(map(_spelling, vocabulary["lines"]["bars"]))
        self._bar_of_training = re.compile(
            rf"\s*(?:(?:{bars})\b[^:|]{{0,40}}:?\s*)?", re.IGNORECASE
        )
        self._not_steps = re.compile(
            rf"\b(?:{'|'.join(map(_spelling, vocabulary['lines']['not_steps']))})", re.IGNORECASE
        )

    def read(self, text: str) -> StepLine | None:
        """Return the step that `text` reports, or None. `text` is one line without colour codes."""
        fields = self._fields(text)
        first = min((field.start for field in fields.values()), default=len(text))
        if _EVALUATION.search(text, 0, first):
            return None
        loss = fields.get("loss")
        if loss is None and "eval_loss" in fields:
            # nanoGPT evaluates both: `step 500: train loss 2.1, val loss 3.2`.
            return None
        loss = loss or fields.get("train_loss")
        if not fields and _EVALUATION_HEADING.match(text):
            return StepLine(heading=True)
        bar = self._bar(text, loss is not None)
        step, samples = _step(text, fields, bar)
        if (step is None or loss is None) and self._not_steps.search(text):
            return None
        seconds, maybe_elapsed = _seconds(text, fields)
        lr = _number(fields.get("lr"))
        several = "adversarial" in fields
        if loss is None and (step is None or (lr is None and seconds is None and not several)):
            if step is not None and _HEADER.search(text):
                return StepLine(epoch=_whole(fields.get("epoch")), inner=step, heading=True)
            return None
        if step is None and "micro" in fields:
            return None
        return StepLine(
            outer=_whole(fields.get("outer")),
            epoch=_whole(fields.get("epoch")),
            inner=step,
            loss=_number(loss),
            lr=lr,
            grad_norm=_number(fields.get("grad_norm")),
            seconds=seconds,
            gpu_gb=_number(fields.get("memory"), _GIB),
            partial=bar is not None or "micro" in fields,
            rank=_rank(text, first),
            maybe_elapsed=maybe_elapsed,
            samples=samples,
            total=None if bar is None else bar[1],
            trains=bar is not None and _TRAINS.match(text) is not None,
        )

    def values(self, text: str) -> dict[str, float]:
        """Return the numbers in `text` by quantity; times in seconds, memory in GiB."""
        units = {"memory": {**_GIB, "": 1.0}, "step_time": _SECONDS}
        values = {name: _number(f, units.get(name)) for name, f in self._fields(text).items()}
        return {name: value for name, value in values.items() if value is not None}

    def quantity(self, name: str) -> tuple[str, int] | None:
        """Return the quantity that a name denotes, and the name's place in the vocabulary."""
        return self._names.get(_plain(name))

    def _fields(self, text: str) -> dict[str, _Field]:
        """Return the fields by quantity. If several fields name the same quantity, the preferred
        name wins, then the first field."""
        fields: dict[str, _Field] = {}
        for match in self._field.finditer(text):
            quantity, place = self._names[_plain(match["name"])]
            if _BATCH_SIZE.match(text, match.start()):
                continue
            unit = (match["of"] or match["unit"] or "").lower()
            field = _Field(place, match.start(), match["value"], unit)
            if quantity not in fields or place < fields[quantity].place:
                fields[quantity] = field
        return fields

    def _bar(self, text: str, has_loss: bool) -> tuple[int, int] | None:
        """Return the current and final count of a training loop's progress bar. If the line has no
        loss, the bar's description decides whether it belongs to a training loop."""
        match = _BAR.search(text)
        if match is None:
            return None
        if not has_loss:
            described = re.split(r"\d+%\||[━╸╺]{3}", text[: match.start()])[0]
            if self._bar_of_training.fullmatch(described) is None:
                return None
        return int(match["done"] or match["rich"]), int(match["total"] or match["whole"])


def _step(
    text: str, fields: Mapping[str, _Field], bar: tuple[int, int] | None
) -> tuple[int | None, bool]:
    """The step's number, and whether that number might count samples instead of steps."""
    named = _whole(fields.get("step"))
    counters = [*_COUNTER.finditer(text)][-1:]
    # Beside a counter, a bare `batch 16` is the batch's size.
    sized = counters and named is not None and _BATCH.match(text, fields["step"].start)
    if named is not None and not (sized and not _OF_EPOCHS.search(text, 0, counters[0].start())):
        return named, False
    if bar is not None:
        return bar[0], False
    for counter in counters:
        return int(counter[1]), bool(counter[3]) and int(counter[2]) >= _MIN_SAMPLES
    return None, False


def _seconds(text: str, fields: Mapping[str, _Field]) -> tuple[float | None, bool]:
    """The step's duration, and whether it might be the time since the run began."""
    named = _number(fields.get("step_time"), _SECONDS)
    if named is not None:
        return named, False
    if (per_second := _PER_SECOND.search(text)) is not None and float(per_second[1]) > 0:
        return 1 / float(per_second[1]), False
    if (each := _SECONDS_PER.search(text)) is not None:
        return float(each[1]) * _SECONDS[each[2]], False
    if (cell := _TIME_CELL.search(text)) is not None:
        last = float(cell[3]) * _SECONDS[cell[4]]
        return 3600 * int(cell[1] or 0) + 60 * int(cell[2] or 0) + last, False
    time = _number(fields.get("time"), _SECONDS)
    return time, time is not None


def _rank(text: str, before: int) -> int | None:
    match = _RANK.search(text, 0, before)
    return None if match is None else int(match[1] or match[2])


def lacking(line: str) -> str:
    """What a line that is not read as a step lacks to be one; empty if it does not resemble one."""
    text = bare(line)
    if _LOSS_WORD.search(text):
        return "it mentions a loss, but not as a known name with a number"
    number = _STEP_WORD.search(text)
    return "it has a step number, but no loss, step time or learning rate" if number else ""


def _spelling(name: str) -> str:
    return r"[ _./-]{0,2}".join(map(re.escape, name.split()))


def _plain(name: str) -> str:
    return _SEPARATORS.sub("", name.lower())


def _whole(field: _Field | None) -> int | None:
    return int(field.value.replace(",", "")) if field and _WHOLE.fullmatch(field.value) else None


def _number(field: _Field | None, units: Mapping[str, float] | None = None) -> float | None:
    """The field's value, scaled by its unit; None if that is not one of `units`."""
    if field is None or (units is not None and field.unit not in units):
        return None
    return float(field.value.replace(",", "")) * (1.0 if units is None else units[field.unit])


_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_MAX_LINE_LENGTH = 2000
_REMEMBERED = 16
"""Steps remembered to recognise a repeated line (another rank, a second handler)."""

_ROUNDED_S = 1.0
"""How much longer than its process a step may seem to last, because programs round."""

_MAX_LAG = 3
"""Maximum number of steps by which one rank's output lags behind another's."""

_SAME_RATIO = 0.1
"""How far a printed duration may differ from the time between two lines and still be that time."""

KINDS = ("step", "push", "push_failed", "sent", "dropped", "phase")

Patterns = Sequence[tuple[str, re.Pattern[str]]]
"""Expressions with their kinds, in the order in which they are tried. The grammar reads the step
lines that none of them matches. watch/patterns.toml explains the groups."""


@dataclass(frozen=True)
class PushLine:
    """A line in which the miner reports a push or a failed push."""

    tag: str | None
    error: str | None


@dataclass(frozen=True)
class SentLine:
    """A line in which a client reports that a peer acknowledged what it sent, or that it gave
    up."""

    dropped: bool


@dataclass(frozen=True)
class PhaseLine:
    """A line in which the miner enters a phase or reports how long one took."""

    phase: str
    """The phase, which lasts until the next step or phase line; empty for ordinary training."""

    seconds: float | None = None
    """How long the phase took; None if it has only begun."""

    outer: int | None = None
    """The outer step that the following steps belong to."""

    position: int | None = None
    """The place in a queue."""


Line = Union[StepLine, PushLine, PhaseLine, SentLine]


@dataclass(frozen=True)
class LoggedStep:
    """A step as reconstructed from the log. Times are monotonic seconds."""

    line: StepLine
    """`line.seconds` is the duration that the program printed."""

    start: float
    end: float


def read_line(line: str, patterns: Patterns) -> Line | None:
    """Parse a line; None if it reports nothing of these kinds."""
    text = bare(line)
    for kind, pattern in patterns:
        if (match := pattern.search(text)) is not None:
            return _matched(kind, match)
    return grammar().read(text)


def read_push(line: str, patterns: Patterns) -> PushLine | None:
    """The push that a line reports; None for any other line."""
    text = bare(line)
    for kind, pattern in patterns:
        if kind in ("push", "push_failed") and (match := pattern.search(text)) is not None:
            return _pushed(kind, match)
    return None


def _pushed(kind: str, match: re.Match[str]) -> PushLine:
    if kind == "push":
        return PushLine(match.groupdict().get("tag"), None)
    return PushLine(None, match.groupdict().get("reason") or match[0])


def _matched(kind: str, match: re.Match[str]) -> Line | None:
    groups = match.groupdict()
    if kind in ("sent", "dropped"):
        return SentLine(kind == "dropped")
    if kind == "step":
        evaluates = _EVALUATION.search(match.string, 0, match.start())
        return None if evaluates else _step_of(groups)
    if kind != "phase":
        return _pushed(kind, match)
    outer, seconds = _int(groups.pop("outer", None)), _float(groups.pop("seconds", None))
    position = _int(groups.pop("position", None))
    phase = next((name for name, value in groups.items() if value is not None), "")
    return PhaseLine(phase, seconds, outer, position)


def bare(line: str, max_length: int = _MAX_LINE_LENGTH) -> str:
    """Return the beginning of a line, without its colour codes."""
    return _ANSI.sub("", line[:max_length])


EVALUATION_WORDS = frozenset({b"val"})
"""Every line that prints an evaluation loss contains this lower-case word."""


def evaluation_in(line: bytes) -> float | None:
    """Return the evaluation loss in a line of a miner's output, or None if it has none."""
    if b"val" not in (small := line.lower()) or b"loss" not in small:
        return None
    return grammar().values(bare(line.decode("utf-8", "replace"))).get("eval_loss")


def _step_of(groups: Mapping[str, str | None]) -> StepLine | None:
    inner = _int(groups.get("inner") or groups.get("step"))
    if inner is None:
        return None
    ms = _float(groups.get("ms"))
    return StepLine(
        outer=_int(groups.get("outer")),
        inner=inner,
        loss=_float(groups.get("loss")),
        lr=_float(groups.get("lr")),
        grad_norm=_float(groups.get("grad_norm")),
        seconds=_float(groups.get("seconds")) if ms is None else ms / 1000,
        gpu_gb=_float(groups.get("gpu_gb")),
        partial=groups.get("micro") is not None,
        rank=_int(groups.get("rank")),
    )


def _int(text: str | None) -> int | None:
    digits = "" if text is None else text.replace(",", "").replace("_", "")
    return int(digits) if digits.isdecimal() else None


def _float(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        return float(text.rstrip(".,;|"))
    except ValueError:
        return None


def _key(line: StepLine) -> tuple[int | None, ...]:
    return (line.outer, line.epoch, line.inner)


class LogSteps:
    """Assembles steps from the lines of one launch. O(1) memory."""

    def __init__(self, started: float) -> None:
        """`started`: launch time of the miner, monotonic seconds; -inf if unknown."""
        self._started = self._since = started
        self._pending: StepLine | None = None
        """The latest redraw of a progress bar, or the latest micro-batch, of a step that has not
        ended."""

        self._recent_keys: deque[tuple[int | None, ...]] = deque(maxlen=_REMEMBERED)
        self._last: StepLine | None = None
        self._rank: int | None = None
        """The lowest rank that prints steps; the other ranks print the same steps."""

        self._heading: StepLine | None = None
        """The latest heading, until the loss below it."""

        self._with_loss = False
        self._bare: tuple[StepLine, int, float] | None = None
        self._unnumbered = 0
        self._numbered = False
        self._bar_total: int | None = None
        """The total of the progress bar that counts steps: the one with a loss printed next to
        it."""

        self._elapsed = _ElapsedWatch()

    def observe(self, line: StepLine, now: float) -> Iterator[LoggedStep]:
        """Yield the steps that ended with this line, which arrived at `now`."""
        if self._of_another_rank(line.rank):
            return
        if line.heading:
            self._heading = line
        elif line.inner is None:
            yield from self._observe_unnumbered(line, now)
        elif line.partial:
            yield from self._observe_partial(line, line.inner, now)
        elif line.loss is not None or line.seconds is not None or line.lr is None:
            self._numbered, self._heading = True, None
            yield from self._ended(line, line.inner, now)
        elif not self._with_loss:
            # Otherwise another logger only repeats the number: DeepSpeed's beside Megatron's.
            yield from self._observe_bare(line, line.inner, now)

    def finish(self, now: float) -> Iterator[LoggedStep]:
        """Yield the last step if no later line has shown its end. Call this once the miner has
        exited."""
        pending, self._pending = self._pending, None
        if pending is not None and pending.inner is not None and self._counts(pending):
            yield from self._ended(pending, pending.inner, now)

    def _of_another_rank(self, rank: int | None) -> bool:
        if rank is not None:
            self._rank = rank if self._rank is None else min(rank, self._rank)
        return rank is not None and rank != self._rank

    def _observe_bare(self, line: StepLine, inner: int, now: float) -> Iterator[LoggedStep]:
        """A number with nothing but a learning rate is a step's if it grows: DeepSpeed
        prints `step=0` once beside the losses of another trainer."""
        before, self._bare = self._bare, (line, inner, now)
        if before is not None and before[1] < inner:
            if not self._numbered:
                yield from self._ended(*before)
            self._numbered, self._heading = True, None
            yield from self._ended(line, inner, now)

    def _observe_unnumbered(self, line: StepLine, now: float) -> Iterator[LoggedStep]:
        """A loss without a step number belongs to the step that the progress bar next to it shows
        (HF Trainer), or to the next step if the program prints no numbers."""
        pending, heading = self._pending, self._heading
        if heading is not None:
            if heading.inner is not None:
                self._heading, self._numbered = None, True
                merged = replace(line, epoch=heading.epoch, inner=heading.inner)
                yield from self._ended(merged, heading.inner, now)
        elif pending is not None and pending.inner is not None and pending.loss is None:
            self._bar_total, self._pending, self._numbered = pending.total, None, True
            merged = replace(line, inner=pending.inner)
            yield from self._ended(merged, pending.inner, now)
        elif not self._numbered:
            self._unnumbered += 1
            yield from self._ended(replace(line, inner=self._unnumbered), self._unnumbered, now)

    def _observe_partial(self, line: StepLine, inner: int, now: float) -> Iterator[LoggedStep]:
        pending = self._pending
        if (
            pending is not None
            and pending.inner is not None
            and _key(pending) != _key(line)
            and self._counts(pending)
        ):
            self._numbered = True
            yield from self._ended(pending, pending.inner, now)
        # A bar's rate is smoothed; the arrival times of its redraws are not.
        self._pending = line if line.total is None else replace(line, seconds=None)

    def _counts(self, pending: StepLine) -> bool:
        """Return whether a bar without a loss is known to count steps: programs show bars for other
        work too."""
        shown = pending.trains or pending.total == self._bar_total
        return pending.total is None or pending.loss is not None or shown

    def _ended(self, line: StepLine, inner: int, now: float) -> Iterator[LoggedStep]:
        before = -1 if self._last is None or self._last.inner is None else self._last.inner
        if inner < before - _MAX_LAG:
            # A new epoch counts from the start again.
            self._recent_keys.clear()
        if _key(line) in self._recent_keys:
            return
        self._recent_keys.append(_key(line))
        self._with_loss |= line.loss is not None
        last, self._last = self._last, line
        jump = 1
        if last is not None and _key(last)[:2] == _key(line)[:2] and not line.samples:
            jump = max(inner - before, 1)
        printed = self._elapsed.step_time(line)
        if printed is not None and printed > now - self._started + _ROUNDED_S:
            # No step lasts longer than its process: the number is a date, or another quantity.
            printed = None
        gap = now - self._since
        if printed is not None and jump > 1 and abs(printed - gap) < _SAME_RATIO * gap:
            # The line gives the time of the whole interval.
            printed /= jump
        seconds = gap / jump if printed is None else printed
        self._since = now
        yield LoggedStep(replace(line, seconds=printed), now - seconds, now)


class _ElapsedWatch:
    """Distinguishes a step's time from the time since the start, in the output of trainers that
    call both `time`."""

    def __init__(self) -> None:
        self._first: float | None = None
        self._last = 0.0
        self._growing = 0

    def step_time(self, line: StepLine) -> float | None:
        """Return the step time in the line, or None if it has none. A `time` that has grown with
        each of the last `_GROWING` lines, to `_GROWN` times the first, is not a step time."""
        if line.seconds is None or not line.maybe_elapsed:
            return line.seconds
        grows = self._first is not None and line.seconds > self._last
        self._growing = self._growing + 1 if grows else 0
        self._first = line.seconds if not grows or self._first is None else self._first
        self._last = line.seconds
        grown = self._growing >= _GROWING and line.seconds >= _GROWN * self._first
        return None if grown else line.seconds


_GROWING, _GROWN = 3, 1.5
"""Four consecutive lines, each with a longer time than the one before: random step times rarely
rise that many times in a row, let alone by half."""


if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_COMMON = Path(__file__).with_name("patterns.toml")


@functools.lru_cache(maxsize=1)
def _common() -> Mapping[str, Any]:
    return tomllib.loads(_COMMON.read_text(encoding="utf-8"))


@functools.lru_cache(maxsize=1)
def grammar() -> Grammar:
    """The step-line grammar with the common vocabulary."""
    return Grammar(_common())


def patterns(profile: str | None, custom: Iterable[str] = ()) -> Patterns:
    """The step patterns `custom`, then those of `profile` (if any), then the common ones. Raises
    re.error for an expression of `custom` that is invalid or names no step."""
    for text in custom:
        if not {"step", "inner"} & re.compile(text).groupindex.keys():
            raise re.error("it has no group named `step` or `inner`", text)
    tables: list[Mapping[str, Iterable[str]]] = [{"step": custom}]
    if profile is not None:
        tables.append(profiles.load_profile(profile).patterns)
    tables.append(_common()["patterns"])
    return [(kind, re.compile(p)) for kind in KINDS for t in tables for p in t.get(kind, ())]


_MAX_MISSES = 5
_QUOTED = 160

FIELDS = ("loss", "seconds", "lr", "grad_norm", "gpu_gb")
"""Values that a step line may contain besides the step number."""


def quoted(line: str) -> str:
    """Shorten `line` for a message: collapse runs of spaces and keep at most 160 characters."""
    text = " ".join(line.split())
    return text if len(text) <= _QUOTED else f"{text[: _QUOTED - 1]}…"


@dataclass
class LogCheck:
    """What `--attach log` would read from a log."""

    lines: int = 0
    steps: list[dict[str, Any]] = field(default_factory=list)
    """For each step the 1-based `line`, the values, and the line's text as `text`."""

    misses: list[dict[str, Any]] = field(default_factory=list)
    """The first lines that resemble a step: `line`, `why` it is not a step, and `text`."""

    def counted(self) -> Mapping[str, int]:
        """How many steps have each value."""
        return {name: sum(row[name] is not None for row in self.steps) for name in FIELDS}


def check(lines: Iterable[str], patterns: Patterns) -> LogCheck:
    """Read a log as the `log_attach` monitor would. It does not know when lines arrived, so the
    only duration known for a step is the one printed on its line."""
    result, steps = LogCheck(), LogSteps(-math.inf)

    def add(ended: Iterable[LoggedStep], text: str) -> None:
        for logged in ended:
            row = {"line": result.lines, "step": logged.line.inner}
            row |= {name: getattr(logged.line, name) for name in ("outer", "epoch", *FIELDS)}
            result.steps.append({**row, "text": text})

    for place, raw in enumerate(lines, 1):
        result.lines = place
        for text in filter(None, raw.rstrip("\n").split("\r")):
            parsed = read_line(text, patterns)
            if isinstance(parsed, StepLine):
                add(steps.observe(parsed, float(place)), quoted(text))
            elif parsed is None and len(result.misses) < _MAX_MISSES and (why := lacking(text)):
                result.misses.append({"line": place, "why": why, "text": quoted(text)})
    add(steps.finish(float(result.lines)), "(the end of the log)")
    return result
