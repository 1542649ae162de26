"""The old catalogue of events: a template per name, for callers that do not write their sentence
themselves yet. It shrinks as they move to `record.events.event`."""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from miner_guard.eventlog import formatters
from miner_guard.record.events import RESERVED, Event
from miner_guard.record.words import counted

__all__ = ["CATALOGUE", "Spec", "make_finding", "message"]

Line = Callable[[Mapping[str, Any]], str]


@dataclass(frozen=True)
class Spec:
    """One event in the catalogue."""

    name: str
    level: str
    emoji: str
    line: str | Line
    """A `str.format` template for the fields, or a function that formats them if a template can't
    express the line."""

    fields: tuple[str, ...]
    """Fields that every event of this name has; their value is None if unknown."""


class _Formatter(string.Formatter):
    """Formats `{lost:~line}` as `1 line` or `2 lines`."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec.startswith("~"):
            return counted(value, format_spec[1:])
        return "unknown" if value is None else super().format_field(value, format_spec)


_formatter = _Formatter()

_MAX_ODD_LENGTH = 500
"""Maximum number of characters to show for fields that do not fit the template."""


def make_finding(
    event: str, /, *, rank: int | None = None, level: str | None = None, **fields: Any
) -> Event:
    """Create an event from its template.

    Raises KeyError for an unknown event and ValueError for a missing or reserved field.
    """
    spec = CATALOGUE[event]
    if missing := [name for name in spec.fields if name not in fields]:
        raise ValueError(f"event {event} is missing fields: {', '.join(missing)}")
    if taken := RESERVED & fields.keys():
        raise ValueError(f"event {event} uses reserved fields: {', '.join(sorted(taken))}")
    return Event(event, level or spec.level, _text(spec, rank, fields), fields, rank)


def message(event: Event) -> str:
    """The text of the console line."""
    return event.text


def _text(spec: Spec, rank: int | None, fields: Mapping[str, Any]) -> str:
    try:
        if callable(spec.line):
            return spec.line(fields)
        return _formatter.vformat(spec.line, (), {"rank": rank, **fields})
    except Exception as error:  # noqa: BLE001 - an exception here would break every caller that logs; the text says what is wrong
        shown = str(dict(fields))[:_MAX_ODD_LENGTH]
        return (
            f"{spec.name} with fields that do not fit its template "
            f"({type(error).__name__}: {error}): {shown}"
        )


_WARN = "⚠️ "
_BAD = "❌"
_OK = "✅"
_TIME = "⏱️ "

# fmt: off
_SPECS = (
    # startup
    Spec("guard_started", "info", "🛡️ ", "GUARD STARTED: version {version}, pid {pid}, state {state_dir}", ("version", "pid", "state_dir")),
    Spec("guard_stopped", "info", "🛡️ ", "GUARD STOPPED: exit code {exit_code}, {reason}", ("exit_code", "reason")),
    Spec("guard_degraded", "warning", _WARN, "GUARD DEGRADED: {what}", ("what",)),
    Spec("log_attached", "warning", _WARN, "ATTACHED BY LOG: {detail}", ("detail",)),
    Spec("no_step_yet", "info", "🔍", "NO STEP YET: {waited_s:.0f}s after the launch; {detail}", ("waited_s", "detail")),
    Spec("preflight", "info", "🔍", "PREFLIGHT: {ok} ok, {warn:~warning}, {critical} critical, {unknown} unknown", ("ok", "warn", "critical", "unknown")),
    Spec("preflight_waiting", "info", "🔍", "PREFLIGHT WAITING: up to {left_s:.0f}s, this may clear by itself: {what}", ("left_s", "what")),
    Spec("preflight_finding", "warning", _WARN, "PREFLIGHT {check}: {seen}; {next_step}", ("check", "seen", "limit", "next_step")),
    Spec("gpu_diagnostics", "info", "🔍", formatters.gpu_diagnostics, ("ranks",)),
    Spec("gpu_memory_peak", "info", "", formatters.gpu_memory_peak, ("allocated_gb", "reserved_gb", "peak_gb")),
    Spec("resources", "info", "", formatters.resources, ("cpu_cores", "batch_size", "gpu", "dtype")),
    Spec("cuda_unavailable", "critical", _BAD, "CUDA NOT AVAILABLE - Model will run on CPU (VERY SLOW!)", ()),
    Spec("model_on_cpu", "critical", _BAD, "Model is on CPU! This will be EXTREMELY SLOW!", ()),
    Spec("low_gpu_memory", "warning", _WARN, "LOW GPU MEMORY: Model may be on CPU!", ("gpu_mem_gb",)),
    Spec("rank_finding", "warning", _WARN, "DIAGNOSIS {check}: {seen}; {next_step}", ("check", "seen", "limit", "next_step")),
    # steps
    Spec("cpu_fallback", "critical", _BAD, "CPU FALLBACK: {which}: {evidence}", ("which", "verdict", "evidence")),
    Spec("inner_step", "info", "", formatters.inner_step, ("outer_step", "inner_step", "lr", "loss", "step_time_s", "gpu_mem_gb")),
    Spec("step_lines_left_out", "info", "", "{count:~step line} left out (limit {limit_per_s}/s); the flight record has them", ("count", "limit_per_s")),
    Spec("slow_step", "warning", _WARN, formatters.slow_step, ("step_time_s", "expected", "inner_step", "limit_s", "rule")),
    Spec("fast_log", "info", _TIME, ("Fast log time: {total_s:.3f}s (loss calc: {loss_calc_s:.3f}s, overhead: " "{overhead_s:.3f}s)"), ("total_s", "loss_calc_s", "overhead_s", "inner_step")),
    Spec("timing_breakdown", "info", _TIME, formatters.timing_breakdown, ("step", "total_s", "inference_s", "val_loss_s", "example_loss_s", "overhead_s")),
    Spec("timing_red_flag", "warning", _WARN, "TIMING RED FLAG: {which}: {seen} (limit {limit}): {meaning}", ("which", "seen", "limit", "meaning")),
    Spec("timing_remark", "info", _TIME, "TIMING REMARK: {which}: {seen} (usual below {limit}): {meaning}", ("which", "seen", "limit", "meaning")),
    Spec("steps_regressed", "warning", _WARN, ("STEPS REGRESSED: median {median_s:.2f}s, best {best_s:.2f}s earlier ({ratio:.0%} " "of best speed)"), ("median_s", "best_s", "ratio")),
    Spec("step_summary", "info", _TIME, formatters.step_summary, ("p50_s", "p95_s", "max_s", "grade")),
    Spec("throughput_explained", "warning", _WARN, "SLOW BECAUSE: {cause}: {arithmetic}", ("cause", "arithmetic")),
    Spec("gpu_usage", "info", "", formatters.gpu_usage, ("used_gb", "total_gb", "share_pct", "verdict")),
    Spec("gpu_drop", "warning", _WARN, "GPU DROP: {from_pct:.0f}% -> {to_pct:.0f}% at step {step}", ("from_pct", "to_pct", "step")),
    Spec("gpu_fault", "critical", _BAD, "GPU FAULT: GPU {gpu} {what}; {next_step}", ("gpu", "what", "next_step")),
    Spec("gpu_recovered", "info", _OK, "GPU RECOVERED: GPU {gpu} {what}", ("gpu", "what")),
    Spec("gpu_relaunch", "warning", _WARN, "GPU RELAUNCH: {argument} {old} -> {new}: {why}", ("argument", "old", "new", "why")),
    Spec("loss_nan", "critical", _BAD, formatters.loss_nan, ("step", "loss")),
    Spec("eval_loss_nan", "warning", _WARN, "EVALUATION LOSS is {eval_loss} at step {step}", ("step", "eval_loss")),
    Spec("loss_spike", "warning", _WARN, "LOSS SPIKE: {loss:.4g} at step {step} (median {median:.4g}, limit {limit:.4g})", ("step", "loss", "median", "limit")),
    Spec("loss_divergence", "warning", _WARN, "LOSS DIVERGING: {detail}", ("step", "detail")),
    Spec("loss_plateau", "warning", _WARN, "LOSS PLATEAU: {detail}", ("step", "detail")),
    Spec("overfit", "warning", _WARN, "OVERFITTING: {detail}", ("step", "detail")),
    Spec("memory_leak", "warning", _WARN, "MEMORY LEAK: {detail}", ("step", "detail")),
    Spec("memory_drop", "warning", _WARN, "MEMORY DROP: {detail}", ("step", "detail")),
    Spec("straggler", "warning", _WARN, "STRAGGLER: rank {rank} {detail}", ("detail", "score")),
    Spec("straggler_cleared", "info", _OK, "STRAGGLER CLEARED: rank {rank} after {steps:~step}", ("steps",)),
    Spec("hang_detected", "critical", _BAD, "HANG DETECTED: {detail}", ("detail", "culprits", "idle_s", "limit_s")),
    Spec("rank_gone", "error", _BAD, "RANK GONE: {detail}", ("detail", "ranks")),
    Spec("hang_evidence", "error", _BAD, "HANG EVIDENCE: {detail}", ("detail", "ranks")),
    Spec("stack_dump", "error", _BAD, "STACK DUMP: {ranks} in {path}", ("ranks", "path")),
    # gate and uploads
    Spec("upload_blocked", "warning", _WARN, formatters.upload_blocked, ("reason", "outer_step", "inner_step", "kind", "verdicts")),
    Spec("upload_allowed", "info", _OK, "UPLOAD ALLOWED: {reason}", ("reason", "outer_step", "inner_step", "kind", "verdicts")),
    Spec("upload_started", "info", "💾", "UPLOAD STARTED: tag {tag}", ("tag",)),
    Spec("upload_succeeded", "info", _OK, "UPLOAD VERIFIED: tag {tag} {detail}", ("tag", "detail")),
    Spec("upload_failed", "error", _BAD, "UPLOAD FAILED: {reason}", ("reason",)),
    Spec("upload_reported", "info", "💾", "UPLOAD REPORTED: tag {tag} {detail}", ("tag", "detail", "source")),
    Spec("upload_unverified", "warning", _WARN, "UPLOAD UNVERIFIED: tag {tag}: {reason}", ("tag", "reason")),
    Spec("upload_forecast", "warning", _WARN, ("UPLOAD FORECAST: inner_step {min_inner_step} in {eta_min:.0f} min, repo stale in " "{stale_min:.0f} min"), ("min_inner_step", "eta_min", "stale_min")),
    Spec("repo_age", "info", "", "Repo Age: {age_s:.0f}s (keep < {target_s:.0f}s)", ("age_s", "target_s")),
    Spec("repo_stale", "critical", _BAD, ("REPO STALE: {age_s:.0f}s since the last verified upload (limit {limit_s:.0f}s); " "upload now"), ("age_s", "limit_s")),
    Spec("repo_unknown", "warning", _WARN, "REPO UNKNOWN: {reason}", ("reason",)),
    Spec("audit_passed", "info", _OK, "AUDIT PASSED: {detail}", ("detail",)),
    Spec("audit_failed", "critical", _BAD, "AUDIT FAILED: {detail}", ("detail",)),
    Spec("audit_unknown", "warning", _WARN, "AUDIT UNKNOWN: {detail}", ("detail",)),
    # life of the miner
    Spec("verdict_changed", "info", "", "VERDICT: {headline}", ("headline", "state", "since", "cause", "next_step", "confidence", "earns", "previous")),
    Spec("miner_started", "info", "🚀", "MINER STARTED: pid {pid}: {command}", ("pid", "command", "attempt")),
    Spec("miner_exited", "error", _BAD, "MINER EXITED: {how}", ("how", "code", "runtime_s")),
    Spec("miner_finished", "info", _OK, "MINER FINISHED: {how} after {runtime_s:.0f}s", ("how", "code", "runtime_s")),
    Spec("miner_restarting", "warning", _WARN, "MINER RESTARTING in {wait_s:.0f}s (attempt {attempt} of {max_restarts}): {cause}", ("wait_s", "attempt", "max_restarts", "cause")),
    Spec("miner_stopping", "info", "", "MINER STOPPING: {reason}, {grace_s:.0f}s to stop", ("reason", "grace_s")),
    Spec("miner_paused", "info", "", "MINER PAUSED: restarts are off until `miner-guard ctl resume`", ()),
    Spec("crash_loop", "critical", _BAD, "CRASH LOOP: {detail}", ("detail", "restarts")),
    Spec("orphan_killed", "warning", _WARN, "ORPHAN KILLED: pid {pid} ({command}) of run {of_run}", ("pid", "command", "of_run")),
    Spec("guard_killed", "warning", _WARN, "GUARD KILLED: the previous guard (pid {pid}, last status {seen}) did not shut down cleanly: {why}", ("pid", "seen", "why")),
    Spec("incident_overcome", "info", "", "OVERCOME {label}: training continued after it", ("label",)),
    Spec("incident", "error", _BAD, "INCIDENT {label}: {cause} Fix: {fix}", ("label", "cause", "fix", "excerpt")),
    Spec("output_dropped", "warning", _WARN, ("OUTPUT DROPPED: {dropped_bytes} bytes of the miner's output; nothing reads the " "guard's stdout"), ("dropped_bytes",)),
    Spec("checkpoint_saved", "info", "💾", formatters.checkpoint_saved, ("path", "step", "seconds", "size_bytes")),
    Spec("last_checkpoint", "info", "💾", formatters.last_checkpoint, ("path", "step", "age_s")),
    Spec("checkpoint_resumed", "info", _OK, "CHECKPOINT RESUMED: {path} at step {step}", ("path", "step")),
    Spec("checkpoint_skipped", "warning", _WARN, "CHECKPOINT SKIPPED: {path}: {reason}", ("path", "reason")),
    Spec("checkpoint_stale", "warning", _WARN, "CHECKPOINT STALE: {detail}", ("detail",)),
    Spec("network_unreachable", "critical", _BAD, "NODE UNREACHABLE: {node}: {detail}", ("node", "detail")),
    Spec("network_recovered", "info", _OK, "NODE REACHABLE: {node} again after {seconds:.0f}s", ("node", "seconds")),
    # health and costs
    Spec("http_listening", "info", "", "HTTP {url} (metrics, healthz, status)", ("url",)),
    Spec("health_snapshot", "info", "", "HEALTH {summary}", ("summary", "snapshot")),
    Spec("host_warning", "warning", _WARN, "HOST WARNING: {what}: {seen} (limit {limit}); {next_step}", ("what", "seen", "limit", "next_step")),
    Spec("sampler_failed", "warning", _WARN, "SAMPLER FAILED: {sampler}: {reason}", ("sampler", "reason")),
    Spec("sampler_recovered", "info", _OK, "SAMPLER RECOVERED: {sampler}", ("sampler",)),
    Spec("job_failed", "warning", _WARN, "JOB FAILED: {job}: {reason}", ("job", "reason")),
    Spec("job_recovered", "info", _OK, "JOB RECOVERED: {job}", ("job",)),
    Spec("job_late", "warning", _WARN, "JOB LATE: {job} by {late_s:.1f}s", ("job", "late_s")),
    Spec("monitoring_operation_slow", "warning", _WARN, "MONITORING SLOW: {operation} took {seconds:.1f}s (limit {limit_s:.0f}s)", ("operation", "seconds", "limit_s")),
    Spec("monitoring_over_budget", "warning", _WARN, "MONITORING OVER BUDGET: {share_pct:.1f}% (limit {limit_pct:.0f}%)", ("share_pct", "limit_pct", "most_expensive")),
    Spec("monitoring_throttled", "warning", _WARN, ("MONITORING THROTTLED: {operation} every {interval_s:.0f}s instead of " "{asked_s:.0f}s"), ("operation", "interval_s", "asked_s")),
    Spec("monitoring_relaxed", "info", _OK, "MONITORING RELAXED: {operation} every {interval_s:.0f}s again", ("operation", "interval_s")),
    Spec("chain_status", "info", "", "CHAIN {summary}", ("summary",)),
    Spec("chain_unknown", "warning", _WARN, "CHAIN unknown: {reason}", ("reason",)),
    Spec("chain_unregistered", "critical", _BAD, "CHAIN UNREGISTERED: {detail}", ("detail",)),
    Spec("peers_lost", "warning", _WARN, "PEERS LOST: {peers} of {before} take part", ("peers", "before")),
    Spec("peers_joined", "info", "", "PEERS JOINED: {peers} take part, {before} before", ("peers", "before")),
    Spec("allreduce_ended", "info", "", "ALLREDUCE {outcome}", ("outcome", "reason")),
    Spec("alert_sent", "info", "", "ALERT SENT: {alert} to {targets:~target}", ("alert", "targets")),
    Spec("alert_failed", "warning", _WARN, "ALERT FAILED: {alert}: {reason}", ("alert", "reason")),
    Spec("otlp_failing", "warning", _WARN, "OTLP FAILING: {signal} to {endpoint}: {reason}", ("signal", "endpoint", "reason")),
    Spec("otlp_recovered", "info", _OK, "OTLP RECOVERED: {signal} to {endpoint}", ("signal", "endpoint")),
    Spec("disk_full", "critical", _BAD, "DISK FULL: cannot write {what} ({reason}); the miner keeps running", ("what", "reason")),
    Spec("disk_stuck", "critical", _BAD, "DISK STUCK: writes to {what} have been stuck for {seconds:.0f}s; the miner keeps running", ("what", "seconds")),
    Spec("disk_recovered", "info", _OK, "DISK RECOVERED: writing {what} again, {lost:~line} lost", ("what", "lost")),
    Spec("state_dir_tightened", "info", "🔒", "STATE DIRECTORY TIGHTENED: {path} was open to other users (mode {mode}), now 0700", ("path", "mode")),
    Spec("file_set_aside", "warning", _WARN, "FILE SET ASIDE: {path} was {reason}, now {aside}", ("path", "reason", "aside")),
    Spec("secret_exposed", "warning", _WARN, "SECRET EXPOSED: {where} shows {kind}; {next_step}", ("where", "kind", "next_step")),
    Spec("rank_message", "info", "", "{text}", ("text",)),
)

# fmt: on

CATALOGUE: Mapping[str, Spec] = {spec.name: spec for spec in _SPECS}
