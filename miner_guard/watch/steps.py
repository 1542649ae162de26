"""Steps: the step line, slow steps, source 001's timing lines, and the numbers for the status."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from miner_guard.config import StepSettings
from miner_guard.rank.layout import FLAG_FIRST, Now, StepRecord
from miner_guard.record import lines
from miner_guard.record.events import Event, event
from miner_guard.record.status_document import RankSteps, StepsStatus, read_status
from miner_guard.record.words import counted, gb, or_unknown
from miner_guard.state_dir import json_number
from miner_guard.system.clock import Once, OncePer, parse_iso_utc
from miner_guard.watch.alike import SharedFinding, SharedFindings
from miner_guard.watch.base import Context, Events, Exit, Launch
from miner_guard.watch.gpu import memory_grade, without_gpu
from miner_guard.watch.progress import FactsMonitor, Goodput
from miner_guard.watch.step_times import (
    EVALUATION,
    RECENT,
    Finding,
    Regression,
    SlowStep,
    StepTimes,
    grade,
    work_seconds,
)

_FAST_LOG_EVERY = 10
"""Inner steps between `Fast log time` lines (source 001)."""


@dataclass(frozen=True)
class _Range:
    """What source 001 expects of a part: seconds, or per cent of an evaluation's time."""

    usual: tuple[float, float]
    """A value outside is a remark."""

    limit: float
    """A value above it is a red flag."""

    remark: str
    flag: str = ""


_SLOW_LOG = "something slow is running that should not be"
_RANGES: Mapping[str, _Range] = {
    "fast log": _Range((0.0, 0.3), 1.0, _SLOW_LOG, _SLOW_LOG),
    "evaluation": _Range(
        (0.0, 10.0), math.inf, "5-10s is typical: use fewer examples or evaluate less often"
    ),
    "overhead": _Range(
        (0.0, 10.0),
        20.0,
        "1-5% is typical; optimize the costly parts",
        "inefficient status updates or display",
    ),
    "inference": _Range(
        (60.0, 80.0),
        90.0,
        "60-80% is typical: generate fewer or shorter examples",
        "generation may be hanging: check its timeout",
    ),
    "validation": _Range(
        (10.0, 20.0),
        50.0,
        "10-20% is typical: use fewer validation examples",
        "validation set too large or inefficient",
    ),
    "example loss": _Range((0.0, 5.0), math.inf, "2-5% is typical: it is one example's loss"),
}

_RED_FLAG_MIN_S = 1.0
"""The parts of a shorter evaluation step are as short as a fast log, so it raises no red flag."""

_EXPECTED = "10-30s"
"""The expected range that the slow-step line prints (source 004)."""


@dataclass(frozen=True)
class Timing:
    """Time spent in a step's monitoring callback, by part (source 001)."""

    total_s: float
    inference_s: float
    val_loss_s: float
    example_loss_s: float
    overhead_s: float | None
    """None if the miner has no `monitor` phase around an evaluation."""

    evaluates: bool
    """Whether the step evaluates, which gives a breakdown; if not, a fast log."""

    def line(self, step: int) -> str:
        """The line of a fast log, or the block with seconds and share of each part."""
        if not self.evaluates:
            parts = f"loss calc: {self.example_loss_s:.3f}s, overhead: {self.overhead_s:.3f}s"
            return f"Fast log time: {self.total_s:.3f}s ({parts})"
        rows = [f"TIMING BREAKDOWN (Step {step:,}):", f"   {'Total:':<15} {self.total_s:.3f}s"]
        for title, seconds in (
            ("Inference:", self.inference_s),
            ("Val Loss:", self.val_loss_s),
            ("Example Loss:", self.example_loss_s),
            ("Overhead:", self.overhead_s),
        ):
            share = 100 * (seconds or 0.0) / self.total_s if self.total_s else 0.0
            value = "unknown" if seconds is None else f"{seconds:.3f}s ({share:.1f}%)"
            rows.append(f"   {title:<15} {value}")
        return "\n".join(rows)


