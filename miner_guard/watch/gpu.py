"""GPU memory in use, as sources 002 and 004 judge it, and the `GPU DIAGNOSTICS` block. Faults of
the GPUs are judged in `checks.gpu`.
"""

from __future__ import annotations

import os
import re
import statistics
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from miner_guard.checks import ranks
from miner_guard.checks.gpu import hidden
from miner_guard.checks.request import PreflightRequest, expectation_of, number_of
from miner_guard.config import GpuSettings
from miner_guard.rank.journal import DiagnosisEntry, JournalEntry, TrainingEntry
from miner_guard.rank.layout import Now
from miner_guard.record.events import Event, degraded, event
from miner_guard.record.status_document import GpusStatus, HealthStatus
from miner_guard.record.words import counted, gb, or_unknown
from miner_guard.system.clock import Once, OncePer
from miner_guard.watch.base import Context, Launch, Monitor
from miner_guard.watch.progress import FactsMonitor

_GIB = 1024**3

_ORDINARY = frozenset(
    {"idle", "applications clocks", "display clocks", "sync boost", "SW power cap"}
)
"""Throttle reasons that do not explain a slow step: a fully loaded GPU often sits at its power
cap."""

_NO_USE = 0.05


def latest_sample(context: Context) -> GpusStatus:
    """The GPUs that the miner may use, in the health monitor's latest sample; empty before the
    first. On a shared machine the others are somebody else's."""
    sample = HealthStatus.from_json(context.status().get("health")).gpus
    return replace(sample, gpus=[row for row in sample.gpus if not hidden(row, os.environ)])


def without_gpu(context: Context) -> bool:
    """Return whether training without a GPU is right: none is expected, or NVML finds none on this
    machine and no setting says how many there should be."""
    expect = context.config.gpu.expect
    return expect == 0 or (expect == "auto" and latest_sample(context).state == "absent")


def _responding(sample: GpusStatus) -> Sequence[Mapping[str, Any]]:
    return [row for row in sample.gpus if row.get("state", "ok") == "ok"]


def throttling(sample: GpusStatus) -> list[str]:
    """Throttle reasons, each with the number of GPUs it affects."""
    reasons = Counter(r for row in _responding(sample) for r in row.get("throttle") or ())
    return [
        f"{reason} on {counted(count, 'GPU')}"
        for reason, count in sorted(reasons.items())
        if reason not in _ORDINARY
    ]


def no_use(sample: GpusStatus, low_memory_gb: float) -> str | None:
    """Describe the GPUs if all of them are idle and hold no model; None if any GPU is busy or holds
    a model, or if this is unknown."""
    rows = _responding(sample)
    use = [row.get("utilization_ratio") for row in rows]
    memory = [gb(row.get("memory_used_bytes")) for row in rows]
    busy = [ratio for ratio in use if ratio is not None]
    used = [size for size in memory if size is not None]
    if not rows or len(busy) < len(rows) or len(used) < len(rows):
        return None
    if max(busy) > _NO_USE or max(used) >= low_memory_gb:
        return None
    return (
        f"NVML shows no GPU in use: {counted(len(rows), 'GPU')}, at most {max(busy):.0%} busy, "
        f"at most {max(used):.2f} GB in use"
    )


SMALL, LARGE, UNKNOWN = "small", "large", "unknown"

_NAMES = {
    SMALL: r"resnet(18|34)(?!\d)|efficientnetb[012](?!\d)|mobilenet|tabular|mlp|^linear|logistic"
    r"|svm|(small|simple)cnn",
    LARGE: r"efficientnetb[4567](?!\d)|efficientnetv2l|resnet(101|152)(?!\d)|^vit|visiontransformer"
    r"|bert|gpt|densenet161",
}
"""Patterns that match a lower-case name without punctuation, from source 002's lists. For names in
neither list (ResNet-50, EfficientNet-B3, Llama), the parameter count settles it."""

_LARGE_PARAMS = 100_000_000


def size_of(name: str | None, params: int | None) -> str:
    """`small`, `large`, or `unknown` if neither the name nor the parameter count settles it."""
    plain = re.sub(r"[^a-z0-9]", "", (name or "").rpartition("/")[2].lower())
    for size, pattern in _NAMES.items():
        if re.search(pattern, plain):
            return size
    if params is None:
        return UNKNOWN
    return LARGE if params >= _LARGE_PARAMS else SMALL


