"""Formats the lines that a template cannot express: blocks of several lines, and lines with
optional parts. Several reproduce a line from one of the source documents (docs/architecture.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miner_guard.record.words import gb, known, rank_list

_RULE = "=" * 80


_MAX_ROWS = 16
"""With up to this many ranks, each rank has its own row in the diagnostics block."""


def inner_step(fields: Mapping[str, Any]) -> str:
    """Source 004's step line. If the miner prints such lines itself, this line contains only the
    fields missing from them, so that `grep "Outer Step:"` shows each step once."""
    measured = (
        f" | Step Time: {_with_unit(fields['step_time_s'], '.1f', 's')}"
        f" | GPU Mem: {_with_unit(fields['gpu_mem_gb'], '.2f', 'GB')}"
    )
    if fields.get("miner_prints_steps"):
        return f"Inner Step: {known(fields['inner_step'])}{measured}"
    return (
        f"Outer Step: {known(fields['outer_step'])} | Inner Step: {known(fields['inner_step'])}"
        f" | LR: {known(fields['lr'], '.8f')} | Loss: "
        f"{known(fields['loss'], '.2f')}{_loss_remark(fields)}{measured}"
    )


def loss_nan(fields: Mapping[str, Any]) -> str:
    """Source 003's line, with the indices of the step's examples if the batch size is known."""
    examples = fields.get("examples")
    which = f" (examples {examples[0]}-{examples[1]})" if examples else ""
    return f"Loss is NaN or Inf at step {fields['step']}{which}"


def slow_step(fields: Mapping[str, Any]) -> str:
    """Source 004's line. Without a GPU it leaves out the advice."""
    advice = "" if fields.get("no_gpu") else " - Check GPU usage!"
    return f"SLOW STEP: {fields['step_time_s']:.1f}s (expected {fields['expected']}){advice}"


def _loss_remark(fields: Mapping[str, Any]) -> str:
    """Describe how this loss differs from the one that the trainer prints; empty if they are the
    same."""
    step, summed = fields.get("loss_step"), fields.get("loss_summed")
    remarks = [f"of step {step}"] if step is not None else []
    remarks += ["sum of the losses passed to backward"] if summed else []
    return f" ({', '.join(remarks)})" if remarks else ""


def upload_blocked(fields: Mapping[str, Any]) -> str:
    """Source 004's line. A repeated block is reported at most once every five minutes, so the line
    also counts the blocks left out since the previous one."""
    left_out = fields.get("left_out")
    return f"UPLOAD BLOCKED: {fields['reason']}" + (
        f" (asked {left_out} more time{'s'[: left_out != 1]} since the last line)"
        if left_out
        else ""
    )


def checkpoint_saved(fields: Mapping[str, Any]) -> str:
    """The line for a saved checkpoint, with the time it took if that was reported."""
    seconds = fields["seconds"]
    return f"CHECKPOINT SAVED: {fields['path']}" + (
        "" if seconds is None else f" in {seconds:.2f}s"
    )


def step_summary(fields: Mapping[str, Any]) -> str:
    """Step times, and GPU memory if it is known, both graded by source 004's table."""
    memory, grade = fields.get("gpu_mem_gb"), fields.get("memory_grade")
    return (
        f"STEP SUMMARY: p50 {known(fields['p50_s'], '.2f')}s p95 {known(fields['p95_s'], '.2f')}s "
        f"max {known(fields['max_s'], '.2f')}s, grade {fields['grade']}"
        + ("" if grade is None else f" | GPU memory {known(memory, '.1f')}GB, grade {grade}")
    )


def last_checkpoint(fields: Mapping[str, Any]) -> str:
    """Source 003's advice after an interruption: resume from the last checkpoint, at this path."""
    step = "" if fields["step"] is None else f"step {fields['step']}, "
    age = f"{fields['age_s']:.0f}s before the end"
    return f"LAST CHECKPOINT: {step}saved {age} at {fields['path']}; resume training from it"


def gpu_memory_peak(fields: Mapping[str, Any]) -> str:
    """The output of source 003's `print_memory_stats`, on one line."""
    return (
        f"GPU MEMORY: Allocated: {known(fields['allocated_gb'], '.2f')} GB | Reserved: "
        f"{known(fields['reserved_gb'], '.2f')} GB | Peak: {known(fields['peak_gb'], '.2f')} GB"
    )


def _with_unit(value: float | None, spec: str, unit: str) -> str:
    return "unknown" if value is None else format(value, spec) + unit


def timing_breakdown(fields: Mapping[str, Any]) -> str:
    """Source 001's block: seconds and share of each part of an evaluation step."""
    total = fields["total_s"]
    rows = [f"TIMING BREAKDOWN (Step {fields['step']:,}):", f"   {'Total:':<15} {total:.3f}s"]
    for title, key in (
        ("Inference", "inference_s"),
        ("Val Loss", "val_loss_s"),
        ("Example Loss", "example_loss_s"),
        ("Overhead", "overhead_s"),
    ):
        seconds = fields[key]
        if seconds is None:
            rows.append(f"   {title + ':':<15} unknown")
            continue
        share = 100 * seconds / total if total else 0.0
        rows.append(f"   {title + ':':<15} {seconds:.3f}s ({share:.1f}%)")
    return "\n".join(rows)