class TimingLog:
    """Decides which step gets a timing line: in each stretch of steps, the first one with something
    to report; a fast log not before the tenth step."""

    def __init__(self, settings: StepSettings) -> None:
        self._settings = settings
        self._fast_stretch, self._breakdown_stretch = 0, -1

    def observe(self, step: StepRecord) -> Timing | None:
        """The timing line due at this step (counted over the run), or None."""
        phases, number = step.phases, step.total_steps
        evaluates = any(phases.get(name, 0.0) > 0 for name in EVALUATION)
        fast = number // _FAST_LOG_EVERY
        full = number // self._settings.breakdown_every
        due = full != self._breakdown_stretch if evaluates else fast != self._fast_stretch
        monitor = phases.get("monitor", 0.0)
        if not due or not (evaluates or monitor > 0):
            return None
        self._fast_stretch = fast
        self._breakdown_stretch = full if evaluates else self._breakdown_stretch
        inference, val_loss, example_loss = (
            phases.get(name, 0.0) for name in (*EVALUATION, "example_loss")
        )
        overhead = max(0.0, monitor - step.nested_in_monitor_s) if monitor > 0 else None
        # A part outside the callback still belongs to the evaluation's time.
        parts = inference + val_loss + example_loss + (overhead or 0.0)
        total = max(monitor, parts) if evaluates else monitor
        return Timing(total, inference, val_loss, example_loss, overhead, evaluates)


def red_flags(timing: Timing) -> Iterator[tuple[str, str, str, str, str]]:
    """What source 001 calls a red flag, and remarks on values outside the range that it expects:
    `RED FLAG` or `REMARK`, the part, the value, the limit, and what it means."""
    total = timing.total_s
    if not timing.evaluates:
        yield from _outside("fast log", total, f"{total:.3f}s", "s")
    elif total >= _RED_FLAG_MIN_S:
        yield from _outside("evaluation", total, f"{total:.3f}s", "s")
        parts = {
            "overhead": timing.overhead_s or 0.0,
            "inference": timing.inference_s,
            "validation": timing.val_loss_s,
            "example loss": timing.example_loss_s,
        }
        for which, seconds in parts.items():
            share = 100 * seconds / total
            # If one part makes up the whole evaluation, its share means nothing.
            if 0 < seconds < 0.999 * total:
                yield from _outside(which, share, f"{share:.1f}% of {total:.3f}s", "%")


def _outside(
    which: str, value: float, measured: str, unit: str
) -> Iterator[tuple[str, str, str, str, str]]:
    expected = _RANGES[which]
    low, high = expected.usual
    if value > expected.limit:
        yield "RED FLAG", which, measured, f"limit {expected.limit:g}{unit}", expected.flag
    elif value > high:
        yield "REMARK", which, measured, f"usual below {high:g}{unit}", expected.remark
    elif value < low:
        meaning = f"{low:g}-{high:g}% is typical: the other parts take longer than they should"
        yield "REMARK", which, measured, f"usual above {low:g}{unit}", meaning


_REPEAT_S = 60.0

_PRINTED_STEP = re.compile(
    rb"\b(?:step|iter(?:ation)?)\b\W{0,3}\d.{0,200}\bloss\b.{0,24}\d", re.IGNORECASE
)
"""A trainer's own step line."""

_REGULARLY, _MAX_LINE = 3, 500
"""This many of them in a launch mean that the miner prints its steps."""


