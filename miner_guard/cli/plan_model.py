"""Computes what training settings imply before any GPU time is spent: source 004's analysis, and
how a real miner differs from it.

The document's figures (`Plan.accumulation_steps`, `micro_batches`, `memory`, `inner_step_s`) follow
source 004 to the letter. `Plan.actual` describes what subnet 38's miner really does: it divides the
effective batch by the world size, the ranks work in parallel, and FSDP2 shards weights, gradients
and optimizer state. A GB is 10^9 bytes here, as in the document."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from miner_guard.watch.progress import next_multiple

GB = 1e9

_DOCUMENT_TOKENS = 2 * 1024
_DOCUMENT_PARAMS = 4e9
_DOCUMENT_ACTIVATIONS_GB = 4.0
_CHECKPOINTING_SAVES = 0.35
_CHECKPOINTING_SLOWS = 1.2


class BadPlan(ValueError):
    """Settings that are impossible for any training run; the message names the setting and the
    reason."""


@dataclass(frozen=True)
class PlanSettings:
    """The inputs to a plan."""

    gpus: int
    batch: int
    effective: int
    params: float
    seq: int
    upload_steps: int
    micro_batch_s: float | None = None
    """Measured or assumed time of one micro-batch on one GPU."""

    step_s: float | None = None
    """Measured time of an inner step; overrides the computed one."""

    min_inner_step: int = 50
    repo_age_target_s: float = 1800.0
    repo_age_limit_s: float = 2000.0
    gpu_memory_gb: float | None = None
    weight_bytes: int = 2
    """Bytes per weight: bf16."""

    state_bytes: int = 2
    """Bytes per parameter for each of AdamW's two moments. Source 004's 16 GB for 4B parameters
    implies bf16 moments."""

    checkpointing: bool = False


@dataclass(frozen=True)
class MemoryPlan:
    """One rank's GPU memory by component, in GB."""

    weights: float
    optimizer: float
    gradients: float
    activations: float
    fsdp: float

    @property
    def total(self) -> float:
        """The sum of all components, in GB."""
        return self.weights + self.optimizer + self.gradients + self.activations + self.fsdp

    def as_dict(self) -> dict[str, float]:
        """The components and their total."""
        return {**asdict(self), "total": self.total}


@dataclass(frozen=True)
class UploadPlan:
    """When uploads happen, and whether the repo stays fresh."""

    first_valid_inner_step: int
    first_valid_s: float | None
    every_s: float | None
    cadence: str
    fresh: bool | None
    """True if the repo stays younger than its target, both until the first valid upload and between
    uploads. None: unknown."""

    why: str


@dataclass(frozen=True)
class PlanEstimate:
    """One estimate: source 004's, or the miner's real behaviour."""

    accumulation_steps: int
    """Micro-batches that a rank processes in an inner step."""

    micro_batches: int
    """Micro-batches across all ranks."""

    samples: int
    """Number of samples that all ranks together train on in an inner step."""

    memory: MemoryPlan
    inner_step_s: float | None
    upload: UploadPlan


@dataclass(frozen=True)
class Suggestion:
    """A suggested change and its effect, by source 004's estimate."""

    what: str
    arguments: str
    accumulation_steps: int
    micro_batches: int
    memory_gb: float
    inner_step_s: float | None
    effect: str


@dataclass(frozen=True)
class Plan:
    """The complete plan."""

    settings: PlanSettings
    document: PlanEstimate
    actual: PlanEstimate
    simplifications: tuple[str, ...]
    changes: tuple[Suggestion, ...]


def plan(settings: PlanSettings) -> Plan:
    """Compute the plan for these settings. Raises BadPlan."""
    _check(settings)
    document, actual = _document(settings), _actual(settings)
    return Plan(
        settings,
        document,
        actual,
        tuple(_simplifications(settings, document, actual)),
        tuple(_changes(settings)),
    )


def _check(settings: PlanSettings) -> None:
    for name in ("gpus", "batch", "effective", "params", "seq", "upload_steps"):
        if getattr(settings, name) < 1:
            raise BadPlan(f"{name} is {getattr(settings, name):g}; it must be at least 1")
    if settings.effective < settings.batch:
        raise BadPlan(
            f"effective batch {settings.effective} is smaller than batch {settings.batch}; "
            "raise the effective batch or lower the batch"
        )


