"""Reads a trace (JSON, JSON lines, CSV, printed lines) into series."""

from __future__ import annotations

import ast
import csv
import json
import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from miner_guard.watch.lines import bare, grammar

_QUANTITY = {
    "loss": "loss",
    "train_loss": "loss",
    "eval_loss": "eval_loss",
    "lr": "lr",
    "grad_norm": "grad_norm",
    "step_time": "step_time",
    "memory": "gpu_mem_gb",
    "step": "step",
}
"""Series by the grammar's quantity; the first of two that a record names counts."""

_RANKS = {quantity: place for place, quantity in enumerate(_QUANTITY)}


@dataclass
class Series:
    """One quantity's values with their steps; non-finite ones are kept."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.values)

    def add(self, step: int, value: float) -> None:
        self.steps.append(step)
        self.values.append(value)

    def finite(self, above: float = -math.inf) -> Series:
        """The finite values of this series that exceed `above`."""
        pairs = zip(self.steps, self.values, strict=True)
        rest = [(step, value) for step, value in pairs if above < value < math.inf]
        return Series([step for step, _ in rest], [value for _, value in rest])


@dataclass
class Trace:
    """All series from one run."""

    series: dict[str, Series] = field(
        default_factory=lambda: {n: Series() for n in _QUANTITY.values() if n != "step"}
    )
    lines: int = 0
    used: int = 0
    """Lines with values."""

    others: int = 0
    """Lines with neither values nor the names of columns: a file that has any is a log."""

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

    def take(self, values: Mapping[str, float]) -> bool:
        """Add one record's values. A record without a step gets the number of the record."""
        step_value = values.get("step", math.nan)
        whole = math.isfinite(step_value) and abs(step_value) < 2**63
        step = int(step_value) if whole else self.used + 1
        for name in values.keys() - {"step"}:
            self.series[name].add(step, values[name])
        return bool(values.keys() - {"step"})


_MAX_LINE_LENGTH = 100_000
"""Longer lines are skipped; trace lines are shorter."""

_SUMMARY = "train_runtime"
"""Key that marks HF Trainer's summary of a finished run; its loss is the mean of all losses."""

_SUMMED_UP = re.compile(r"(?:train|eval)_\w+\s{2,}=\s.*")
"""A row of HF Trainer's summary when it is printed as a table."""

_HISTORY = "log_history"
"""The list of records in HF Trainer's trainer_state.json."""


def read(lines: Iterable[str], *, only_values: bool = False) -> Trace:
    """The trace in `lines`; `only_values` stops at the first line that makes them a log."""
    trace = Trace()
    columns: Sequence[str] = ()
    document: list[str] = []
    for line in lines:
        trace.lines += 1
        text = bare(line, _MAX_LINE_LENGTH).strip()
        if document or (text in ("{", "[") and not trace.used):
            document.append(text)
        elif len(line) > _MAX_LINE_LENGTH:
            trace.others += 1
        elif not text:
            continue
        elif named := _columns(text):
            columns = named
        elif _take_row(trace, columns, text) or _take(trace, text):
            trace.used += 1
        else:
            trace.others += 1
        if only_values and trace.others:
            break
    if document:
        _take_document(trace, "\n".join(document))
    return trace


def _take_document(trace: Trace, text: str) -> None:
    """Take the records of one JSON document over several lines: a list, or a trainer's state."""
    try:
        document = json.loads(text, parse_int=float)
    except (ValueError, RecursionError):
        document = None
    records = document.get(_HISTORY) if isinstance(document, dict) else document
    for record in records if isinstance(records, list) else ():
        taken = isinstance(record, dict) and _SUMMARY not in record and trace.take(_named(record))
        trace.used += taken
    trace.others += not trace.used


def _take(trace: Trace, text: str) -> bool:
    record = _record(text)
    if record is None:
        values = {} if _SUMMED_UP.fullmatch(text) else grammar().values(text)
        return trace.take(
            {_QUANTITY[name]: values[name] for name in reversed(_QUANTITY) if name in values}
        )
    if isinstance(record.get("event"), str) and "msg" in record:
        return _take_event(trace, record)
    return _SUMMARY not in record and trace.take(_named(record))


def _take_event(trace: Trace, record: Mapping[str, Any]) -> bool:
    """Take a line of guard.jsonl."""
    values, total = _named(record), number(record.get("total_steps"))
    if total is not None:
        # Inner steps restart with each outer step.
        values["step"] = total
    return record["event"] == "inner_step" and trace.take(values)


def _columns(text: str) -> Sequence[str]:
    """The column names, if `text` is the header of a table of values."""
    names = () if text.startswith("{") else [name.strip() for name in _cells(text)]
    recognised = any(_field(name) is not None for name in names)
    return (
        names
        if len(names) > 1 and recognised and all(number(name) is None for name in names)
        else ()
    )


def _take_row(trace: Trace, columns: Sequence[str], text: str) -> bool:
    cells = _cells(text) if columns else ()
    return len(cells) == len(columns) > 0 and trace.take(
        _named(dict(zip(columns, cells, strict=True)))
    )


def _cells(text: str) -> Sequence[str]:
    try:
        return next(csv.reader([text], skipinitialspace=True), []) if "," in text else ()
    except csv.Error:
        return ()


def _named(document: Mapping[str, Any]) -> dict[str, float]:
    """The quantities in a record; if it names one twice, the plainer name wins."""
    ranked = sorted(
        (rank, name, value)
        for key, raw in document.items()
        if (field := _field(key)) is not None and (value := number(raw)) is not None
        for rank, name in (field,)
    )
    return {name: value for _, name, value in reversed(ranked)}


@lru_cache(maxsize=1024)
def _field(key: object) -> tuple[tuple[int, int], str] | None:
    """The quantity that a field's name denotes, with its rank among the names: `loss`,
    `train/loss`, `eval/loss`."""
    if not isinstance(key, str):
        return None
    # An export of wandb prefixes the run's name: `run-7 - train/loss`.
    *group, last = key.rpartition(" - ")[2].strip().split("/")
    full = f"{group[-1]} {last}" if group else last
    for name in (full, last) if group and group[-1].startswith("train") else (full,):
        quantity, place = grammar().quantity(name) or ("", 0)
        if quantity in _QUANTITY and not name.lower().startswith("test"):
            return (_RANKS[quantity], place), _QUANTITY[quantity]
    return None


def _record(text: str) -> Mapping[str, Any] | None:
    """The JSON object, or the Python dictionary, that ends a line."""
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


def number(value: Any) -> float | None:
    """Return a number, or a string that denotes one (`NaN`, `Infinity`), as a float; None for
    anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None