class StepsMonitor(FactsMonitor):
    """Judges the step times of every rank; ranks that are slow in the same step share a line, which
    names the one that waits least for the others. Rank 0, or the lowest rank that reports, gives
    the step lines: collectives give all ranks the same step time."""

    name = "steps"
    order = 10
    words = frozenset({b"outer step:", b"loss"})

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._goodput = Goodput()
        self._before, self._began = read_status(context.state), context.clock.monotonic()
        self._last: dict[int, StepRecord] = {}
        self._steps: dict[int, int] = {}
        self._phase = self._operation = ""
        self._loss_first: float | None = None
        self._max: float | None = None
        self._limiter = LineLimiter(context.config.logs.step_lines_per_s)
        self._evaluated = LineLimiter(context.config.logs.step_lines_per_s)
        """Separate limit for steps with an evaluation: they are rare, and they are the only points
        on the evaluation curve."""

        self._reset()

    def _reset(self) -> None:
        self._times: dict[int, StepTimes] = {}
        self._shared: SharedFindings[Finding] = SharedFindings(_are_alike)
        self._warnings, self._remarks = OncePer(_REPEAT_S), OncePer(_REPEAT_S)
        self._timing = TimingLog(self.context.config.steps)
        self._summary_stretch = 0
        self._on_cpu = False
        self._monitored: tuple[str, float, float] | None = None
        """The last monitoring operation of the lead rank: name, begin, and last tick in it."""

        self._printed_steps = 0
        self._prints_source_lines = False
        self.words = type(self).words
        self._once = Once()
        """What a launch reports once: low memory, and each kind of timing remark, which describes
        the program."""

        self._peaks_gb: dict[int, float] = {}

    def on_launch(self, launch: Launch) -> Events:
        self._reset()
        before = self._before
        if before is not None and launch.started < self._began and before.steps.goodput_s:
            # A guard that is gone started this launch.
            clock, first = self.context.clock, before.steps.loss_first
            updated = clock.monotonic() - clock.wall() + parse_iso_utc(str(before.updated))
            self._goodput.restore(before.steps.goodput, before.steps.goodput_s, updated)
            self._loss_first = first if isinstance(first, float) else None
        else:
            self._goodput.launched(launch.started)
        self._before = None
        return ()

    def on_lines(self, lines: Sequence[bytes]) -> Events:
        for line in lines:
            self._prints_source_lines |= b"Outer Step:" in line and b"Inner Step:" in line
            self._printed_steps += bool(_PRINTED_STEP.search(line[:_MAX_LINE]))
        if self._prints_source_lines:
            self.words = frozenset()
        return ()

    @property
    def _miner_prints_steps(self) -> bool:
        """Whether the console needs a step line of the guard's only now and then."""
        by_log = self.context.config.miner.attach == "log"
        return self._prints_source_lines or by_log or self._printed_steps >= _REGULARLY

    def on_steps(self, rank: int, steps: Sequence[StepRecord]) -> Events:
        for step in steps:
            self._last[rank] = step
            self._steps[rank] = self._steps.get(rank, 0) + 1
            leads = rank == min(self._last)
            if leads:
                yield from self._step_line(rank, step)
            if not step.flags & FLAG_FIRST:
                times = self._times.setdefault(rank, StepTimes(self.context.config.steps))
                for finding in times.observe(step):
                    self._shared.add(rank, step, finding)
            if len(self._last) == 1:
                yield from self._slow()
            if leads:
                yield from self._summary(rank, step)
                yield from self._timing_lines(rank, step)

    def _step_line(self, rank: int, step: StepRecord) -> Iterator[Event]:
        if self._loss_first is None:
            self._loss_first = step.loss
        self._goodput.step(step, self._monitored_in(step))
        if not step.flags & FLAG_FIRST and (self._max is None or step.seconds > self._max):
            self._max = step.seconds
        if (self._limiter if step.eval_loss is None else self._evaluated).allow(step.end):
            about = _about_the_loss(step)
            figures = step.figures()
            yield event(
                "inner_step",
                "info",
                lines.inner_step(figures, about, miner_prints_steps=self._prints_source_lines),
                rank=rank,
                **figures,
                grad_norm=json_number(step.grad_norm),
                eval_loss=json_number(step.eval_loss),
                tokens=step.tokens,
                total_steps=step.total_steps,
                miner_prints_steps=self._miner_prints_steps or None,
                **about,
            )

    def _monitored_in(self, step: StepRecord) -> float:
        """Seconds of the step in the last tracked operation, as far as the ticks have shown it."""
        _, since, until = self._monitored or (None, 0.0, 0.0)
        return max(0.0, min(until, step.end) - max(since, step.start))

    def _slow(self) -> Iterator[Event]:
        """Report what the ranks' step times have shown, each slow step and slowdown once."""
        for each in self._shared.take():
            work, finding = work_seconds(each.ranks), each.finding
            rank = max(work, key=lambda rank: (work[rank], -rank))
            if isinstance(finding, SlowStep):
                yield from self._slow_line(rank, replace(finding, step=each.ranks[rank]))
            elif not self._on_cpu:
                # A CPU fallback explains a lasting slowdown.
                yield self._regression_line(rank, finding)

    def _regression_line(self, rank: int, regression: Regression) -> Event:
        ratio = regression.best_s / regression.median_s
        return event(
            "slow_step",
            "warning",
            f"STEPS REGRESSED: median {regression.median_s:.2f}s, best {regression.best_s:.2f}s "
            f"earlier ({ratio:.0%} of best speed)",
            rank=rank,
            median_s=regression.median_s,
            best_s=regression.best_s,
            ratio=ratio,
            inner_step=regression.step.inner_step,
            outer_step=regression.step.outer_step,
        )

    def _slow_line(self, rank: int, slow: SlowStep) -> Iterator[Event]:
        # Every slow step longer than 60 s gets a line, as in source 004; a line for shorter ones
        # would flood the console. The report marks all of them. Work that recurs is no warning, nor
        # is a step as long as all others, once that is known.
        step, level = slow.step, "warning" if slow.weight == "episode" else "info"
        expected = _EXPECTED
        if slow.rule == "relative" and slow.median_s is not None:
            usual = f"{slow.median_s:.1f}" if slow.median_s >= 0.1 else f"{slow.median_s:.2g}"
            expected = f"{usual}-{slow.limit_s:.1f}s"
            if slow.weight == "scheduled":
                level = "debug"
            elif slow.weight == "single":
                level = "info" if self._remarks.ask(step.end) else "debug"
            elif self._on_cpu or not self._warnings.ask(step.end):
                level = "debug"
        operation, monitored_s = self._monitored and self._monitored[0], self._monitored_in(step)
        no_gpu = without_gpu(self.context)
        if monitored_s >= 0.5 * (step.seconds - (slow.median_s or slow.limit_s)) > 0:
            advice = f" - {monitored_s:.0f}s of it in {operation}"
        else:
            operation, advice = None, "" if no_gpu else " - Check GPU usage!"
        phases = sorted(step.phases.items(), key=lambda item: -item[1])[:4]
        yield event(
            "slow_step",
            level,
            f"SLOW STEP: {step.seconds:.1f}s (expected {expected}){advice}",
            rank=rank,
            step_time_s=step.seconds,
            expected=expected,
            inner_step=step.inner_step,
            outer_step=step.outer_step,
            limit_s=slow.limit_s,
            rule=slow.rule,
            median_s=slow.median_s,
            weight=slow.weight,
            operation=operation,
            phases_s={name: round(seconds, 3) for name, seconds in phases},
        )
        # Source 004's second line for a slow step. If memory stays low, `cpu_fallback` reports it.
        memory, gpu = gb(step.allocated_bytes), self.context.config.gpu
        low = memory is not None and memory < gpu.low_memory_gb and not no_gpu
        if slow.rule == "absolute" and low and self._once.first("low memory"):
            text = "LOW GPU MEMORY: Model may be on CPU!"
            yield event("low_gpu_memory", "warning", text, rank=rank, gpu_mem_gb=memory)

    def _summary(self, rank: int, step: StepRecord) -> Iterator[Event]:
        settings = self.context.config.steps
        stretch = step.total_steps // settings.breakdown_every
        window = self._times[rank].window() if rank in self._times else None
        if stretch == self._summary_stretch or not window or self._max is None:
            return
        self._summary_stretch = stretch
        p95_s, speed = window.quantile(0.95), grade(window.median, settings)
        memory = gb(step.allocated_bytes)
        memory_speed = memory_grade(memory, self.context.config.gpu)
        left_out, self._limiter.left_out = self._limiter.left_out, 0
        memory_words = f" | GPU memory {or_unknown(memory, '.1f')}GB, grade {memory_speed}"
        limit_words = f" | {counted(left_out, 'step line')} left out "
        limit_words += f"(limit {self._limiter.per_s:g}/s)"
        yield event(
            "timing_breakdown",
            "info",
            f"STEP SUMMARY: p50 {window.median:.2f}s p95 {p95_s:.2f}s max {self._max:.2f}s, "
            f"grade {speed}{memory_words if memory_speed else ''}{limit_words if left_out else ''}",
            rank=rank,
            p50_s=window.median,
            p95_s=p95_s,
            max_s=self._max,
            grade=speed,
            steps=self._steps[rank],
            gpu_mem_gb=memory,
            memory_grade=memory_speed,
            left_out=left_out,
        )

    def _timing_lines(self, rank: int, step: StepRecord) -> Iterator[Event]:
        timing = self._timing.observe(step)
        if timing is None:
            return
        # `--attach auto` ends a step at its update, so an evaluation in it follows the step before.
        attached = self.context.config.miner.attach == "auto" and timing.evaluates
        number = step.total_steps - attached
        text = timing.line(number)
        fields: dict[str, Any] = {
            "total_s": timing.total_s,
            "overhead_s": timing.overhead_s,
            "inner_step": step.inner_step,
            "outer_step": step.outer_step,
        }
        if timing.evaluates:
            fields |= {
                "step": number,
                "inference_s": timing.inference_s,
                "val_loss_s": timing.val_loss_s,
                "example_loss_s": timing.example_loss_s,
            }
            yield event("timing_breakdown", "info", text, rank=rank, **fields)
        else:
            fields["loss_calc_s"] = timing.example_loss_s
            yield event("fast_log", "info", text, rank=rank, **fields)
        for title, which, measured, limit, meaning in red_flags(timing):
            remark = title == "REMARK"
            if remark and not self._once.first(which):
                continue
            yield event(
                "timing_breakdown",
                "info" if remark else "warning",
                f"TIMING {title}: {which}: {measured} ({limit}): {meaning}",
                rank=rank,
                which=which,
                measured=measured,
                limit=limit,
                step=number,
            )

    def on_event(self, event: Event) -> Events:
        if event.name == "hang_detected":
            self._goodput.hang_found()
        if event.name == "gpu_usage" and event.rank is not None and "peak_gb" in event.fields:
            self._peaks_gb[event.rank] = event.fields["peak_gb"]
        if event.name == "cpu_fallback":
            self._on_cpu = event.fields["verdict"] != "cleared"
        return ()

    def on_tick(self, now: float, ranks: Mapping[int, Now]) -> Events:
        lead = ranks[min(ranks)] if ranks else None
        self._phase = lead.phase if lead else ""
        self._operation = lead.operation if lead else ""
        if lead is not None and lead.operation_since is not None:
            self._monitored = (lead.operation, lead.operation_since, now)
        for rank in self._last.keys() - ranks.keys() if ranks else ():
            # After a new rendezvous this node may have different ranks: a rank that no longer
            # exists must not lead.
            del self._last[rank]
            self._times.pop(rank, None)
        return self._slow()

    def on_exit(self, end: Exit) -> Events:
        self._goodput.exited(self.context.clock.monotonic(), finished=end.finished)
        return self._slow()

    def snapshot(self) -> Mapping[str, Any]:
        now = self.context.clock.monotonic()
        goodput, goodput_s = self._goodput.shares(now, self._phase)
        status = StepsStatus(
            loss_first=json_number(self._loss_first),
            phase=self._operation or self._phase,
            max_s=self._max,
            goodput=goodput,
            goodput_s=goodput_s,
            per_rank=self._per_rank(now),
            steps=0,
        )
        if not self._last:
            return status.to_json()
        rank, lead = min(self._last.items())
        window = self._times[rank].window() if rank in self._times else None
        median = window.median if window else None
        since = max(0.0, now - lead.end)
        return replace(
            status,
            **lead.figures(),
            total_steps=lead.total_steps,
            steps=self._steps[rank],
            grad_norm=json_number(lead.grad_norm),
            last_step_age_s=since,
            p50_s=median,
            p95_s=window.quantile(0.95) if window else None,
            grade=None if median is None else grade(median, self.context.config.steps),
            tokens_per_s=self.facts.tokens_per_s(lead.tokens, median),
            eta_upload_s=self.facts.eta_s(lead.inner_step, median, since, outer=False),
            eta_outer_s=self.facts.eta_s(lead.inner_step, median, since, outer=True),
        ).to_json()

    def _per_rank(self, now: float) -> dict[str, RankSteps]:
        work = work_seconds(self._last)
        return {
            str(rank): RankSteps(
                **{name: value for name, value in step.figures().items() if name != "lr"},
                work_s=work[rank],
                gpu_peak_gb=self._peaks_gb.get(rank),
                last_step_age_s=max(0.0, now - step.end),
            )
            for rank, step in sorted(self._last.items())
        }


