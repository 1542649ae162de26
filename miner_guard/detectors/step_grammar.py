"""Parses steps from a trainer's log lines: named fields, progress bars and counters. Pure.

One grammar for all trainers: a field is a name from a vocabulary, some punctuation, and a number
with its unit (`iteration 100/ 5000`, `'loss': '2.3'`, `elapsed time per iteration (ms): 1234.5`). A
line reports a step if it has a step number, named or in a progress bar, and also a loss, a step
time or a learning rate.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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

_COUNTER = re.compile(r"\[\s{0,8}(\d+)/(\d+)(?:\s{0,4}\(\s{0,4}\d+(?:\.\d+)?%\s?\))?\]")
"""`[ 10/5005]`, `[640/60000 (1%)]`: batches or samples within an epoch."""

_RANK = re.compile(r"\[default(\d+)\]|\brank[ :=]{0,2}(\d+)\b", re.IGNORECASE)
_EVALUATION = re.compile(
    r"\b(?:eval\w*|val|valid\w*|test\w*)(?: (?:set|results?))?[\s:|\])-]*$", re.IGNORECASE
)
"""Matches the text before a line's first field if the loss is an evaluation loss (torchtitan's
`validate step: 10 loss: …`)."""

_WHOLE = re.compile(r"\d{1,3}(?:,\d{3})+|\d+")
_SEPARATORS = re.compile(r"[ _./-]+")
_LOSS_WORD = re.compile(r"\bloss\b.{0,24}\d", re.IGNORECASE)


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


@dataclass(frozen=True)
class Miss:
    """A line that has only some of the parts of a step line."""

    why: str
    nearness: int
    """A higher value means closer to a step line."""


@dataclass(frozen=True)
class Vocabulary:
    """The names that trainers use for quantities, from attach/patterns.toml."""

    names: Mapping[str, Sequence[str]]
    """Names by quantity, the preferred one first. A space matches any of ` _./-`, or nothing."""

    bars: Sequence[str] = ()
    """Prefixes that describe a training loop's progress bar."""

    not_steps: Sequence[str] = ()
    """Words that mark a line as reporting something else, unless it has both a step number and a
    loss."""


@dataclass(frozen=True)
class _Field:
    place: int
    start: int
    value: str
    unit: str


class Grammar:
    """Parses step lines."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._names = {
            _plain(name): (quantity, place)
            for quantity, names in vocabulary.names.items()
            for place, name in enumerate(names)
        }
        by_length = sorted((n for names in vocabulary.names.values() for n in names), key=len)
        either = "|".join(_spelling(name) for name in reversed(by_length))
        self._field = re.compile(
            rf"(?<![\w./-])(?P<name>{either})(?:\s?\((?P<of>{_UNIT})\))?[\s:=#'\"\[(]{{1,24}}"
            rf"(?P<value>{_NUMBER})(?:\s?(?P<unit>{_UNIT})(?![\w/])|\s?/\s{{0,8}}\d+(?![\d/])"
            r"|(?![\w/]|[.:-]\d| of\b))",
            re.IGNORECASE,
        )
        bars = "|".join(map(_spelling, vocabulary.bars))
        self._bar_of_training = re.compile(rf"\s*(?:(?:{bars})\b[^:|]{{0,40}}:?)?", re.IGNORECASE)
        self._not_steps = re.compile(
            rf"\b(?:{'|'.join(map(_spelling, vocabulary.not_steps))})", re.IGNORECASE
        )

    def read(self, text: str) -> StepLine | Miss | None:
        """Return the step that `text` reports, a `Miss` if it contains only part of one, or None if
        it is not about a step. `text` is one line without colour codes."""
        fields = self._fields(text)
        first = min((field.start for field in fields.values()), default=len(text))
        if _EVALUATION.search(text, 0, first):
            return None
        loss = fields.get("loss")
        if loss is None and "eval_loss" in fields:
            # nanoGPT evaluates both: `step 500: train loss 2.1, val loss 3.2`.
            return None
        loss = loss or fields.get("train_loss")
        bar = self._bar(text, loss is not None)
        step, samples = _step(text, fields, bar)
        if (step is None or loss is None) and self._not_steps.search(text):
            return None
        seconds, maybe_elapsed = _seconds(text, fields)
        lr = _number(fields.get("lr"))
        if loss is None and (step is None or (lr is None and seconds is None)):
            return _miss(text, step)
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
            gpu_gb=_gib(fields.get("memory")),
            partial=bar is not None or "micro" in fields,
            rank=_rank(text, first),
            maybe_elapsed=maybe_elapsed,
            samples=samples,
            total=None if bar is None else bar[1],
        )

    def _fields(self, text: str) -> dict[str, _Field]:
        """Return the fields by quantity. If several fields name the same quantity, the preferred
        name wins, then the first field."""
        found: dict[str, _Field] = {}
        for match in self._field.finditer(text):
            quantity, place = self._names[_plain(match["name"])]
            unit = (match["of"] or match["unit"] or "").lower()
            field = _Field(place, match.start(), match["value"], unit)
            if quantity not in found or place < found[quantity].place:
                found[quantity] = field
        return found

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
    if named is not None:
        return named, False
    if bar is not None:
        return bar[0], False
    counter = _COUNTER.search(text)
    return (None, False) if counter is None else (int(counter[1]), True)


def _seconds(text: str, fields: Mapping[str, _Field]) -> tuple[float | None, bool]:
    """The step's duration, and whether it might be the time since the run began."""
    named = fields.get("step_time")
    if named is not None and named.unit in _SECONDS:
        return _scaled(named, _SECONDS), False
    if (per_second := _PER_SECOND.search(text)) is not None and float(per_second[1]) > 0:
        return 1 / float(per_second[1]), False
    if (each := _SECONDS_PER.search(text)) is not None:
        return float(each[1]) * _SECONDS[each[2]], False
    if (cell := _TIME_CELL.search(text)) is not None:
        last = float(cell[3]) * _SECONDS[cell[4]]
        return 3600 * int(cell[1] or 0) + 60 * int(cell[2] or 0) + last, False
    field = fields.get("time")
    return (
        (None, False)
        if field is None or field.unit not in _SECONDS
        else (_scaled(field, _SECONDS), True)
    )


def _gib(field: _Field | None) -> float | None:
    return None if field is None or field.unit not in _GIB else _scaled(field, _GIB)


def _scaled(field: _Field | None, units: Mapping[str, float]) -> float | None:
    value = _number(field)
    return None if field is None or value is None else value * units.get(field.unit, 1.0)


def _rank(text: str, before: int) -> int | None:
    match = _RANK.search(text, 0, before)
    return None if match is None else int(match[1] or match[2])


def _miss(text: str, step: int | None) -> Miss | None:
    if _LOSS_WORD.search(text):
        return Miss("it mentions a loss, but not as a known name with a number", 2)
    if step is not None:
        return Miss("it has a step number, but no loss, step time or learning rate", 1)
    return None


def _spelling(name: str) -> str:
    return r"[ _./-]{0,2}".join(map(re.escape, name.split()))


def _plain(name: str) -> str:
    return _SEPARATORS.sub("", name.lower())


def _whole(field: _Field | None) -> int | None:
    return int(field.value.replace(",", "")) if field and _WHOLE.fullmatch(field.value) else None


def _number(field: _Field | None) -> float | None:
    return None if field is None else float(field.value.replace(",", ""))