def rewritten(command: Sequence[str], argument: str, value: int) -> tuple[str, ...]:
    """The command with the argument's last value replaced, as argument parsers count. Raises
    ValueError if the command lacks the argument."""
    words = list(command)
    for index in range(len(words) - 1, -1, -1):
        if words[index].startswith(f"{argument}="):
            words[index] = f"{argument}={value}"
            return tuple(words)
        if words[index] == argument and index + 1 < len(words):
            words[index + 1] = str(value)
            return tuple(words)
    raise ValueError(f"{argument} is not in the command")


_MAX_RELAUNCHES = 3
"""How often one run of the guard raises the batch size."""

_MIDDLE_PCT = 60.0
"""Source 002's matrix splits the 50-70 % range here."""

_BUSY_PCT = 80.0
"""A GPU counts as computing from this utilization on (source 002: 80-95 % is the target)."""

_IDLE_PCT = 70.0
"""Below this mean utilization, monitoring or data loading may be blocking (source 000: above 90 %
is normal)."""

_DROP_PCT = 20.0
"""A fall of the memory share by so many points between two checks is sudden (source 002: 76 % to
45 %)."""

_STABLE_POINTS = 2.0
"""A spread of up to this many percentage points counts as stable ("GPU stable at 75-76%")."""

_ACCEPTABLE_GB = 10.0
"""From here to `gpu.good_memory_gb`, memory use is acceptable (source 004: 10-15 GB)."""

_HISTORY = 256
"""Number of checks to keep: about ten hours at one check every 150 s."""

_WARN_EVERY_S = 6 * 3600.0

_SET_NAME = "set gpu.model_name"
_SIZE_UNKNOWN = f"the model's size is unknown: {_SET_NAME}"


@dataclass(frozen=True)
class MemoryVerdict:
    """What a memory share means."""

    words: str
    """With `{model}` and `{goal}` to fill in."""

    factor: float = 1.0
    """Multiplier for the batch: 2 severe, 1.5 optional, 1 unchanged."""

    warns: bool = False


_BELOW_MIDDLE = {
    SMALL: "is acceptable for {model}. Proceeding without adjustment",
    LARGE: "is LOW for {model}. Should be {goal}; increasing the batch 1.5x is optional",
    UNKNOWN: f"is acceptable for a small model, LOW for a large one; {_SIZE_UNKNOWN}",
}
_BELOW_OPTIMAL = {
    SMALL: "is good for {model}. Proceeding",
    LARGE: "is suboptimal for {model}, which should be at {goal}. Proceeding",
    UNKNOWN: f"is good for a small model, suboptimal for a large one; {_SIZE_UNKNOWN}",
}


def decide(share_pct: float, size: str, settings: GpuSettings) -> MemoryVerdict:
    """Source 002's decision matrix for a memory share and a model size, with the settings'
    limits. The optimal range includes its upper end."""
    if share_pct < settings.severe_pct:
        words = "is LOW for {model}. Severe underutilization: increase the batch 2x"
        return MemoryVerdict(words, 2.0, warns=True)
    if share_pct < _MIDDLE_PCT:
        low = size == LARGE
        return MemoryVerdict(_BELOW_MIDDLE[size], 1.5 if low else 1.0, warns=low)
    if share_pct < settings.optimal_pct:
        return MemoryVerdict(_BELOW_OPTIMAL[size])
    if share_pct <= settings.near_limit_pct:
        return MemoryVerdict("is optimal for {model}. Proceeding")
    return MemoryVerdict(
        "is near the limit for {model}. Proceeding, but close to running out of memory"
    )


def memory_grade(allocated_gb: float | None, settings: GpuSettings) -> str | None:
    """Source 004's table: 15-35 GB good, 10-15 GB acceptable, below 1 GB bad; `poor` between those,
    `high` above. None if the amount is unknown or no GPU is expected."""
    if allocated_gb is None or settings.expect == 0:
        return None
    if allocated_gb < settings.low_memory_gb:
        return "bad"
    if allocated_gb < _ACCEPTABLE_GB:
        return "poor"
    if allocated_gb < settings.good_memory_gb:
        return "acceptable"
    return "good" if allocated_gb <= settings.high_memory_gb else "high"


def described(size: str, name: str | None) -> str:
    """`large model (EfficientNet-B4)`, in source 002's format."""
    if size == UNKNOWN:
        return f"a model of unknown size ({_SET_NAME})"
    return f"{size} model ({name})" if name else f"{size} model"