def gpu_usage(fields: Mapping[str, Any]) -> str:
    """Source 002's line and the verdict from its decision matrix."""
    used, total, share = fields["used_gb"], fields["total_gb"], fields["share_pct"]
    if used is None or total is None or share is None:
        return f"GPU Memory Used: unknown - {fields['verdict']}"
    return f"GPU Memory Used: {used:.1f} GB / {total:.1f} GB ({share:.1f}%) - {fields['verdict']}"


def resources(fields: Mapping[str, Any]) -> str:
    """Source 002's line, with the data type of the parameters in place of `Mixed Precision=ON`,
    because a hook can't see whether mixed precision is on."""
    return (
        f"RESOURCES: {fields['cpu_cores']} CPU cores, batch={known(fields['batch_size'])}, "
        f"GPU={known(fields['gpu'])}, dtype={known(fields['dtype'])}"
    )


def gpu_diagnostics(fields: Mapping[str, Any]) -> str:
    """Source 004's block for rank 0, then a row for each rank.

    `ranks` is a list of mappings, one per rank, with the keys that
    `miner_guard.rank.diagnose` writes; a rank that did not report has only `rank` and
    `error`.
    """
    ranks: list[Mapping[str, Any]] = fields["ranks"]
    first = next((r for r in ranks if r.get("rank") == 0 and not r.get("error")), None)
    rows = [_RULE, "GPU DIAGNOSTICS", _RULE]
    if first is not None:
        rows += _first_rank(first)
    rows.append(_RULE)
    rows += _rank_rows(ranks)
    return "\n".join(rows)


def _rank_rows(ranks: list[Mapping[str, Any]]) -> list[str]:
    """One row per rank. With many ranks, those that differ only in GPU number and allocated memory
    share a row."""
    if len(ranks) <= _MAX_ROWS:
        return [_rank_row(r) for r in ranks]
    alike: dict[str, list[Mapping[str, Any]]] = {}
    for r in ranks:
        device = str(r.get("model_device")).partition(":")[0]
        row = _rank_row(
            {**r, "model_device": device, "shard_devices": device, "allocated_bytes": 0}
        )
        alike.setdefault(row.partition(": ")[2], []).append(r)
    rows = []
    for words, same in alike.items():
        allocated = [gb(r.get("allocated_bytes")) for r in same]
        known_ones = [value for value in allocated if value is not None]
        if known_ones:
            spread = f"memory {min(known_ones):.2f} to {max(known_ones):.2f} of"
            words = words.replace("memory 0.00 of", spread)
        rows.append(f"{rank_list(int(r['rank']) for r in same)}: {words}")
    return rows


def _first_rank(r: Mapping[str, Any]) -> list[str]:
    cuda = r.get("cuda_available")
    rows = [f"✓ CUDA available: {known(cuda)}" if cuda else f"✗ CUDA available: {known(cuda)}"]
    if cuda:
        rows += [
            _seen("GPU count", r.get("gpu_count")),
            _seen("Current CUDA device", r.get("cuda_device")),
            _seen("Device name", r.get("device_name")),
            _seen("GPU total memory", gb(r.get("total_bytes")), ".2f", " GB"),
            _seen("GPU memory allocated", gb(r.get("allocated_bytes")), ".2f", " GB"),
        ]
    device = r.get("model_device")
    rows.append(_seen("Model device", device))
    if device and str(device).startswith("cuda"):
        rows.append(f"✅ Model correctly on GPU: {device}")
    rows += [
        _seen("Batch size (per GPU)", r.get("batch_size")),
        _seen("Effective batch size (total)", r.get("effective_batch_size")),
        _seen("World size (GPUs)", r.get("world_size")),
        _seen("Gradient accumulation steps", _accumulation(r)),
    ]
    return rows


def _accumulation(r: Mapping[str, Any]) -> Any:
    """Source 004 counts effective batch / batch: the micro-batches of all ranks. If the ranks share
    them, the line gives one rank's number as well."""
    steps, batch, effective, ranks = (
        r.get(name)
        for name in ("accumulation_steps", "batch_size", "effective_batch_size", "world_size")
    )
    if not (steps and batch and effective and ranks) or ranks == 1:
        return steps
    shared = steps * ranks == effective // batch
    return f"{steps} on each rank, {steps * ranks} in all" if shared else steps


def _seen(what: str, value: Any, spec: str = "", unit: str = "") -> str:
    """A row of source 004's block: a check mark and the value, or a question mark if the value is
    unknown."""
    return f"? {what}: unknown" if value is None else f"✓ {what}: {known(value, spec)}{unit}"


def _rank_row(r: Mapping[str, Any]) -> str:
    if r.get("error"):
        return f"rank {r['rank']}: unknown: {r['error']}"
    shard, total = gb(r.get("shard_bytes")), gb(r.get("total_bytes"))
    parts = [
        f"device {known(r.get('model_device'))}",
        (
            f"shard {known(r.get('shard_params'))} params {known(shard, '.2f')} GB on "
            f"{known(r.get('shard_devices'))}"
        ),
        f"dtype {known(r.get('dtype'))}",
        f"torch {known(r.get('torch_version'))}",
    ]
    # A rank without CUDA has no GPU, so leave out the GPU's name and memory instead of calling them
    # unknown.
    if r.get("cuda_available") is not False:
        allocated = known(gb(r.get("allocated_bytes")), ".2f")
        parts[1:1] = [known(r.get("device_name"))]
        parts.insert(-1, f"memory {allocated} of {known(total, '.2f')} GB")
    return f"rank {r['rank']}: {', '.join(parts)}"