def _document(s: PlanSettings) -> PlanEstimate:
    """Source 004: accumulation = effective / batch; micro-batches = accumulation · GPUs, one after
    the other."""
    accumulation = s.effective // s.batch
    micro_batches = accumulation * s.gpus
    seconds = s.step_s
    if seconds is None and s.micro_batch_s is not None:
        seconds = micro_batches * s.micro_batch_s
    samples = micro_batches * s.batch
    return PlanEstimate(
        accumulation, micro_batches, samples, document_memory(s), seconds, _upload(s, seconds)
    )


def _actual(s: PlanSettings) -> PlanEstimate:
    """Subnet 38's miner: a rank takes effective / world size samples, in micro-batches; the ranks
    work in parallel."""
    accumulation = max(1, s.effective // s.gpus // s.batch)
    seconds = s.step_s
    if seconds is None and s.micro_batch_s is not None:
        seconds = accumulation * s.micro_batch_s
    micro_batches = accumulation * s.gpus
    return PlanEstimate(
        accumulation,
        micro_batches,
        micro_batches * s.batch,
        sharded_memory(s),
        seconds,
        _upload(s, seconds),
    )


def document_memory(s: PlanSettings) -> MemoryPlan:
    """Estimate memory as source 004 does: nothing is sharded, and gradients are left out.

    Weights = params · 2 bytes (bf16). Optimizer = 2 moments · params · 2 bytes. Activations: the
    document's upper figure, 4 GB for batch 2, sequence 1024 and 4B parameters, scaled as in
    `activations_gb`. FSDP: the document's 2 GB for 8 GB of weights, as if a quarter of the
    weights were gathered or in buffers.
    """
    weights = s.params * s.weight_bytes / GB
    return MemoryPlan(
        weights, 2 * s.params * s.state_bytes / GB, 0.0, activations_gb(s), weights / 4
    )


def sharded_memory(s: PlanSettings) -> MemoryPlan:
    """Estimate memory with FSDP2: weights, gradients and both moments are divided by the number of
    GPUs (ZeRO, Rajbhandari et al. 2020, stage 3: (weights + gradients + optimizer) / N).
    Activations are not sharded. FSDP: as in `document_memory`."""
    weights = s.params * s.weight_bytes / GB
    optimizer = 2 * s.params * s.state_bytes / GB
    return MemoryPlan(
        weights / s.gpus, optimizer / s.gpus, weights / s.gpus, activations_gb(s), weights / 4
    )


def activations_gb(s: PlanSettings) -> float:
    """Estimate activation memory in GB, scaled from source 004's 4 GB.

    Korthikanti et al. 2022: bytes per layer = 34 · seq · batch · hidden (+ attention scores, which
    flash attention does not keep), so it grows with seq · batch · hidden · layers. With layers and
    hidden in a fixed ratio, params = 12 · layers · hidden², so hidden · layers grows with
    params^(2/3). Checkpointing saves 30-40 % of it (source 003).
    """
    scale: float = s.batch * s.seq / _DOCUMENT_TOKENS * (s.params / _DOCUMENT_PARAMS) ** (2 / 3)
    saved = 1 - _CHECKPOINTING_SAVES if s.checkpointing else 1.0
    return _DOCUMENT_ACTIVATIONS_GB * scale * saved


def _upload(s: PlanSettings, step_s: float | None) -> UploadPlan:
    first = next_multiple(s.min_inner_step, s.upload_steps)
    if s.upload_steps <= 5:
        cadence = (
            "good (every 3-5 inner steps)"
            if s.upload_steps >= 3
            else "good, though more often than every 3-5 steps"
        )
    else:
        cadence = (
            "acceptable (up to every 10)"
            if s.upload_steps <= 10
            else "infrequent: every 3-5 inner steps is good"
        )
    if step_s is None:
        return UploadPlan(
            first,
            None,
            None,
            cadence,
            None,
            "no step time given: pass --micro-batch-ms or --step-s",
        )
    until_first, every = first * step_s, s.upload_steps * step_s
    longest = max(until_first, every)
    if longest < s.repo_age_target_s:
        why = f"longest wait {longest:.0f}s, below the target of {s.repo_age_target_s:.0f}s"
        return UploadPlan(first, until_first, every, cadence, True, why)
    which = "the first valid upload" if until_first >= every else "the next upload"
    what = "stale" if longest >= s.repo_age_limit_s else "past its target"
    why = (
        f"{which} takes {longest:.0f}s (target {s.repo_age_target_s:.0f}s, limit "
        f"{s.repo_age_limit_s:.0f}s): {what}"
    )
    return UploadPlan(first, until_first, every, cadence, False, why)


def _simplifications(
    s: PlanSettings, document: PlanEstimate, actual: PlanEstimate
) -> Iterator[str]:
    if s.gpus > 1:
        yield (
            f"The usual estimate gives every GPU {document.accumulation_steps} micro-batches. "
            f"Subnet 38's miner divides the effective batch by the world size: {s.effective} / "
            f"{s.gpus} GPUs / {s.batch} = {actual.accumulation_steps} micro-batches on each, "
            f"{actual.micro_batches} in all, {actual.samples} samples instead of "
            f"{document.samples}."
        )
        if (
            s.step_s is None
            and document.inner_step_s is not None
            and actual.inner_step_s is not None
        ):
            yield (
                "The usual estimate adds up the micro-batches of all GPUs, although they run in "
                f"parallel: {actual.accumulation_steps} x {1000 * (s.micro_batch_s or 0):g} ms = "
                f"{actual.inner_step_s:.3g}s instead of {document.inner_step_s:.4g}s "
                "(communication and optimizer not counted)."
            )
        yield (
            f"The miner divides the loss by effective // batch = {document.accumulation_steps}, "
            f"though a rank accumulates {actual.accumulation_steps} micro-batches: its gradient is "
            f"{s.gpus} times smaller than the mean (this hardly affects AdamW's steps, but it does "
            "affect clipping by norm)."
        )
        yield (
            "The usual estimate puts all weights and optimizer state on each GPU; FSDP2 shards "
            f"them: {actual.memory.total:.1f} GB instead of {document.memory.total:.1f} GB."
        )
    gradients = s.params * s.weight_bytes / GB
    sharded = f"or {gradients / s.gpus:.1f} GB per GPU when sharded"
    yield f"The usual estimate leaves out the gradients: {gradients:.1f} GB, {sharded}."
    yield (
        "The usual 16 GB of AdamW state for 4B parameters assumes bf16 moments; fp32 moments "
        "take twice that."
    )
    if s.effective % s.batch:
        yield (
            f"{s.effective} is not a multiple of {s.batch}: {s.effective % s.batch} samples per "
            "step are dropped."
        )
    if s.effective % (s.gpus * s.batch):
        yield (
            f"{s.effective} is not a multiple of {s.gpus} GPUs x {s.batch}: the miner uses "
            f"{actual.samples} samples."
        )


def _changes(s: PlanSettings) -> Iterator[Suggestion]:
    """Yield the changes that source 004 suggests, and source 003's checkpointing."""
    batch, effective = (
        "--neuron.local_batch_size_train={}",
        "--neuron.local_batch_size_train_effective={}",
    )
    fewer = replace(s, effective=max(s.batch, s.effective // 2))
    yield _change(
        s,
        "halve the effective batch",
        fewer,
        effective.format(fewer.effective),
        effect="half the time",
    )
    if s.batch > 1:
        smaller = replace(
            s, batch=s.batch // 2, micro_batch_s=s.micro_batch_s and s.micro_batch_s / 2
        )
        yield _change(
            s,
            "halve the batch",
            smaller,
            batch.format(smaller.batch),
            effect=(
                "less memory, same samples; slower unless each micro-batch gets proportionally "
                "faster"
            ),
        )
        both = replace(smaller, effective=max(1, s.effective // 4))
        yield _change(
            s,
            "halve the batch, quarter the effective batch",
            both,
            f"{batch.format(both.batch)} {effective.format(both.effective)}",
            effect="least memory, a quarter of the samples",
        )
    if not s.checkpointing:
        slower = replace(
            s,
            checkpointing=True,
            micro_batch_s=s.micro_batch_s and s.micro_batch_s * _CHECKPOINTING_SLOWS,
        )
        yield _change(
            s,
            "gradient checkpointing",
            slower,
            "model.gradient_checkpointing_enable()",
            effect="30-40 % less activation memory, about 20 % slower",
        )


def _change(
    s: PlanSettings, what: str, changed: PlanSettings, arguments: str, *, effect: str
) -> Suggestion:
    way = _document(replace(changed, step_s=None))
    seconds = way.inner_step_s
    if s.step_s is not None:
        # A measured step scales with its work.
        work = way.micro_batches * changed.batch / (_document(s).micro_batches * s.batch)
        seconds = s.step_s * work * (_CHECKPOINTING_SLOWS if changed.checkpointing else 1.0)
    return Suggestion(
        what,
        arguments,
        way.accumulation_steps,
        way.micro_batches,
        way.memory.total,
        seconds,
        effect,
    )