@dataclass(frozen=True)
class MemoryReading:
    """One GPU's memory at one check."""

    gpu: str
    """Rank or GPU, as shown in messages."""

    used_gb: float
    total_gb: float
    source: str
    """`hook` (torch's allocated bytes), `printed` (a line from the miner), `nvml` (bytes of all
    processes on that GPU)."""

    busy_pct: float | None = None
    """The GPU's mean utilization since the last check; None if NVML does not report it."""

    @property
    def share_pct(self) -> float:
        return 100 * self.used_gb / self.total_gb


@dataclass(frozen=True)
class Model:
    """What the verdict on the memory depends on, apart from the memory."""

    name: str | None = None
    params: int | None = None
    on_gpu: bool = False
    """Whether the ranks' diagnosis shows that the model is on the GPUs."""

    @property
    def size(self) -> str:
        return size_of(self.name, self.params)


class GpuUse:
    """Judges each check of one launch against its history, and distinguishes a sudden drop from a
    gradual decline."""

    def __init__(self, settings: GpuSettings) -> None:
        self._settings = settings
        self._history: dict[str, deque[float]] = {}
        self._warned = OncePer(_WARN_EVERY_S)

    def check(
        self, readings: Sequence[MemoryReading], model: Model, *, step: int | None, seconds: float
    ) -> Iterator[Event]:
        """Judge one check, `seconds` after the launch."""
        yield from self._dropped(readings, step)
        # Judge the least used GPU: under FSDP all GPUs should be alike.
        lowest = min(readings, key=lambda r: r.share_pct)
        verdict = self._judge(lowest, model)
        goal = f"{self._settings.optimal_pct:.0f}%+"
        words = verdict.words.format(model=described(model.size, model.name), goal=goal)
        if verdict.factor > 1 and model.size == SMALL:
            words += " (1.5x-2x; it may not help a small model much)"
        trend = self._trend(lowest.gpu)
        text = f"GPU at {lowest.share_pct:.0f}% {words}.{f' {trend}.' if trend else ''}"
        text += _utilization(lowest.busy_pct)
        # Repeating the advice every 150 s would bury other lines; every line still contains the
        # share.
        warns = verdict.warns and self._warned.ask(seconds, verdict.words)
        yield event(
            "gpu_usage",
            "warning" if warns else "info",
            f"GPU Memory Used: {lowest.used_gb:.1f} GB / {lowest.total_gb:.1f} GB "
            f"({lowest.share_pct:.1f}%) - {text}",
            used_gb=lowest.used_gb,
            total_gb=lowest.total_gb,
            share_pct=lowest.share_pct,
            verdict=text,
            gpu=lowest.gpu,
            source=lowest.source,
            factor=verdict.factor,
            model_size=model.size,
            step=step,
        )

    def _judge(self, reading: MemoryReading, model: Model) -> MemoryVerdict:
        settings = self._settings
        if reading.used_gb < settings.low_memory_gb and not model.on_gpu:
            # Source 004's rule comes before 002's: a larger batch makes a CPU only slower.
            words = f"is less than {settings.low_memory_gb:g} GB: the model may be on the CPU"
            words += ". Check its device; a larger batch would not help"
            return MemoryVerdict(words, warns=True)
        verdict = decide(reading.share_pct, model.size, settings)
        busy = reading.busy_pct is not None and reading.busy_pct >= _BUSY_PCT
        if verdict.factor > 1 and busy and reading.used_gb >= settings.good_memory_gb:
            # Source 002's matrix covers GPUs of up to 24 GB; source 004's healthy machine uses 28
            # of 80 GB at 95 % utilization.
            words = f"is enough on a large GPU: {reading.used_gb:.0f} GB at full utilization"
            return MemoryVerdict(f"{words} is good. Proceeding")
        return verdict

    def _dropped(self, readings: Sequence[MemoryReading], step: int | None) -> Iterator[Event]:
        """Report the drop at this check once, however many GPUs it affects: the deepest one, and
        the names of all."""
        drops: dict[str, tuple[float, float]] = {}
        for reading in readings:
            history = self._history.setdefault(reading.gpu, deque(maxlen=_HISTORY))
            if history and history[-1] - reading.share_pct >= _DROP_PCT:
                drops[reading.gpu] = history[-1], reading.share_pct
                # Start a new history, so that the drop does not count as a decline too.
                history.clear()
            history.append(reading.share_pct)
        if not drops:
            return
        before, after = max(drops.values(), key=lambda drop: drop[0] - drop[1])
        gpus = ", ".join(drops)
        where = f" ({gpus})" if len(readings) > 1 else ""
        yield event(
            "gpu_drop",
            "warning",
            f"GPU DROP: {before:.0f}% -> {after:.0f}% at step {step}{where}",
            from_pct=before,
            to_pct=after,
            step=step,
            gpu=gpus,
            detail="a sudden drop: did the code free a model or change the batch size?",
        )

    def _trend(self, gpu: str) -> str:
        """Describe the history of one GPU; empty while it is too short to judge."""
        history = self._history[gpu]
        if len(history) < 3:
            return ""
        first, last, low, high = history[0], history[-1], min(history), max(history)
        over = f"over {len(history)} checks"
        if high - low <= _STABLE_POINTS:
            return f"Stable at {low:.0f}-{high:.0f}% {over}"
        if last < first - _STABLE_POINTS:
            # Optimizer states and caches settle: source 002 calls 76 % to 72 % over ten epochs
            # normal.
            fall = f"Gradual decline from {first:.0f}% to {last:.0f}% {over}"
            return f"{fall}, not a concern in itself"
        if last > first + _STABLE_POINTS:
            return f"Rising from {first:.0f}% to {last:.0f}% {over}"
        return f"Between {low:.0f}% and {high:.0f}% {over}"


