"""Reads a trace (JSON lines, CSV, trainer states, printed metrics) into series."""

from __future__ import annotations

import ast
import csv
import itertools
import json
import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import median
from typing import Any

from miner_guard.watch.series import MAD_TO_SIGMA

QUANTITIES = ("loss", "eval_loss", "lr", "grad_norm", "step_time", "gpu_mem_gb")


@dataclass
class Series:
    """One quantity's values with their steps; non-finite ones are kept."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.values)

    def add(self, step: int, value: float) -> None:
        """Append one value."""
        self.steps.append(step)
        self.values.append(value)

    def finite(self) -> Series:
        """This series without non-finite values."""
        kept = [(s, v) for s, v in zip(self.steps, self.values, strict=True) if math.isfinite(v)]
        return Series([s for s, _ in kept], [v for _, v in kept])


@dataclass
class Trace:
    """All series from one run."""

    series: dict[str, Series] = field(
        default_factory=lambda: {name: Series() for name in QUANTITIES}
    )
    nan_said: list[int] = field(default_factory=list)
    """Steps at which guard.jsonl reports a NaN loss (its JSON has null there)."""

    lines: int = 0
    used: int = 0

    def __getitem__(self, name: str) -> Series:
        return self.series[name]

    def nearest(self, name: str, step: int) -> float | None:
        """Return the last finite value of `name` at or before `step`, or None. Assumes increasing
        steps."""
        series = self.series[name]
        for place in range(bisect_right(series.steps, step) - 1, -1, -1):
            if math.isfinite(series.values[place]):
                return series.values[place]
        return None


def centred(values: Sequence[float], width: int) -> list[float]:
    """Return the moving mean over `width` values around each; an even window extends one value
    further to the right."""
    left, right = (width - 1) // 2, width // 2 + 1
    means = []
    for place in range(len(values)):
        part = values[max(0, place - left) : place + right]
        means.append(math.fsum(part) / len(part))
    return means


def step_noise(values: Sequence[float]) -> float:
    """Standard deviation of the value-to-value noise: 1.4826 · median |difference| / sqrt 2."""
    if len(values) < 2:
        return 0.0
    return MAD_TO_SIGMA * median([abs(b - a) for a, b in itertools.pairwise(values)]) / math.sqrt(2)


_MAX_LINE_LENGTH = 100_000
"""Longer lines are skipped; trace lines are shorter."""

_NUMBER = r"([-+]?(?:\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?|\.\d+|nan|inf(?:inity)?))"
_PLAIN_NAMES = {
    "loss": "loss",
    "average loss": "loss",
    "avg loss": "loss",
    "train loss": "loss",
    "train_loss": "loss",
    "training loss": "loss",
    "eval loss": "eval_loss",
    "eval_loss": "eval_loss",
    "eval/loss": "eval_loss",
    "evaluation loss": "eval_loss",
    "val loss": "eval_loss",
    "val_loss": "eval_loss",
    "val/loss": "eval_loss",
    "valid loss": "eval_loss",
    "valid_loss": "eval_loss",
    "validation loss": "eval_loss",
    "validation_loss": "eval_loss",
    "lr": "lr",
    "learning rate": "lr",
    "learning_rate": "lr",
    "grad norm": "grad_norm",
    "grad_norm": "grad_norm",
    "gnorm": "grad_norm",
    "step time": "step_time",
    "step_time": "step_time",
    "step_time_s": "step_time",
    "gpu mem": "gpu_mem_gb",
    "gpu_mem_gb": "gpu_mem_gb",
}
_PLAIN = re.compile(
    r"(?<![\w-])("
    + "|".join(sorted((re.escape(n) for n in _PLAIN_NAMES), key=len, reverse=True))
    + r")(?:\s*[:=]\s*|\s+(?=[-+]?(?:\d+\.\d|nan\b|inf\b)))"
    + _NUMBER
    + r"(?=\s?(?:s|sec|GB|GiB|%)?(?:[^\w.]|\.(?!\d)|$))",
    re.IGNORECASE,
)
_STEP = re.compile(
    r"(?:inner[ _]step|global[ _]step|\bstep|\biter(?:ation)?)\s*[:=#]?\s*\[?\s*(\d[\d,]*)",
    re.IGNORECASE,
)
_OUTER = re.compile(r"outer[ _]step\s*[:=]?\s*(\d+)", re.IGNORECASE)
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


_FIELDS = {
    name.replace(" ", "_").replace("/", "_"): quantity for name, quantity in _PLAIN_NAMES.items()
}
_FIELDS |= {"train_loss_step": "loss"}
_RANKS = {name: place for place, name in enumerate(_FIELDS)}
_STEP_FIELDS = (
    "step",
    "global_step",
    "_step",
    "iteration",
    "iter",
    "trainer/global_step",
    "train/global_step",
)
_SUMMARY = "train_runtime"
"""Key that marks HF Trainer's summary of a finished run; its loss is the mean of all losses."""

