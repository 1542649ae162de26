"""Derives events from all ranks' reports together. Pure; standard library only, because a rank
without a supervisor uses it too.

A report is a mapping as returned by `miner_guard.rank.diagnose`; the report of a
silent rank has only `rank` and `error`. Events follow source 004: its block, its red flags, then
problems that no single rank can detect.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from miner_guard.checks.check import Expectation, expected
from miner_guard.record.events import Event, event
from miner_guard.record.words import gb, known, rank_list

Report = Mapping[str, Any]

LOW_MEMORY_BYTES = 1024**3
"""Source 004: with less than 1 GB allocated, the model may be on the CPU."""

SHARD_RATIO = 1.5
"""Maximum ratio between a rank's shard and the median; FSDP's rounding to whole rows stays well
below it for models of any size."""

SHARD_FLOOR_BYTES = 64 * 1024**2
"""Smaller differences are rounding: FSDP2 shards by whole rows."""

OTHERS_BYTES = 3 * 1024**3
"""Maximum memory in use on a GPU beyond what its ranks reserved. A context with NCCL's buffers
takes 0.5 to 2 GiB per rank."""


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
    events = [
        event(
            "gpu_diagnostics",
            "info",
            diagnostics_block(reports),
            ranks=[dict(r) for r in reports],
            expected=expectation.count,
            by=expectation.origin,
        )
    ]
    if expectation.expects_gpus:
        events += _red_flags(answered, low_memory_bytes)
    events += (f for check in _CHECKS for f in check(reports if check is _silent else answered))
    return events


def expectation_of(answered: Sequence[Report], expect: int | None) -> Expectation:
    """Return the number of GPUs to expect. If `expect` is None, it is the number of GPUs that torch
    sees; a loaded driver that torch cannot use counts as one GPU."""
    present = max((int(r.get("gpu_count") or 0) for r in answered), default=0)
    if not present and any(r.get("driver_version") for r in answered):
        present = 1
    return expected(expect, None, None, present)


def _red_flags(answered: Sequence[Report], low_memory_bytes: float) -> Iterator[Event]:
    if blind := [r for r in answered if r.get("cuda_available") is False]:
        yield event(
            "cuda_unavailable",
            "critical",
            "CUDA NOT AVAILABLE - Model will run on CPU (VERY SLOW!)",
            ranks=_ranks(blind),
        )
    if astray := [r for r in answered if _on_cpu(r)]:
        yield event(
            "model_on_cpu",
            "critical",
            "Model is on CPU! This will be EXTREMELY SLOW!",
            ranks=_ranks(astray),
        )
    for r in answered:
        allocated = r.get("allocated_bytes")
        # A small model known to be on its GPU is not a red flag, however little it allocates.
        on_gpu = str(r.get("model_device", "")).startswith("cuda")
        if (
            allocated is not None
            and allocated < low_memory_bytes
            and not on_gpu
            and not r.get("offload")
        ):
            yield event(
                "low_gpu_memory",
                "warning",
                "LOW GPU MEMORY: Model may be on CPU!",
                rank=r["rank"],
                gpu_mem_gb=allocated / 1024**3,
            )


def _on_cpu(r: Report) -> bool:
    """Return whether the model is on the CPU without an offload policy. Offload computes on the
    GPU: its mesh is cuda."""
    legitimate = r.get("offload") and r.get("mesh_device") != "cpu"
    return str(r.get("model_device")) == "cpu" and not legitimate


def _silent(reports: Sequence[Report]) -> Iterator[Event]:
    for r in reports:
        if r.get("error"):
            yield _rank_event(
                "silent_rank",
                "error",
                seen=f"rank {r['rank']}: {r['error']}",
                limit="every rank reports",
                next_step="check that rank's output and stack; the diagnosis continued without it",
                rank=r["rank"],
            )


def _mixed_devices(answered: Sequence[Report]) -> Iterator[Event]:
    kinds = {
        r["rank"]: str(r["model_device"]).partition(":")[0]
        for r in answered
        if r.get("model_device")
    }
    if len(set(kinds.values()) - {"meta"}) > 1:
        seen = "; ".join(
            f"{kind}: ranks {_list(k for k, v in kinds.items() if v == kind)}"
            for kind in sorted(set(kinds.values()))
        )
        yield _rank_event(
            "mixed_devices",
            "critical",
            seen=f"the ranks' models are on different device types ({seen})",
            limit="one device type on all ranks",
            next_step="the ranks on the CPU are slowing down all others: check CUDA there",
        )


def _stray_shards(answered: Sequence[Report]) -> Iterator[Event]:
    for r in answered:
        shards = r.get("shards") or {}
        if r.get("meta_params"):
            yield _rank_event(
                "meta_parameters",
                "critical",
                seen=f"rank {r['rank']}: {r['meta_params']:,} parameters are on the meta device",
                limit=0,
                next_step=(
                    "they have no values: call to_empty() and load the weights before training"
                ),
                rank=r["rank"],
            )
        on_cpu = shards.get("cpu", (0, 0))
        on_gpu = [d for d in shards if d.startswith("cuda")]
        gpu_mesh = r.get("mesh_device") == "cuda"
        if on_cpu[0] and (on_gpu or gpu_mesh) and not r.get("offload"):
            # Without a mesh, the program itself moves data between the two, for an embedding or a
            # teacher for example.
            yield _rank_event(
                "shard_on_cpu",
                "critical" if gpu_mesh else "warning",
                seen=(
                    f"rank {r['rank']}: {on_cpu[0]:,} parameters ({on_cpu[1] / 1024**3:.2f} "
                    "GB) are on the CPU"
                )
                + (f", the rest on {', '.join(on_gpu)}" if on_gpu else " under a cuda mesh"),
                limit="all on the GPU, or a CPUOffloadPolicy",
                next_step="move it to the GPU before fully_shard, or choose a CPUOffloadPolicy",
                rank=r["rank"],
            )
        if len(on_gpu) > 1:
            yield _rank_event(
                "shard_on_two_gpus",
                "warning",
                seen=f"rank {r['rank']} has parameters on {', '.join(on_gpu)}",
                limit="one GPU per rank",
                next_step="call torch.cuda.set_device(LOCAL_RANK) before creating the model",
                rank=r["rank"],
            )


def _gpu_of(r: Report) -> tuple[Hashable, str] | None:
    """Return a unique name for the rank's GPU; None if the rank does not know one.

    A MIG slice is identified by the mask that names it: CUDA reports the whole GPU's UUID even to a
    process on a slice, but ranks on different slices share nothing.
    """
    slice_ = str(r.get("visible_devices") or "").partition(",")[0]
    if slice_.startswith("MIG-"):
        return _machine(r), slice_
    return (_machine(r), str(r["uuid"])) if r.get("uuid") else None


def _shared_gpus(answered: Sequence[Report]) -> Iterator[Event]:
    def gpu(r: Report) -> Hashable | None:
        if (named := _gpu_of(r)) is not None:
            return named
        device = str(r.get("model_device"))
        return (
            (_machine(r), device)
            if device.startswith("cuda:") and not r.get("visible_devices")
            else None
        )

    for key, ranks in _grouped(answered, gpu).items():
        if len(ranks) > 1:
            yield _rank_event(
                "shared_gpu",
                "critical",
                seen=f"ranks {_list(ranks)} share one GPU ({key[1]})",
                limit="one rank per GPU",
                next_step="call torch.cuda.set_device(LOCAL_RANK) before init_process_group",
            )


def _gpu_counts(answered: Sequence[Report]) -> Iterator[Event]:
    for machine, ranks in _grouped(answered, _machine).items():
        here = [r for r in answered if _machine(r) == machine]
        host = machine[0]
        counts = {r.get("gpu_count") for r in here}
        # Ranks limited to one GPU each by CUDA_VISIBLE_DEVICES reveal nothing about the node.
        if len({r.get("visible_devices") for r in here}) > 1 or len(counts) != 1:
            continue
        count = counts.pop()
        if count and count < len(ranks):
            yield _rank_event(
                "fewer_gpus_than_ranks",
                "critical",
                seen=f"{count} GPUs for {len(ranks)} ranks on {host}",
                limit=len(ranks),
                next_step="lower --nproc_per_node, or find out why GPUs are missing",
            )
        elif (
            count
            and count > len(ranks)
            and any(str(r.get("model_device")).startswith("cuda") for r in here)
        ):
            yield _rank_event(
                "more_gpus_than_ranks",
                "warning",
                seen=f"{count} GPUs for {len(ranks)} ranks on {host}: {count - len(ranks)} idle",
                limit=len(ranks),
                next_step="raise --nproc_per_node",
            )


def _differences(answered: Sequence[Report]) -> Iterator[Event]:
    # A report lists dtypes by frequency; two that are about equally common may swap places between
    # shards.
    answered = [
        {**r, "dtype": r.get("dtype") and ", ".join(sorted(str(r["dtype"]).split(", ")))}
        for r in answered
    ]
    for key, what, level in (
        ("device_name", "GPU models", "warning"),
        ("driver_version", "drivers", "warning"),
        ("torch_version", "torch versions", "warning"),
        ("cuda_version", "CUDA builds of torch", "warning"),
        ("dtype", "parameter dtypes", "warning"),
        ("world_size", "world sizes", "critical"),
        ("batch_size", "batch sizes", "warning"),
        ("effective_batch_size", "effective batch sizes", "warning"),
        ("accumulation_steps", "gradient accumulation steps", "warning"),
    ):
        groups = _grouped(answered, lambda r, key=key: r.get(key))  # type: ignore[misc]
        if len(groups) > 1:
            seen = "; ".join(f"{value}: ranks {_list(ranks)}" for value, ranks in groups.items())
            yield _rank_event(
                f"different_{key}",
                level,
                seen=f"{what} differ: {seen}",
                limit="the same on all ranks",
                next_step=f"give all ranks the same {what}",
            )


def _shard_sizes(answered: Sequence[Report]) -> Iterator[Event]:
    sizes = {r["rank"]: r["shard_bytes"] for r in answered if r.get("shard_bytes") is not None}
    # Under a mesh the parameter count covers the whole model: ranks with a different count hold a
    # different pipeline stage.
    for ranks in _grouped(
        answered, lambda r: (r.get("params") if r.get("mesh_device") else None,)
    ).values():
        yield from _sizes_apart({rank: sizes[rank] for rank in ranks if rank in sizes})


def _sizes_apart(sizes: Mapping[int, int]) -> Iterator[Event]:
    middle = median(sizes.values()) if sizes else 0
    for rank, size in sizes.items():
        apart = abs(size - middle) > SHARD_FLOOR_BYTES
        if apart and (size > SHARD_RATIO * middle or size * SHARD_RATIO < middle):
            yield _rank_event(
                "shard_sizes",
                "warning",
                seen=(
                    f"rank {rank} holds {size / 1024**3:.2f} GB; the median across ranks is "
                    f"{middle / 1024**3:.2f} GB"
                ),
                limit=f"within a factor of {SHARD_RATIO}",
                next_step="check that this rank shards the model the way the others do",
                rank=rank,
            )


def _memory_of_others(answered: Sequence[Report]) -> Iterator[Event]:
    reserved: Counter[tuple[Any, Any]] = Counter()
    used: dict[tuple[Any, Any], int] = {}
    for r in answered:
        key = _gpu_of(r)
        if key is not None and r.get("device_used_bytes") is not None:
            reserved[key] += int(r.get("reserved_bytes") or 0)
            used[key] = max(used.get(key, 0), int(r["device_used_bytes"]))
    for key, total in used.items():
        if (others := total - reserved[key]) > OTHERS_BYTES:
            yield _rank_event(
                "memory_of_others",
                "warning",
                seen=f"processes other than its ranks hold {others / 1024**3:.1f} GB of {key[1]}",
                limit=f"{OTHERS_BYTES / 1024**3:.0f} GB",
                next_step="an orphan from an earlier run, or another tenant? Check nvidia-smi",
            )


def _local_ranks(answered: Sequence[Report]) -> Iterator[Event]:
    for r in answered:
        device = str(r.get("model_device"))
        index = device.partition(":")[2]
        # With one visible GPU per rank, cuda:0 is correct on every rank.
        given = r.get("local_rank") is not None
        if (
            given
            and device.startswith("cuda:")
            and (r.get("gpu_count") or 0) > 1
            and int(index) != r["local_rank"]
        ):
            yield _rank_event(
                "local_rank",
                "warning",
                seen=(
                    f"rank {r['rank']} has LOCAL_RANK {r.get('local_rank')}, but its model is on "
                    f"{device}"
                ),
                limit=f"cuda:{r.get('local_rank')}",
                next_step="call torch.cuda.set_device(LOCAL_RANK) first",
                rank=r["rank"],
            )


def _unread(answered: Sequence[Report]) -> Iterator[Event]:
    for r in answered:
        for what, reason in (r.get("unread") or {}).items():
            yield _rank_event(
                f"unread_{what}",
                "warning",
                seen=f"rank {r['rank']}: {what} could not be read: {reason}",
                limit=None,
                next_step="the values that depend on it are unknown",
                rank=r["rank"],
            )


_CHECKS: tuple[Callable[[Sequence[Report]], Iterator[Event]], ...] = (
    _silent,
    _mixed_devices,
    _stray_shards,
    _shared_gpus,
    _gpu_counts,
    _differences,
    _shard_sizes,
    _memory_of_others,
    _local_ranks,
    _unread,
)


def _rank_event(
    check: str, level: str, *, seen: str, limit: Any, next_step: str, rank: int | None = None
) -> Event:
    return event(
        "rank_finding",
        level or "warning",
        f"DIAGNOSIS {check}: {seen}; {next_step}",
        rank=rank,
        check=check,
        seen=seen,
        limit=limit,
        next_step=next_step,
    )


def _grouped(reports: Sequence[Report], key: Callable[[Report], Any]) -> dict[Any, list[int]]:
    groups: defaultdict[Any, list[int]] = defaultdict(list)
    for r in reports:
        if (value := key(r)) is not None:
            groups[value].append(r["rank"])
    return dict(groups)


def _machine(r: Report) -> tuple[Any, Any]:
    """Return the host and boot: host names are not unique, since a container can be given any."""
    return r.get("host"), r.get("boot")


def _ranks(reports: Sequence[Report]) -> list[int]:
    return [r["rank"] for r in reports]


def _list(ranks: Any) -> str:
    """Format ranks as `0-3, 7`, so that a thousand of them fit on a line."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


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


def _first_rank(r: Report) -> list[str]:
    cuda = r.get("cuda_available")
    rows = [f"✓ CUDA available: {known(cuda)}" if cuda else f"✗ CUDA available: {known(cuda)}"]
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
    return f"? {what}: unknown" if value is None else f"✓ {what}: {known(value, spec)}{unit}"


def _rank_row(r: Report) -> str:
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