def _utilization(busy_pct: float | None) -> str:
    """Describe the mean utilization; if it is low, add source 000's conclusion that something
    blocks training."""
    if busy_pct is None:
        return ""
    if busy_pct >= _IDLE_PCT:
        target = "" if busy_pct >= _BUSY_PCT else " (target 80-95%)"
        return f" Utilization {busy_pct:.0f}%{target}."
    return (
        f" Utilization {busy_pct:.0f}%, below {_IDLE_PCT:.0f}%: monitoring or data loading may be "
        "blocking training; see `miner-guard costs` and the phases."
    )


def _no_reading(seconds: float) -> Event:
    verdict = (
        "no GPU memory reading from the hook, the miner's output or NVML within "
        f"{seconds:.0f} s of the launch: call guard.diagnose or print GPU memory"
    )
    unknown = dict.fromkeys(("used_gb", "total_gb", "share_pct", "source", "factor"))
    text = f"GPU Memory Used: unknown - {verdict}"
    return event("gpu_usage", "warning", text, verdict=verdict, **unknown)


_USED = re.compile(r"GPU Memory Used: (\d+(?:\.\d+)?) ?GB / (\d+(?:\.\d+)?) ?GB")
_EPOCH = re.compile(r"\bGPU=(\d+(?:\.\d+)?) ?GB \((\d+(?:\.\d+)?)%\)")
_STEP_LINE = re.compile(r"GPU Mem: (\d+(?:\.\d+)?)GB")
_MODEL = re.compile(r"^Model: (\S[^|]{0,60})$")
_EPOCH_NUMBER = re.compile(r"\b(?:Epoch|Inner Step:|Step) ?(\d+)")


@dataclass(frozen=True)
class Printed:
    """GPU memory figures from a line of the miner's output; None for a figure that the line
    lacks."""

    used_gb: float
    total_gb: float | None = None
    step: int | None = None


def parse_memory_line(line: str) -> Printed | None:
    """Parse a line in source 002's or 004's format; None for any other line."""
    number = _EPOCH_NUMBER.search(line)
    step = int(number.group(1)) if number else None
    if match := _USED.search(line):
        return Printed(float(match.group(1)), float(match.group(2)), step=step)
    if match := _EPOCH.search(line):
        used, share = float(match.group(1)), float(match.group(2))
        return Printed(used, 100 * used / share if share else None, step=step)
    if match := _STEP_LINE.search(line):
        return Printed(float(match.group(1)), step=step)
    return None


_MAX_LINE_LENGTH = 4096
"""Longer lines of the miner's output are not GPU lines."""

_IDLE_BYTES = 300 * 1024**2
"""A GPU with less memory than this in use by all processes together is not used for training: even
a bare CUDA context takes more."""