_SUMMED_UP = re.compile(r"(?:train|eval)_\w+\s{2,}=\s.*")
"""A row of HF Trainer's summary when it is printed as a table."""

EVALUATION_WORDS = frozenset(
    name.encode() for name, quantity in _PLAIN_NAMES.items() if quantity == "eval_loss"
)
"""Every line that prints an evaluation loss contains at least one of these lower-case strings."""

_MAX_PRINTED_LENGTH = 4096
_MAX_FIELDS = 100


def read(lines: Iterable[str]) -> Trace:
    """The trace in `lines`. `Trace.used` counts the lines with values."""
    trace = Trace()
    counter = _Counter()
    columns: Sequence[str] = ()
    spread = _Spread()
    for line in lines:
        trace.lines += 1
        if len(line) > _MAX_LINE_LENGTH or not (text := spread.join(_ANSI.sub("", line).strip())):
            continue
        if named := _columns(text):
            columns = named
        elif _take_row(trace, counter, columns, text) or _take(trace, counter, text):
            trace.used += 1
    return trace


def is_trace(lines: Iterable[str]) -> bool:
    """Return whether `lines` hold nothing but values. One other line makes them a log, because it
    may name an error; reading ends there."""
    trace, counter, some = Trace(), _Counter(), False
    columns: Sequence[str] = ()
    for line in lines:
        text = _ANSI.sub("", line[:_MAX_LINE_LENGTH]).strip()
        if not text:
            continue
        if named := _columns(text):
            columns = named
        elif _take_row(trace, counter, columns, text) or _take(trace, counter, text):
            some = True
        else:
            return False
    return some


def evaluates(output: bytes) -> bool:
    """Return whether a line or a chunk of output may contain an evaluation loss. Cheap, but not
    exact."""
    small = output.lower()
    return any(word in small for word in EVALUATION_WORDS)


def evaluation_in(line: bytes) -> float | None:
    """Return the evaluation loss in a line of a miner's output, or None if it has none."""
    if len(line) > _MAX_PRINTED_LENGTH or not evaluates(line):
        return None
    text = _ANSI.sub("", line.decode("utf-8", "replace")).strip()
    document = _document(text)
    values = _plain_values(text) if document is None else _named(document)
    return next((value for name, value in values if name == "eval_loss"), None)


class _Spread:
    """Joins a JSON object spread over several lines, as in trainer_state.json, into one line."""

    def __init__(self) -> None:
        self._parts: list[str] = []

    def join(self, text: str) -> str:
        """Return `text` if it is not part of an object. If it is, return an empty string until the
        object is complete, then the whole object."""
        if text == "{":
            self._parts = [text]
            return ""
        if not self._parts:
            return text
        parts, self._parts = [*self._parts, text], []
        if text in ("}", "},"):
            return " ".join(parts).rstrip(",")
        if text.startswith('"') and len(parts) < _MAX_FIELDS:
            self._parts = parts
            return ""
        return text


class _Counter:
    """Assigns numbers to records without a step."""

    def __init__(self) -> None:
        self.records = 0

    def next(self) -> int:
        self.records += 1
        return self.records


def _take(trace: Trace, counter: _Counter, text: str) -> bool:
    document = _document(text)
    if document is None:
        return _take_plain(trace, counter, text)
    if isinstance(document.get("event"), str) and "msg" in document:
        return _take_event(trace, document)
    return _take_record(trace, counter, document)


def _take_record(trace: Trace, counter: _Counter, document: Mapping[str, Any]) -> bool:
    values = list(_named(document))
    if not values or _SUMMARY in document:
        return False
    steps = (_whole(document.get(name)) for name in _STEP_FIELDS)
    step = next((step for step in steps if step is not None), None)
    _add(trace, counter.next() if step is None else step, values)
    return True