def _are_alike(one: SharedFinding[Finding], other: SharedFinding[Finding]) -> bool:
    """Whether two ranks have found the same: one slow step, or a slowdown, which they find within a
    few steps of each other."""
    if type(one.finding) is not type(other.finding):
        return False
    first, second = one.step, other.step
    apart = abs(first.total_steps - second.total_steps)
    if isinstance(one.finding, Regression):
        return apart < RECENT
    return apart == 0 and first.start < second.end and second.start < first.end


def _about_the_loss(step: StepRecord) -> dict[str, Any]:
    """Fields for a loss that is a sum or belongs to another step."""
    if step.loss is None:
        return {}
    about: dict[str, Any] = {"loss_summed": True} if step.loss_summed else {}
    number = step.total_steps if step.inner_step is None else step.inner_step
    return {**about, "loss_step": number - step.loss_lag} if step.loss_lag else about


class LineLimiter:
    """Limits lines per second of step time and counts those it suppresses."""

    def __init__(self, per_s: float) -> None:
        self.per_s = per_s
        self.left_out = 0
        self._stretch = self._used = -1

    def allow(self, now: float) -> bool:
        """Return True if a line may be printed at `now` (monotonic). Rates below 1/s allow one
        line every 1/per_s seconds."""
        stretch = int(now / max(1.0, 1.0 / self.per_s))
        if stretch != self._stretch:
            self._stretch, self._used = stretch, 0
        self._used += 1
        allowed = self._used <= max(1.0, self.per_s)
        self.left_out += not allowed
        return allowed