class GpuMonitor(FactsMonitor):
    """Reads the health monitor's NVML samples, the ranks' headers and the miner's lines; opens no
    device."""

    name = "gpu"
    words = frozenset({b"gpu", b"model: "})

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._settings = context.config.gpu
        self._relaunches = 0
        self._last_good: int | None = None
        """The batch size before the guard last raised it."""

        self._nvml = GpusStatus()
        self._model = self._settings.model_name
        self._missing_argument = Once()
        self._forget_launch()

    def _forget_launch(self) -> None:
        self._use = GpuUse(self._settings)
        self._launch: Launch | None = None
        self._due: float | None = None
        self._first = True
        self._printed: Printed | None = None
        self._totals: dict[int, float] = {}
        self._devices: dict[int, str] = {}
        """Where each rank's diagnosis found the model."""

        self._uuids: set[str] = set()
        """The GPUs that the ranks' diagnosis names."""
        self._busy_pct: list[float] = []
        """Utilization of the least busy GPU in each sample since the last check."""

    def on_launch(self, launch: Launch) -> Iterable[Event]:
        self._forget_launch()
        self._launch = launch
        self._due = launch.started + self._settings.first_check_s
        return ()

    def on_entry(self, rank: int, entry: JournalEntry) -> Iterable[Event]:
        if isinstance(entry, TrainingEntry):
            self._model = self._settings.model_name or entry.model_name or self._model
        elif isinstance(entry, DiagnosisEntry):
            for report in entry.reports:
                reporter = int(report["rank"])
                self._devices[reporter] = str(report.get("model_device"))
                if report.get("uuid"):
                    self._uuids.add(report["uuid"])
                if report.get("total_bytes"):
                    self._totals[reporter] = float(report["total_bytes"])
        return super().on_entry(rank, entry)

    def on_lines(self, lines: Sequence[bytes]) -> Iterable[Event]:
        for line in lines:
            if len(line) > _MAX_LINE_LENGTH:
                continue
            text = line.decode("utf-8", "replace")
            if (model := _MODEL.match(text)) is not None:
                self._model = self._settings.model_name or model[1].strip()
            elif "GPU" in text:
                self._printed = parse_memory_line(text) or self._printed
        return ()

    def on_event(self, event: Event) -> Iterable[Event]:
        label = str(event.fields.get("label"))
        # Not if the host ran out of memory.
        new = event.name == "incident" and event.level != "info"
        if new and "oom" in label and "host" not in label:
            self._relaunches = _MAX_RELAUNCHES
            batch, good = self._batch(), self._last_good
            if batch is not None and good is not None and good < batch:
                why = "ran out of memory; the guard will not raise it again in this run"
                return self._apply(batch, good, f"batch {batch} {why}")
        return ()

    def on_tick(self, now: float, ranks: Mapping[int, Now]) -> Iterable[Event]:
        self._observe()
        if self._launch is None or self._due is None or now < self._due:
            return
        self._due = now + self._settings.check_every_s
        first, self._first = self._first, False
        seconds = now - self._launch.started
        readings = self._readings(ranks)
        self._busy_pct.clear()
        if not readings:
            if first and self._is_due():
                yield _no_reading(seconds)
            return
        step = max((r.inner_step for r in ranks.values() if r.inner_step is not None), default=None)
        if step is None and self._printed is not None:
            step = self._printed.step
        on_gpu = all(d.startswith("cuda") for d in self._devices.values()) and bool(self._devices)
        model = Model(self._model, self.facts.params, on_gpu)
        for each in self._use.check(readings, model, step=step, seconds=seconds):
            yield each
            if first and each.name == "gpu_usage":
                yield from self._relaunch(each)

    def _observe(self) -> None:
        if self._settings.expect == 0:
            # The user chose the CPU: ignore the GPUs.
            return
        sample = latest_sample(self.context)
        if sample.taken in (None, self._nvml.taken):
            return
        self._nvml = sample
        busy = [row.get("utilization_ratio") for row in self._in_use()]
        ratios = [ratio for ratio in busy if ratio is not None]
        if ratios and len(ratios) == len(busy):
            self._busy_pct.append(100 * min(ratios))

    def _in_use(self) -> list[Mapping[str, Any]]:
        """The GPUs that the ranks' diagnosis names, otherwise those whose memory is in use: a
        machine may have more than the miner uses."""
        rows = [row for row in self._nvml.gpus if row.get("memory_total_bytes")]
        named = [row for row in rows if row.get("uuid") in self._uuids]
        return named or [r for r in rows if (r.get("memory_used_bytes") or 0) >= _IDLE_BYTES]

    def _is_due(self) -> bool:
        """Return True if the run should use a GPU: a setting says so, or the host has one."""
        if self._settings.expect != "auto":
            return self._settings.expect > 0
        return bool(self._nvml.gpus)

    def _readings(self, ranks: Mapping[int, Now]) -> list[MemoryReading]:
        """Readings from the best available source: the hook, the miner's lines, then NVML."""
        if not self._is_due():
            return []
        sizes = (row.get("memory_total_bytes") for row in self._nvml.gpus)
        smallest = min(filter(None, sizes), default=None)
        busy = statistics.fmean(self._busy_pct) if self._busy_pct else None
        hook = [
            MemoryReading(f"rank {rank}", header.allocated_bytes / _GIB, total / _GIB, "hook", busy)
            for rank, header in sorted(ranks.items())
            if header.allocated_bytes and (total := self._totals.get(rank, smallest))
        ]
        printed = self._printed
        if not hook and printed is not None and (total := printed.total_gb or gb(smallest)):
            return [MemoryReading("miner", printed.used_gb, total, "printed", busy)]
        return hook or [
            MemoryReading(
                f"GPU {row['index']}",
                row["memory_used_bytes"] / _GIB,
                row["memory_total_bytes"] / _GIB,
                "nvml",
                busy,
            )
            for row in self._in_use()
            if row.get("memory_used_bytes") is not None
        ]

    def _batch(self) -> int | None:
        argument = self._settings.batch_argument
        return number_of(self._launch.command, argument) if argument and self._launch else None

    def _relaunch(self, usage: Event) -> Iterator[Event]:
        factor = usage.fields["factor"]
        if self._settings.on_underuse != "relaunch" or factor <= 1:
            return
        batch = self._batch()
        if batch is None:
            if self._missing_argument.first():
                argument = self._settings.batch_argument or "gpu.batch_argument (not set)"
                what = (
                    f"no relaunch with a larger batch: the miner's command does not set {argument} "
                    "to a whole number"
                )
                yield degraded(what)
            return
        if self._relaunches == _MAX_RELAUNCHES:
            return
        self._relaunches += 1
        self._last_good = batch
        new = max(int(batch * factor), batch + 1)
        why = f"GPU memory at {usage.fields['share_pct']:.0f}%"
        why += f" (relaunch {self._relaunches} of {_MAX_RELAUNCHES})"
        yield from self._apply(batch, new, why)
        self.context.control.relaunch(f"a larger batch: {batch} -> {new}")

    def _apply(self, old: int, new: int, why: str) -> Iterator[Event]:
        assert self._launch is not None
        argument = str(self._settings.batch_argument)
        self.context.control.use_command(rewritten(self._launch.command, argument, new))
        yield event(
            "gpu_usage",
            "warning",
            f"GPU RELAUNCH: {argument} {old} -> {new}: {why}",
            argument=argument,
            old=old,
            new=new,
            why=why,
        )