def _columns(text: str) -> Sequence[str]:
    """The column names, if `text` is the header of a table of values."""
    if text.startswith("{") or "," not in text:
        return ()
    names = [name.strip().lower() for name in _cells(text)]
    known = any(_field(name) is not None for name in names)
    return names if len(names) > 1 and known and all(number(name) is None for name in names) else ()


def _take_row(trace: Trace, counter: _Counter, columns: Sequence[str], text: str) -> bool:
    if not columns or text.count(",") < len(columns) - 1:
        return False
    cells = _cells(text)
    return len(cells) == len(columns) and _take_record(
        trace, counter, dict(zip(columns, cells, strict=True))
    )


def _cells(text: str) -> Sequence[str]:
    try:
        return next(csv.reader([text], skipinitialspace=True), [])
    except csv.Error:
        return ()


def _named(document: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The quantities in a record; if it names one twice, the plainer name wins."""
    found: dict[str, tuple[int, float]] = {}
    for key, raw in document.items():
        field, value = _field(key), number(raw)
        if field is not None and value is not None:
            rank, quantity = field
            found[quantity] = min(
                found.get(quantity, (rank, value)), (rank, value), key=lambda f: f[0]
            )
    for quantity, (_, value) in found.items():
        yield quantity, value


@lru_cache(maxsize=1024)
def _field(name: object) -> tuple[int, str] | None:
    """The quantity that a field's name denotes, with its rank among the names: `loss`,
    `train/loss`, `eval/loss`."""
    if not isinstance(name, str):
        return None
    # An export of wandb prefixes the run's name: `run-7 - train/loss`.
    *group, last = re.sub(r"[ -]", "_", name.rpartition(" - ")[2].strip().lower()).split("/")
    full = f"{group[-1]}_{last}" if group else last
    plain = last if full not in _FIELDS and group and group[-1].startswith("train") else full
    return (_RANKS[plain], _FIELDS[plain]) if plain in _FIELDS else None


def _document(text: str) -> Mapping[str, Any] | None:
    start = text.find("{")
    if start < 0 or not text.endswith("}"):
        return None
    try:
        # Numbers beyond a float's range become infinite here, as they do in a trainer.
        document = json.loads(text[start:], parse_int=float)
    except (ValueError, RecursionError):
        document = _literal(text[start:])
    return document if isinstance(document, dict) else None


def _literal(text: str) -> Any:
    """Parse a Python dictionary, which HF Trainer prints with bare `nan` and `inf`; None if it is
    not one."""
    try:
        return ast.literal_eval(re.sub(r"(?<=[:\s])(-?)(nan|inf)\b", r"'\1\2'", text))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None


def _take_event(trace: Trace, document: Mapping[str, Any]) -> bool:
    event = document["event"]
    if event == "loss_nan":
        step = _whole(document.get("step"))
        if step is not None:
            trace.nan_said.append(step)
        return step is not None
    if event != "inner_step":
        return False
    step = _whole(document.get("total_steps"))
    step = _whole(document.get("inner_step")) if step is None else step
    values = list(_named(document))
    if step is None or not values:
        return False
    _add(trace, step, values)
    return True


def _take_plain(trace: Trace, counter: _Counter, text: str) -> bool:
    values = list(_plain_values(text))
    if not values or _SUMMED_UP.fullmatch(text):
        return False
    found = _STEP.search(_OUTER.sub(" ", text))
    _add(trace, counter.next() if found is None else int(found[1].replace(",", "")), values)
    return True


def _plain_values(text: str) -> Iterator[tuple[str, float]]:
    seen: set[str] = set()
    for match in _PLAIN.finditer(text):
        name = _PLAIN_NAMES[match[1].lower()]
        value = number(match[2].replace(",", ""))
        if name not in seen and value is not None:
            seen.add(name)
            yield name, value


def _add(trace: Trace, step: int, values: Iterable[tuple[str, float]]) -> None:
    for name, value in values:
        trace[name].add(step, value)


def number(value: Any) -> float | None:
    """Return a number, or a string that denotes one (`NaN`, `Infinity`), as a float; None for
    anything else."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, (int, float)):
        return float(value)
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return None
    return None


def _whole(value: Any) -> int | None:
    found = number(value)
    return int(found) if found is not None and math.isfinite(found) and abs(found) < 2**63 else None
