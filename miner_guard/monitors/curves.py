"""Curves: the running miner's loss and GPU memory, judged step by step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from miner_guard.detectors.advice import Anomaly
from miner_guard.detectors.eta import TrainingFacts
from miner_guard.detectors.loss import LossWatch, hidden_nan, hides_nan, not_finite
from miner_guard.detectors.memory import MemoryWatch
from miner_guard.detectors.overfit import OverfitWatch
from miner_guard.detectors.trace.reading import EVALUATION_WORDS, evaluation_in
from miner_guard.detectors.window import SortedWindow
from miner_guard.eventlog.catalog import Finding, make_finding
from miner_guard.monitors.base import Context, Launch, Monitor
from miner_guard.rank.journal import JournalEntry, TrainingEntry
from miner_guard.rank.layout import Now, StepRecord
from miner_guard.record.words import gb

_EVENTS = {
    "divergence": "loss_divergence",
    "plateau_high": "loss_plateau",
    "overfit": "overfit",
    "memory_leak": "memory_leak",
    "memory_drop": "memory_drop",
}


class CurvesMonitor(Monitor):
    """Judges the loss of the lowest rank that reports one, NaN on any rank, and the memory of
    each rank.

    The evaluation loss comes with the steps or, until a step carries one, from the lines that the
    miner prints.
    """

    name = "curves"
    words = EVALUATION_WORDS

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._facts = TrainingFacts.from_settings(context.config.miner, context.config.gate)
        self._counts: dict[str, int] = {}
        self._last: dict[str, Any] | None = None
        self._reset()

    def _reset(self) -> None:
        self._loss = LossWatch(self.context.config.loss)
        self._overfit = OverfitWatch(self.context.config.loss)
        self._recent = SortedWindow(16)
        self._last_step: tuple[int, StepRecord] | None = None
        self._evaluations_come = False
        """Whether steps carry evaluations, in which case the miner's lines add nothing new."""

        self._memory: dict[int, MemoryWatch] = {}
        self._lead: int | None = None
        self._not_finite: set[int] = set()

    def on_launch(self, launch: Launch) -> Iterable[Finding]:
        self._reset()
        return ()

    def on_entry(self, rank: int, entry: JournalEntry) -> Iterable[Finding]:
        if isinstance(entry, TrainingEntry):
            self._facts = self._facts.with_entry(entry)
        return ()

    def on_steps(self, rank: int, steps: Sequence[StepRecord]) -> Iterable[Finding]:
        for step in steps:
            for anomaly in self._judge(rank, step):
                self._count(anomaly)
                yield to_finding(anomaly, rank, step)

    def on_tick(self, now: float, ranks: Mapping[int, Now]) -> Iterable[Finding]:
        if ranks and self._lead not in ranks:
            # After a new rendezvous this node may have different ranks.
            self._lead = None
            self._not_finite &= ranks.keys()
        return ()

    def reads_lines(self) -> bool:
        return self._last_step is not None and not self._evaluations_come

    def on_lines(self, lines: Sequence[bytes]) -> Iterable[Finding]:
        if self._evaluations_come or self._last_step is None:
            return
        rank, step = self._last_step
        for line in lines:
            value = evaluation_in(line)
            anomaly = None if value is None else self._judge_evaluation(step, value)
            if anomaly is not None:
                self._count(anomaly)
                yield to_finding(anomaly, rank, step)

    def _judge_evaluation(self, step: StepRecord, value: float) -> Anomaly | None:
        return (
            self._overfit.observe(step.total_steps, value, self._recent.median)
            if len(self._recent)
            else None
        )

    def _count(self, anomaly: Anomaly) -> None:
        self._counts[anomaly.type] = self._counts.get(anomaly.type, 0) + 1
        self._last = {"type": anomaly.type, "at_step": anomaly.at_step, "detail": anomaly.detail}

    def _judge(self, rank: int, step: StepRecord) -> Iterator[Anomaly]:
        number = _number(step)
        if step.loss is not None:
            yield from self._judge_loss(rank, step, number - step.loss_lag, step.loss)
        if step.allocated_bytes is not None:
            watch = self._memory.setdefault(rank, MemoryWatch(self.context.config.loss))
            anomaly = watch.observe(number, gb(step.allocated_bytes) or 0.0)
            if anomaly is not None:
                yield anomaly

    def _judge_loss(
        self, rank: int, step: StepRecord, number: int, loss: float
    ) -> Iterator[Anomaly]:
        hidden = hides_nan(loss, step.grad_norm)
        if hidden or not math.isfinite(loss):
            # All ranks share the weights: report only the first rank with a non-finite loss.
            first = not self._not_finite
            self._not_finite.add(rank)
            if first and hidden:
                yield hidden_nan(number, step.grad_norm or 0.0, self._facts, step.lr)
            elif first:
                yield not_finite(number, loss, self._facts, step.lr)
            return
        self._not_finite.discard(rank)
        if self._lead is None or rank <= self._lead:
            self._lead = rank
            self._last_step = (rank, step)
            self._recent.add(loss)
            yield from self._loss.observe(number, loss, self._facts, step.lr)
            if step.eval_loss is not None:
                yield from self._recorded_evaluation(step, step.eval_loss)

    def _recorded_evaluation(self, step: StepRecord, value: float) -> Iterator[Anomaly]:
        if not self._evaluations_come:
            # Start over, because the miner may already have printed this evaluation.
            self._evaluations_come = True
            self._overfit = OverfitWatch(self.context.config.loss)
        anomaly = self._judge_evaluation(step, value)
        if anomaly is not None:
            yield anomaly

    def snapshot(self) -> Mapping[str, Any]:
        return {"anomalies": dict(self._counts), "last": self._last}


def _number(step: StepRecord) -> int:
    """The step number that users see: the inner step, else the process's step count."""
    return step.inner_step if step.inner_step is not None else step.total_steps


def to_finding(anomaly: Anomaly, rank: int, step: StepRecord) -> Finding:
    """The finding for an anomaly, with its evidence, cause and fixes."""
    common: dict[str, Any] = {
        "detail": anomaly.detail,
        "cause": anomaly.cause,
        "fixes": list(anomaly.fixes),
        "step": anomaly.at_step,
        "outer_step": step.outer_step,
        "evidence": dict(anomaly.evidence),
    }
    seen = anomaly.evidence
    if anomaly.type == "nan":
        return make_finding(
            "loss_nan", rank=rank, loss=seen["loss"], examples=seen["examples"], **common
        )
    if anomaly.type == "eval_nan":
        return make_finding("eval_loss_nan", rank=rank, eval_loss=seen["eval_loss"], **common)
    if anomaly.type == "spike":
        numbers = {key: seen[key] for key in ("loss", "median", "limit")}
        return make_finding("loss_spike", rank=rank, level=anomaly.severity, **numbers, **common)
    return make_finding(_EVENTS[anomaly.type], rank=rank, level=anomaly.severity, **common)