class DiagnosisMonitor(Monitor):
    """Assembles the parts of a diagnosis and reports what is wrong."""

    name = "diagnosis"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._reports: list[dict[str, Any]] | None = None
        self._command: Sequence[str] = ()

    def on_launch(self, launch: Launch) -> Iterable[Event]:
        self._command = launch.command
        self._reports = None
        return ()

    def on_entry(self, rank: int, entry: JournalEntry) -> Iterable[Event]:
        if not isinstance(entry, DiagnosisEntry):
            return ()
        self._reports = [dict(report) for report in entry.reports]
        question = PreflightRequest(self.context.config, self.context.state, self._command, {})
        expected = expectation_of(question, None).count
        low = self.context.config.gpu.low_memory_gb * _GIB
        events = list(ranks.events(self._reports, expected, low))
        return [*events, *_resources(self._reports)]

    def snapshot(self) -> Mapping[str, Any]:
        return {"ranks": self._reports}


def _resources(reports: Sequence[Mapping[str, Any]]) -> list[Event]:
    """Source 002's line: CPU cores, batch size, GPU and mixed precision of the first rank without
    an error. Weights in 16 bits and FSDP's policy show that it is on; autocast leaves no trace
    outside a forward, so weights in 32 bits show nothing."""
    first = next((r for r in reports if not r.get("error")), None)
    if first is None:
        return []
    cores, batch, dtype = len(os.sched_getaffinity(0)), first.get("batch_size"), first.get("dtype")
    gpu = first.get("device_name") if first.get("cuda_available") else "none"
    computes = str(first.get("mixed_dtype") or dtype or "")
    precision = "ON" if "16" in computes or "float8" in computes else "unknown"
    weights = f" ({dtype} weights)" if dtype else ""
    text = (
        f"RESOURCES: {cores} CPU cores, batch={or_unknown(batch)}, GPU={or_unknown(gpu)}, "
        f"Mixed Precision={precision}{weights}"
    )
    return [
        event("gpu_usage", "info", text, cpu_cores=cores, batch_size=batch, gpu=gpu, dtype=dtype)
    ]
