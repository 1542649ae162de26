"""Steps: the step line, slow steps, source 001's timing lines, and the numbers for status, top and
report."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from miner_guard.detectors import gpu_use, step_time, timing
from miner_guard.detectors.eta import TrainingFacts
from miner_guard.detectors.goodput import Goodput
from miner_guard.detectors.pauses import PauseWatch
from miner_guard.detectors.straggler import work_seconds
from miner_guard.eventlog.catalog import Finding, make_finding
from miner_guard.eventlog.status_document import RankSteps, StepsStatus
from miner_guard.monitors.base import Context, Exit, Launch, Monitor
from miner_guard.rank.journal import JournalEntry, TrainingEntry
from miner_guard.rank.layout import FLAG_FIRST, Now, StepRecord
from miner_guard.record.words import gb
from miner_guard.state_dir import json_number
from miner_guard.system.once import Once

_LEFT_OUT_EVERY_S = 10.0
_SLOW_REPEAT_S = 60.0


class StepsMonitor(Monitor):
    """Rank 0, or the lowest rank that reports, stands for the whole run: collectives give all ranks
    the same step time."""

    name = "steps"
    words = frozenset({b"outer step:"})

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._facts = TrainingFacts.from_settings(context.config.miner, context.config.gate)
        self._goodput = Goodput()
        self._last: dict[int, StepRecord] = {}
        self._steps: dict[int, int] = {}
        self._phase = self._operation = ""
        self._loss_first: float | None = None
        self._max: tuple[float, int | None] | None = None
        self._limiter = LineLimiter(context.config.logs.step_lines_per_s)
        self._evaluated = LineLimiter(context.config.logs.step_lines_per_s)
        """Separate limit for steps with an evaluation: they are rare, and they are the only points
        on the evaluation curve."""

        self._reset()

    def _reset(self) -> None:
        """Reset the state for a new launch."""
        steps = self.context.config.steps
        self._times = step_time.StepTimes(steps)
        self._regression = step_time.RegressionWatch(steps.regression_ratio, steps.min_excess_s)
        self._slowdowns = step_time.SlowWarnings[StepRecord]()
        self._work = step_time.TokenNormalizer(steps)
        self._timing = timing.TimingLog(steps)
        self._pauses = PauseWatch()
        self._warned_at = self._noted_at = float("-inf")
        self._slow_left_out = 0
        self._summary_stretch = 0
        self._on_cpu = False
        self._miner_prints_steps = False
        self._low_memory_reports = Once()
        self._peaks_gb: dict[int, float] = {}
        self._timing_remarks = Once()
        """One remark of each kind per launch: it describes the program, so later ones would only
        repeat it."""

    def on_launch(self, launch: Launch) -> Iterable[Finding]:
        self._reset()
        self._goodput.launched(launch.started)
        return ()

    def on_entry(self, rank: int, entry: JournalEntry) -> Iterable[Finding]:
        if isinstance(entry, TrainingEntry):
            self._facts = self._facts.with_entry(entry)
        return ()

    def reads_lines(self) -> bool:
        return not self._miner_prints_steps

    def on_lines(self, lines: Sequence[bytes]) -> Iterable[Finding]:
        self._miner_prints_steps = self._miner_prints_steps or any(
            b"Outer Step:" in line and b"Inner Step:" in line for line in lines
        )
        return ()

    def on_steps(self, rank: int, steps: Sequence[StepRecord]) -> Iterable[Finding]:
        for step in steps:
            self._last[rank] = step
            self._steps[rank] = self._steps.get(rank, 0) + 1
            if rank == min(self._last):
                yield from self._lead_step(rank, step)

    def _lead_step(self, rank: int, step: StepRecord) -> Iterator[Finding]:
        if self._loss_first is None:
            self._loss_first = step.loss
        self._goodput.step(step.start, step.end, step.phases, step.nested_in_monitor_s)
        if (self._limiter if step.eval_loss is None else self._evaluated).allow(step.end):
            yield make_finding(
                "inner_step",
                rank=rank,
                outer_step=step.outer_step,
                inner_step=step.inner_step,
                lr=step.lr,
                loss=json_number(step.loss),
                step_time_s=step.seconds,
                gpu_mem_gb=gb(step.allocated_bytes),
                grad_norm=json_number(step.grad_norm),
                eval_loss=json_number(step.eval_loss),
                tokens=step.tokens,
                total_steps=step.total_steps,
                miner_prints_steps=self._miner_prints_steps or None,
                **_about_the_loss(step),
            )
        if not step.flags & FLAG_FIRST:
            yield from self._time(rank, step)
        yield from self._timing_lines(rank, step)

    def _time(self, rank: int, step: StepRecord) -> Iterator[Finding]:
        if self._max is None or step.seconds > self._max[0]:
            self._max = (step.seconds, step.inner_step)
        kind = step_time.kind_of(step.phases)
        slow = self._times.observe(step.seconds, kind, step_time.scheduled_seconds(step.phases))
        training = kind == step_time.TRAINING
        as_usual = self._work.observe(step.seconds, step.tokens) if training else None
        if slow is not None and slow.rule == "relative" and as_usual and as_usual.explains:
            slow = None
        seconds = step.seconds if as_usual is None else as_usual.seconds
        regression = self._regression.observe(seconds) if training else None
        if regression is not None:
            self._times.rebase()
        lasts = regression is not None
        for late, seen in self._slowdowns.observe(step, slow, kind, lasts=lasts):
            yield from self._slow_line(rank, late, seen)
        if regression is not None and not self._on_cpu:
            yield make_finding(
                "steps_regressed",
                rank=rank,
                median_s=regression.median_s,
                best_s=regression.best_s,
                ratio=regression.ratio,
                inner_step=step.inner_step,
                outer_step=step.outer_step,
            )
        yield from self._summary(rank, step)

    def _slow_line(
        self, rank: int, step: StepRecord, slow: step_time.SlowStep
    ) -> Iterator[Finding]:
        # Every slow step longer than 60 s gets a line, as in source 004; a line for shorter ones
        # would flood the console. The report marks all of them.
        too_soon = step.end - self._warned_at < _SLOW_REPEAT_S or self._on_cpu
        pause = self._pause(step, slow)
        level, left_out = None, self._slow_left_out
        expected = self.context.config.steps.expected
        if slow.rule == "relative" and slow.median_s is not None:
            expected = f"{slow.median_s:.1f}-{slow.limit_s:.1f}s"
        remark = pause == "isolated" or not slow.certain
        again = remark and step.end - self._noted_at < _SLOW_REPEAT_S
        if pause == "periodic" or again or (slow.rule == "relative" and too_soon):
            level = "debug"
            self._slow_left_out += 1
        elif remark:
            level, self._noted_at = "info", step.end
        else:
            self._slow_left_out = 0
            self._warned_at = step.end if slow.rule == "relative" else self._warned_at
        phases = sorted(step.phases.items(), key=lambda item: -item[1])[:4]
        yield make_finding(
            "slow_step",
            rank=rank,
            level=level,
            step_time_s=slow.seconds,
            expected=expected,
            inner_step=step.inner_step,
            outer_step=step.outer_step,
            limit_s=slow.limit_s,
            rule=slow.rule,
            median_s=slow.median_s,
            step_kind=slow.kind,
            left_out=left_out,
            pause=pause,
            no_gpu=self._no_gpu() or None,
            phases_s={name: round(seconds, 3) for name, seconds in phases},
        )
        yield from self._low_memory(rank, step, slow)

    def _low_memory(
        self, rank: int, step: StepRecord, slow: step_time.SlowStep
    ) -> Iterator[Finding]:
        """Yield source 004's second line for a slow step, once per launch. If memory stays
        low, `cpu_fallback` reports it."""
        memory, gpu = gb(step.allocated_bytes), self.context.config.gpu
        low = memory is not None and memory < gpu.low_memory_gb and gpu.expect != 0
        if slow.rule == "absolute" and low and self._low_memory_reports.first():
            yield make_finding("low_gpu_memory", rank=rank, gpu_mem_gb=memory)

    def _no_gpu(self) -> bool:
        """Return True if this machine is known to have no GPU."""
        health = self.context.status().get("health")
        gpus = health.get("gpus") if isinstance(health, Mapping) else None
        return isinstance(gpus, Mapping) and gpus.get("state") == "absent"

    def _pause(self, step: StepRecord, slow: step_time.SlowStep) -> str | None:
        """Return the kind of pause; None if named phases account for most of the excess time, or if
        the step exceeded the absolute limit."""
        if slow.rule != "relative" or slow.median_s is None:
            return None
        outside = step.seconds - sum(step.phases.values())
        if outside < 0.5 * (step.seconds - slow.median_s):
            return None
        return self._pauses.observe(step.total_steps, step.seconds)

    def _summary(self, rank: int, step: StepRecord) -> Iterator[Finding]:
        stretch = step.total_steps // self.context.config.steps.breakdown_every
        window = self._times.training_window()
        if stretch == self._summary_stretch or window is None or self._max is None:
            return
        self._summary_stretch = stretch
        yield make_finding(
            "step_summary",
            rank=rank,
            p50_s=window.median,
            p95_s=window.quantile(0.95),
            max_s=self._max[0],
            grade=step_time.grade(window.median, self.context.config.steps),
            steps=self._steps[rank],
            gpu_mem_gb=(memory := gb(step.allocated_bytes)),
            memory_grade=gpu_use.memory_grade(memory, self.context.config.gpu),
        )

    def _timing_lines(self, rank: int, step: StepRecord) -> Iterator[Finding]:
        seen = self._timing.observe(step.total_steps, step.phases, step.nested_in_monitor_s)
        if isinstance(seen, timing.FastLog):
            yield make_finding(
                "fast_log",
                rank=rank,
                total_s=seen.total_s,
                loss_calc_s=seen.loss_calc_s,
                overhead_s=seen.overhead_s,
                inner_step=step.inner_step,
                outer_step=step.outer_step,
            )
        elif seen is not None:
            yield make_finding(
                "timing_breakdown",
                rank=rank,
                step=step.total_steps,
                total_s=seen.total_s,
                inference_s=seen.inference_s,
                val_loss_s=seen.val_loss_s,
                example_loss_s=seen.example_loss_s,
                overhead_s=seen.overhead_s,
                inner_step=step.inner_step,
                outer_step=step.outer_step,
            )
        if seen is not None:
            for flag in timing.red_flags(seen, self.context.config.steps):
                if flag.remark and not self._timing_remarks.first(flag.which):
                    continue
                yield make_finding(
                    "timing_remark" if flag.remark else "timing_red_flag",
                    rank=rank,
                    which=flag.which,
                    seen=flag.seen,
                    limit=flag.limit,
                    meaning=flag.meaning,
                    step=step.total_steps,
                )

    def on_finding(self, finding: Finding) -> Iterable[Finding]:
        if finding.event == "hang_detected":
            self._goodput.hang_found()
        if finding.event == "gpu_memory_peak" and finding.rank is not None:
            self._peaks_gb[finding.rank] = finding.fields["peak_gb"]
        if finding.event == "cpu_fallback":
            # A CPU fallback explains a lasting slowdown, so do not report the slowdown too.
            self._on_cpu = finding.fields["verdict"] != "cleared"
        return ()

    def on_tick(self, now: float, ranks: Mapping[int, Now]) -> Iterable[Finding]:
        lead = ranks[min(ranks)] if ranks else None
        self._phase = lead.phase if lead else ""
        self._operation = lead.operation if lead else ""
        for rank in self._last.keys() - ranks.keys() if ranks else ():
            # After a new rendezvous this node may have different ranks: a rank that no longer
            # exists must not lead.
            del self._last[rank]
        return self._left_out(now)

    def on_exit(self, end: Exit) -> Iterable[Finding]:
        now = self.context.clock.monotonic()
        self._goodput.exited(now, finished=end.finished)
        for step, slow in self._slowdowns.release():
            yield from self._slow_line(min(self._last, default=0), step, slow)
        yield from self._left_out(float("inf"))

    def _left_out(self, now: float) -> Iterator[Finding]:
        if (count := self._limiter.left_out(now)) > 0:
            yield make_finding(
                "step_lines_left_out", count=count, limit_per_s=f"{self._limiter.per_s:g}"
            )

    def snapshot(self) -> Mapping[str, Any]:
        now = self.context.clock.monotonic()
        lead = self._last[min(self._last)] if self._last else None
        window = self._times.training_window()
        median = window.median if window is not None else None
        since = max(0.0, now - lead.end) if lead is not None else 0.0
        inner = lead.inner_step if lead is not None else None
        memory_gb = gb(lead.allocated_bytes) if lead else None
        return StepsStatus(
            outer_step=lead.outer_step if lead else None,
            inner_step=inner,
            total_steps=lead.total_steps if lead else None,
            steps=self._steps[min(self._last)] if lead else 0,
            loss=json_number(lead.loss) if lead else None,
            loss_first=json_number(self._loss_first),
            loss_last=json_number(lead.loss) if lead else None,
            lr=lead.lr if lead else None,
            grad_norm=json_number(lead.grad_norm) if lead else None,
            gpu_mem_gb=memory_gb,
            memory_grade=gpu_use.memory_grade(memory_gb, self.context.config.gpu),
            step_time_s=lead.seconds if lead else None,
            last_step_age_s=since if lead else None,
            phase=self._operation or self._phase,
            p50_s=median,
            p95_s=window.quantile(0.95) if window is not None else None,
            max_s=self._max[0] if self._max else None,
            max_at_inner_step=self._max[1] if self._max else None,
            grade=None if median is None else step_time.grade(median, self.context.config.steps),
            tokens_per_s=self._facts.tokens_per_s(lead.tokens if lead else None, median),
            samples_per_s=self._facts.samples_per_s(median),
            eta_upload_s=self._facts.eta_upload_s(inner, median, since),
            eta_outer_s=self._facts.eta_outer_s(inner, median, since),
            goodput=self._goodput.shares(now, self._phase),
            per_rank=self._per_rank(now),
        ).to_json()

    def _per_rank(self, now: float) -> dict[str, RankSteps]:
        work = work_seconds({rank: (s.seconds, s.phases) for rank, s in self._last.items()})
        return {
            str(rank): _rank_row(step, work[rank], self._peaks_gb.get(rank), now)
            for rank, step in sorted(self._last.items())
        }


def _about_the_loss(step: StepRecord) -> dict[str, Any]:
    """Fields for a loss that is a sum or belongs to another step."""
    if step.loss is None:
        return {}
    about: dict[str, Any] = {"loss_summed": True} if step.loss_summed else {}
    number = step.total_steps if step.inner_step is None else step.inner_step
    return {**about, "loss_step": number - step.loss_lag} if step.loss_lag else about


def _rank_row(step: StepRecord, work_s: float, peak_gb: float | None, now: float) -> RankSteps:
    return RankSteps(
        outer_step=step.outer_step,
        inner_step=step.inner_step,
        loss=json_number(step.loss),
        step_time_s=step.seconds,
        work_s=work_s,
        gpu_mem_gb=gb(step.allocated_bytes),
        gpu_peak_gb=peak_gb,
        phases_s=dict(step.phases),
        last_step_age_s=max(0.0, now - step.end),
    )


class LineLimiter:
    """Limits lines per second of step time and counts those it suppresses."""

    def __init__(self, per_s: float) -> None:
        self.per_s = per_s
        self._second = -1
        self._used = 0.0
        self._left_out = 0
        self._counted_at = float("-inf")

    def allow(self, now: float) -> bool:
        """Return True if a line may be printed at `now` (monotonic). Rates below 1/s allow one
        line every 1/per_s seconds."""
        stretch = max(1.0, 1.0 / self.per_s)
        if int(now / stretch) != self._second:
            self._second, self._used = int(now / stretch), 0.0
        if self._used + 1 > max(1.0, self.per_s):
            self._left_out += 1
            return False
        self._used += 1
        return True

    def left_out(self, now: float) -> int:
        """Lines suppressed since the last non-zero result; 0 if that is less than 10 s old."""
        if not self._left_out or now - self._counted_at < _LEFT_OUT_EVERY_S:
            return 0
        count, self._left_out = self._left_out, 0
        self._counted_at = now if now != float("inf") else self._counted_at
        return count
