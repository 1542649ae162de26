"""Judges all ranks' reports together. Pure; standard library only, because a rank without a
supervisor uses it too.

A report is a mapping as returned by `miner_guard.rank.diagnose`; the report of a
silent rank has only `rank` and `error`. Events follow source 004: its block, its red flags, then
problems that no single rank can detect.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

from miner_guard.checks.check import Expectation, expected
from miner_guard.record.events import Event, event
from miner_guard.record.words import gb, or_unknown, rank_list

Report = Mapping[str, Any]

LOW_MEMORY_BYTES = 1024**3
"""Source 004: with less than 1 GB allocated, the model may be on the CPU."""

_BLOCK_RULE = "=" * 80
_MAX_ROWS = 16
"""With up to this many ranks, each rank has its own row in the diagnostics block."""


def events(
    reports: Sequence[Report], expect: int | None, low_memory_bytes: float = LOW_MEMORY_BYTES
) -> list[Event]:
    """Return all events of a gathered diagnosis, the `GPU DIAGNOSTICS` block first. `expect` is
    None if no source provides a count."""
    answered = [r for r in reports if not r.get("error")]
    expectation = expectation_of(answered, expect)
    block = event(
        "gpu_diagnostics",
        "info",
        diagnostics_block(reports),
        ranks=[dict(r) for r in reports],
        expected=expectation.count,
        by=expectation.origin,
    )
    red = _red_flags(answered, low_memory_bytes) if expectation.expects_gpus else ()
    odd = (finding for check in _CHECKS for finding in check(answered))
    return [block, *red, *_silent(reports), *odd]


def expectation_of(answered: Sequence[Report], expect: int | None) -> Expectation:
    """Return the number of GPUs to expect. If `expect` is None, it is the number of GPUs that torch
    sees; a loaded driver that torch cannot use counts as one GPU."""
    present = max((int(r.get("gpu_count") or 0) for r in answered), default=0)
    if not present and any(r.get("driver_version") for r in answered):
        present = 1
    return expected(expect, None, None, present)


def _red_flags(answered: Sequence[Report], low_memory_bytes: float) -> Iterator[Event]:
    if blind := [r["rank"] for r in answered if r.get("cuda_available") is False]:
        text = "CUDA NOT AVAILABLE - Model will run on CPU (VERY SLOW!)"
        yield event("cuda_unavailable", "critical", text, ranks=blind)
    if astray := [r["rank"] for r in answered if _on_cpu(r)]:
        text = "Model is on CPU! This will be EXTREMELY SLOW!"
        yield event("model_on_cpu", "critical", text, ranks=astray)
    low = {r["rank"]: r["allocated_bytes"] for r in answered if _is_low(r, low_memory_bytes)}
    if low:
        where = f" ({rank_list(low)})" if len(answered) > 1 else ""
        text = f"LOW GPU MEMORY: Model may be on CPU!{where}"
        memory = gb(min(low.values()))
        yield event("low_gpu_memory", "warning", text, ranks=list(low), gpu_mem_gb=memory)


def _is_low(r: Report, low_memory_bytes: float) -> bool:
    """A small model known to be on its GPU is no red flag, however little it allocates."""
    placed = r.get("offload") or str(r.get("model_device", "")).startswith("cuda")
    allocated = r.get("allocated_bytes")
    return allocated is not None and allocated < low_memory_bytes and not placed


def _on_cpu(r: Report) -> bool:
    """Return whether the model is on the CPU without an offload policy. Offload computes on the
    GPU: its mesh is cuda."""
    legitimate = r.get("offload") and r.get("mesh_device") != "cpu"
    return str(r.get("model_device")) == "cpu" and not legitimate


def _silent(reports: Sequence[Report]) -> Iterator[Event]:
    for why, ranks in _grouped(reports, lambda r: r.get("error")).items():
        step = "check their output and stacks; the diagnosis continued without them"
        yield _finding("silent_rank", "error", ranks, str(why), next_step=step)


def _mixed_devices(answered: Sequence[Report]) -> Iterator[Event]:
    kinds = _grouped(answered, _kind)
    if len(kinds.keys() - {"meta"}) > 1:
        places = "; ".join(f"{kind}: {rank_list(ranks)}" for kind, ranks in sorted(kinds.items()))
        step = "the ranks on the CPU are slowing down all others: check CUDA there"
        sentence = f"the models are on different device types ({places})"
        yield _finding("mixed_devices", "critical", kinds.get("cpu", []), sentence, next_step=step)


def _kind(r: Report) -> str | None:
    return str(r["model_device"]).partition(":")[0] if r.get("model_device") else None


def _meta_parameters(answered: Sequence[Report]) -> Iterator[Event]:
    for count, ranks in _grouped(answered, lambda r: r.get("meta_params") or None).items():
        step = "they have no values: call to_empty() and load the weights before training"
        sentence = f"{count:,} parameters are on the meta device"
        yield _finding("meta_parameters", "critical", ranks, sentence, next_step=step)


def _shards_on_cpu(answered: Sequence[Report]) -> Iterator[Event]:
    for r in answered:
        shards = r.get("shards") or {}
        count, size = shards.get("cpu", (0, 0))
        on_gpu = any(device.startswith("cuda") for device in shards)
        gpu_mesh = r.get("mesh_device") == "cuda"
        if count and (on_gpu or gpu_mesh) and not r.get("offload"):
            # Without a mesh, the program itself moves data between the two, for an embedding or a
            # teacher for example.
            level = "critical" if gpu_mesh else "warning"
            sentence = f"{count:,} parameters ({size / 1024**3:.2f} GB) are on the CPU"
            step = "move them to the GPU before fully_shard, or choose a CPUOffloadPolicy"
            yield _finding("shard_on_cpu", level, [r["rank"]], sentence, next_step=step)


def _shared_gpus(answered: Sequence[Report]) -> Iterator[Event]:
    for (_, gpu), ranks in _grouped(answered, _gpu_of).items():
        if len(ranks) > 1:
            step = "call torch.cuda.set_device(LOCAL_RANK) before init_process_group"
            yield _finding(
                "shared_gpu", "critical", ranks, f"they share one GPU ({gpu})", next_step=step
            )


def _gpu_of(r: Report) -> tuple[Hashable, str] | None:
    """Return a unique name for the rank's GPU; None if the rank does not know one.

    A MIG slice is identified by the mask that names it: CUDA reports the whole GPU's UUID even to a
    process on a slice. Host names are not unique, since a container can be given any: the boot
    tells machines apart.
    """
    machine = r.get("host"), r.get("boot")
    mask, device = str(r.get("visible_devices") or ""), str(r.get("model_device"))
    if mask.startswith("MIG-"):
        return machine, mask.partition(",")[0]
    if r.get("uuid"):
        return machine, str(r["uuid"])
    return (machine, device) if device.startswith("cuda:") and not mask else None


_SAME = {
    "device_name": "GPU models",
    "driver_version": "drivers",
    "torch_version": "torch versions",
    "cuda_version": "CUDA builds of torch",
    "dtype": "parameter dtypes",
    "world_size": "world sizes",
    "batch_size": "batch sizes",
    "effective_batch_size": "effective batch sizes",
    "accumulation_steps": "gradient accumulation steps",
}
"""What should be the same on all ranks, by its key in a report."""


def _differences(answered: Sequence[Report]) -> Iterator[Event]:
    for key, what in _SAME.items():
        groups = _grouped(answered, lambda r, key=key: _comparable(key, r.get(key)))  # type: ignore[misc]
        if len(groups) > 1:
            level = "critical" if key == "world_size" else "warning"
            values = "; ".join(f"{value}: {rank_list(ranks)}" for value, ranks in groups.items())
            step = f"give all ranks the same {what}"
            yield _finding(
                f"different_{key}", level, [], f"{what} differ: {values}", next_step=step
            )


def _comparable(key: str, value: Any) -> Any:
    # A report lists dtypes by frequency; two that are about equally common may swap places between
    # shards.
    return ", ".join(sorted(str(value).split(", "))) if key == "dtype" and value else value


def _unread(answered: Sequence[Report]) -> Iterator[Event]:
    reasons = _grouped(answered, lambda r: tuple((r.get("unread") or {}).items()) or None)
    for unread, ranks in reasons.items():
        for what, reason in unread:
            sentence = f"{what} could not be read: {reason}"
            step = "the values that depend on it are unknown"
            yield _finding(f"unread_{what}", "warning", ranks, sentence, next_step=step)


_CHECKS: tuple[Callable[[Sequence[Report]], Iterator[Event]], ...] = (
    _mixed_devices,
    _meta_parameters,
    _shards_on_cpu,
    _shared_gpus,
    _differences,
    _unread,
)


def _finding(
    check: str, level: str, ranks: Sequence[int], sentence: str, *, next_step: str
) -> Event:
    where = f"{rank_list(ranks)}: " if ranks else ""
    return event(
        "gpu_diagnostics",
        level,
        f"DIAGNOSIS {check}: {where}{sentence}; {next_step}",
        check=check,
        affected=list(ranks),
        seen=sentence,
        next_step=next_step,
    )


def _grouped(reports: Sequence[Report], key: Callable[[Report], Any]) -> dict[Any, list[int]]:
    """The ranks by the value that `key` gives for their reports; without those it gives None
    for."""
    groups: defaultdict[Any, list[int]] = defaultdict(list)
    for r in reports:
        if (value := key(r)) is not None:
            groups[value].append(r["rank"])
    return dict(groups)


def diagnostics_block(ranks: Sequence[Report]) -> str:
    """Source 004's block for rank 0, then a row for each rank.

    A rank that did not report has only `rank` and `error`.
    """
    first = next((r for r in ranks if r.get("rank") == 0 and not r.get("error")), None)
    rows = [_BLOCK_RULE, "GPU DIAGNOSTICS", _BLOCK_RULE]
    if first is not None:
        rows += _first_rank(first)
    rows.append(_BLOCK_RULE)
    rows += _rank_rows(ranks)
    return "\n".join(rows)


def _rank_rows(ranks: Sequence[Report]) -> list[str]:
    """One row per rank. With many ranks, those that differ only in GPU number and allocated memory
    share a row."""
    if len(ranks) <= _MAX_ROWS:
        return [_rank_row(r) for r in ranks]
    alike: dict[str, list[Report]] = {}
    for r in ranks:
        device = str(r.get("model_device")).partition(":")[0]
        same = {"model_device": device, "shard_devices": device, "allocated_bytes": 0}
        alike.setdefault(_rank_row({**r, **same}).partition(": ")[2], []).append(r)
    rows = []
    for words, group in alike.items():
        allocated = [size for r in group if (size := gb(r.get("allocated_bytes"))) is not None]
        if allocated:
            spread = f"memory {min(allocated):.2f} to {max(allocated):.2f} of"
            words = words.replace("memory 0.00 of", spread)
        rows.append(f"{rank_list(int(r['rank']) for r in group)}: {words}")
    return rows


def _first_rank(r: Report) -> list[str]:
    cuda = r.get("cuda_available")
    rows = [
        f"✓ CUDA available: {or_unknown(cuda)}" if cuda else f"✗ CUDA available: {or_unknown(cuda)}"
    ]
    if cuda:
        rows += [
            _shown("GPU count", r.get("gpu_count")),
            _shown("Current CUDA device", r.get("cuda_device")),
            _shown("Device name", r.get("device_name")),
            _shown("GPU total memory", gb(r.get("total_bytes")), ".2f", " GB"),
            _shown("GPU memory allocated", gb(r.get("allocated_bytes")), ".2f", " GB"),
        ]
    device = r.get("model_device")
    rows.append(_shown("Model device", device))
    if device and str(device).startswith("cuda"):
        rows.append(f"✅ Model correctly on GPU: {device}")
    rows += [
        _shown("Batch size (per GPU)", r.get("batch_size")),
        _shown("Effective batch size (total)", r.get("effective_batch_size")),
        _shown("World size (GPUs)", r.get("world_size")),
        _shown("Gradient accumulation steps", _accumulation(r)),
    ]
    return rows


def _accumulation(r: Report) -> Any:
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


def _shown(what: str, value: Any, spec: str = "", unit: str = "") -> str:
    """A row of source 004's block: a check mark and the value, or a question mark if the value is
    unknown."""
    return f"? {what}: unknown" if value is None else f"✓ {what}: {or_unknown(value, spec)}{unit}"


def _rank_row(r: Report) -> str:
    if r.get("error"):
        return f"rank {r['rank']}: unknown: {r['error']}"
    shard, total = gb(r.get("shard_bytes")), gb(r.get("total_bytes"))
    where = f"{or_unknown(shard, '.2f')} GB on {or_unknown(r.get('shard_devices'))}"
    parts = [
        f"device {or_unknown(r.get('model_device'))}",
        f"shard {or_unknown(r.get('shard_params'))} params {where}",
        f"dtype {or_unknown(r.get('dtype'))}",
        f"torch {or_unknown(r.get('torch_version'))}",
    ]
    # A rank without CUDA has no GPU, so leave out the GPU's name and memory instead of calling them
    # unknown.
    if r.get("cuda_available") is not False:
        allocated = or_unknown(gb(r.get("allocated_bytes")), ".2f")
        parts.insert(1, or_unknown(r.get("device_name")))
        parts.insert(-1, f"memory {allocated} of {or_unknown(total, '.2f')} GB")
    return f"rank {r['rank']}: {', '.join(parts)}"
