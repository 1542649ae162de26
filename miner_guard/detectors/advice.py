"""Causes and fixes for anomalies in a curve: source 003's tables, filled in with this run's
numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from miner_guard.detectors.eta import TrainingFacts


@dataclass(frozen=True)
class Anomaly:
    """One observation about a curve: an anomaly or a remark."""

    type: str
    """The type name used by `explain --trace`: nan, spike, divergence, plateau_high, overfit,
    slow_steps, …"""

    at_step: int
    severity: str
    """`info` is a remark; `warning` and `critical` are alarms."""

    detail: str
    """The evidence: the value seen, the limit it was judged against, and the window."""

    fixes: tuple[str, ...] = ()
    cause: str = ""
    evidence: Mapping[str, Any] = field(default_factory=dict)


def example_range(facts: TrainingFacts, step: int) -> tuple[int, int] | None:
    """Return the indices of the first and last example in `step`, or None if the settings do not
    determine them.

    Source 003: start = batch · accumulation · step, end = start + batch · accumulation. With more
    than one rank a step takes `world_size` times as many examples, and the range covers all ranks.
    An effective batch size already counts all ranks (subnet 38 divides it by the world size).
    """
    size = facts.effective_batch_size
    if size is None and facts.batch_size is not None and facts.accumulation_steps is not None:
        size = facts.batch_size * facts.accumulation_steps * (facts.world_size or 1)
    return None if size is None else (size * step, size * (step + 1) - 1)


def for_nan(facts: TrainingFacts, step: int, lr: float | None) -> tuple[str, tuple[str, ...]]:
    """Return the likely cause and fixes for a NaN or Inf loss (source 003, NaN or Inf Loss)."""
    examples = example_range(facts, step)
    inspect = (
        f"inspect the batch at step {step}: its data may be bad"
        if examples is None
        else f"check examples {examples[0]} to {examples[1]}: that batch may contain bad data"
    )
    return (
        "learning rate too high, no warmup, a bad batch, or mixed precision overflow",
        (
            _lower(lr),
            "add warmup for the first 10 % of the steps",
            inspect,
            "last resort: fp32 instead of mixed precision",
        ),
    )


def for_spike(facts: TrainingFacts, step: int, lr: float | None) -> tuple[str, tuple[str, ...]]:
    """Return the likely cause and fixes for a loss spike (source 003, Loss Explosion)."""
    examples = example_range(facts, step)
    where = "" if examples is None else f" (examples {examples[0]} to {examples[1]})"
    return (
        (
            "a bad batch (very long or garbled sequences) or a learning rate at the edge of "
            "stability"
        ),
        (
            f"check the batch at step {step}{where}",
            "clip gradients to norm 1.0",
            _lower(lr) + " if it happens again",
        ),
    )


def for_divergence(lr: float | None, last_good: int | None) -> tuple[str, tuple[str, ...]]:
    """Return the likely cause and fixes for a loss that climbs and stays high (source 003,
    Loss Explosion)."""
    back = "resume from the last checkpoint from before the loss began to climb"
    if last_good is not None:
        back = f"resume from the last checkpoint at or before step {last_good}"
    return "training became unstable: learning rate too high or no warmup", (
        back,
        _lower(lr),
        "add warmup for the first 10 % of the steps",
        "clip gradients to norm 1.0",
    )


def for_plateau(lr: float | None) -> tuple[str, tuple[str, ...]]:
    """Return the likely cause and fixes for a model that does not learn (source 003,
    Underfitting)."""
    raised = (
        "raise the learning rate"
        + (f" from {lr:.3g}" if lr else "")
        + ": 5e-4 or 1e-3 for adapters"
    )
    return (
        "the model is not learning: learning rate too low, wrong data format, or frozen parameters",
        (
            "check that the optimizer has trainable parameters and gets gradients",
            raised,
            "check the data format: labels, end-of-sequence tokens",
        ),
    )


def for_slow_fall(lr: float | None) -> tuple[str, tuple[str, ...]]:
    """Return the likely cause and fixes for a loss that decreases very slowly (source 003,
    Underfitting)."""
    raised = "raise the learning rate" + (f" from {lr:.3g}" if lr else "")
    return (
        "a low learning rate, a schedule that decays before the model has learned, or too few "
        "examples",
        (
            f"{raised} to 5e-4 or 1e-3 (adapters) for one run, and change nothing else",
            "check the data: prompt template, end-of-sequence tokens, unmasked labels",
            "train longer or on more examples if evaluation loss is still falling",
        ),
    )


def for_evaluation_nan() -> tuple[str, tuple[str, ...]]:
    """Return the likely cause and fixes for an evaluation loss that is NaN or infinite while the
    training loss is finite."""
    return (
        (
            "a bad evaluation batch or a precision problem in evaluation: training loss is finite "
            "at that point"
        ),
        (
            (
                "look for evaluation examples whose labels are all masked: the mean over zero "
                "tokens is NaN"
            ),
            "evaluate in bfloat16 or float32: float16 overflows",
            "divide by the number of unmasked tokens, or by 1 if there are none",
        ),
    )


def for_overfit(best_step: int) -> tuple[str, tuple[str, ...]]:
    """Return the likely cause and fixes for overfitting (source 003, Overfitting)."""
    return "the model is learning the training examples, not the task", (
        f"use the checkpoint nearest to step {best_step}, where evaluation was best",
        "stop earlier: train for fewer epochs",
        "get more data",
        "add weight_decay=0.05",
        "reduce the learning rate",
    )


def for_leak() -> tuple[str, tuple[str, ...]]:
    """Return the likely cause and fixes for memory that only grows."""
    return "some code keeps tensors alive from one step to the next", (
        "use loss.item() or loss.detach() wherever a loss is stored",
        (
            "free the tensors that evaluation and logging keep, and call gc.collect() and "
            "torch.cuda.empty_cache() between operations"
        ),
        (
            "take a snapshot with torch.cuda.memory._record_memory_history to see what holds the "
            "memory"
        ),
    )


def for_drop() -> tuple[str, tuple[str, ...]]:
    """Return the likely cause and fixes for a sudden drop in GPU memory."""
    return "the model left the GPU, a worker died, or the process restarted", (
        "check that the model is still on cuda and every rank is alive",
        "look for a restart in the log at that time",
    )


def for_slow(facts: TrainingFacts) -> tuple[str, ...]:
    """Things to check when individual steps are slow (source 004, problem 2)."""
    steps = ("check GPU use and clocks: nvidia-smi", "check data loading: slow storage or network")
    if facts.accumulation_steps is None:
        return steps
    return (
        *steps,
        f"use fewer accumulation steps: each step consists of {facts.accumulation_steps} of them",
    )


def _lower(lr: float | None) -> str:
    if not lr:
        return "lower the learning rate (1e-4 rather than 2e-4)"
    return f"halve the learning rate, from {lr:.3g} to {lr / 2:.3g}"
