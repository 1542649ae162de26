"""`guard.diagnose`: checks every rank's hardware and the placement of its share of the model,
before a mistake costs hours.

Each rank writes its report under its own key of the process group's store, and rank 0 reads each
with a deadline. A collective would take less code, but one that times out breaks the group and does
not say which rank was silent.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from miner_guard.checks import ranks
from miner_guard.rank.agree import AgreementStore, poll
from miner_guard.rank.environment import RankContext, initialised_distributed
from miner_guard.rank.journal import DiagnosisEntry, TrainingEntry
from miner_guard.rank.recorder import Recorder
from miner_guard.system.processes import boot_id
from miner_guard.validators import shapes
from miner_guard.validators.shapes import Shapes, plain_name

Report = dict[str, Any]


def report(place: RankContext, model: torch.nn.Module | None, reported: TrainingEntry) -> Report:
    """This rank's report. Never raises: the key `unread` lists the values that could not be read.

    The keys are those of `placement` and `cuda_facts`, versions, and the batch settings; sizes are
    in bytes. Accumulation steps are effective batch size / batch size, as in source 004.
    """
    batch, effective = reported.batch_size, reported.effective_batch_size
    accumulated = reported.accumulation_steps
    facts: Report = {
        "rank": place.rank,
        # Slurm and MPI use other variables. Without LOCAL_RANK the guard cannot tell which GPU
        # belongs to this rank.
        "local_rank": place.local_rank if "LOCAL_RANK" in os.environ else None,
        "world_size": place.world_size,
        "host": socket.gethostname(),
        "boot": (boot_id() or "")[:8] or None,
        "pid": os.getpid(),
        "torch_version": torch.__version__,
        "cuda_version": torch.version.cuda,
        "visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "batch_size": batch,
        "effective_batch_size": effective,
        "accumulation_steps": effective // batch
        if accumulated is None and batch and effective
        else accumulated,
    }
    _read(facts, "driver_version", lambda: {"driver_version": driver_version()})
    if model is not None:
        _read(facts, "placement", lambda: placement(model))
    _read(facts, "cuda", lambda: cuda_facts(facts.get("model_device")))
    return facts


def _read(facts: Report, what: str, read: Callable[[], Mapping[str, Any]]) -> None:
    try:
        facts.update(read())
    except Exception as error:  # noqa: BLE001  a driver's error must not reach training; it is reported as unread
        facts.setdefault("unread", {})[what] = f"{type(error).__name__}: {error}"[:200]


def driver_version(path: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """The version of NVIDIA's kernel module; None without an NVIDIA driver. Loads no library and
    creates no CUDA context."""
    try:
        text = path.read_text()
    except OSError:
        return None
    match = re.search(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)", text)
    return match.group(1) if match else None


def gather(
    store: AgreementStore, report: Report, world_size: int, deadline_s: float
) -> list[Report]:
    """Gather all ranks' reports on rank 0, in rank order. Any other rank stores its report and
    returns only that.

    For a rank that has not reported within `deadline_s`, the report holds only `rank` and `error`.
    All ranks share one deadline, because they write concurrently, so a second silent rank adds no
    wait.
    """
    rank = int(report["rank"])
    if rank != 0:
        store.set(f"report/{rank}", json.dumps(report, default=str).encode())
        return [report]
    end = time.monotonic() + deadline_s
    silent = f"no answer within {deadline_s:g} s: it has not called guard.diagnose"
    return [report, *(_report_of(store, other, end, silent) for other in range(1, world_size))]


def _report_of(store: AgreementStore, rank: int, end: float, silent: str) -> Report:
    key = f"report/{rank}"
    try:
        if not poll(lambda: store.check([key]), end):
            return {"rank": rank, "error": silent}
        answer: Report = json.loads(store.get(key))
    except Exception as error:  # noqa: BLE001  the store's errors differ between backends and torch versions; the rank's row shows it
        reason = f"its report could not be read: {type(error).__name__}: {error}"
        return {"rank": rank, "error": reason[:300]}
    return answer


_calls = itertools.count(1)
"""Numbers the calls to `diagnose`, to keep their reports apart. All ranks call it the same number
of times."""


def diagnose(
    recorder: Recorder,
    model: torch.nn.Module | None,
    reported: TrainingEntry,
    *,
    deadline_s: float = 30.0,
    expect: int | None = None,
    shapes_file: Path | None = None,
) -> list[Report]:
    """Gather all ranks' reports. Rank 0 then passes them to the supervisor through the journal, or
    prints them if there is no supervisor.

    `reported`: the settings that the loop reports. `expect`: the number of GPUs that must be
    present, None if unknown; used only if rank 0 prints the reports. `shapes_file`: where rank 0
    writes the model's shapes, which the guard uses to check its gradients. Returns all ranks'
    reports on rank 0; only this rank's own on any other rank, or without a process group. Takes up
    to `deadline_s`, but only on rank 0 and only if a rank is silent. May raise.
    """
    reports = [report(recorder.place, model, reported)]
    dist, call = initialised_distributed(), next(_calls)
    if recorder.place.world_size > 1 and dist is not None:
        c10d = dist.distributed_c10d
        default = c10d._get_default_store()
        store = c10d.PrefixStore(f"miner_guard/diagnose/{call}", default)
        reports = gather(store, reports[0], recorder.place.world_size, deadline_s)
    if recorder.place.rank == 0:
        _hand_over(recorder, reports, training(reports[0], model, reported), expect)
        if model is not None and shapes_file is not None:
            _write_shapes(shapes_file, model, reports)
    return reports


def _write_shapes(file: Path, model: torch.nn.Module, reports: list[Report]) -> None:
    # If the ranks hold different models, such as pipeline stages, rank 0's is not the whole model.
    same = len({r.get("params") for r in reports}) == 1
    shapes.write(file, model_shapes(model) if same else None)


def training(
    report: Report, model: torch.nn.Module | None, reported: TrainingEntry
) -> TrainingEntry:
    """Return the journal's `training` entry: the caller's values, plus what `diagnose` found."""
    named = getattr(getattr(model, "config", None), "_name_or_path", None) or (
        type(model).__name__ if model else None
    )
    return replace(
        reported,
        model_name=reported.model_name or named,
        accumulation_steps=report.get("accumulation_steps") or None,
        world_size=report.get("world_size") or None,
        params=report.get("params") or None,
    )


def _hand_over(
    recorder: Recorder, reports: list[Report], training: TrainingEntry, expect: int | None
) -> None:
    now = time.monotonic()
    stored = recorder.journal(replace(training, t=now))
    stored = recorder.journal(DiagnosisEntry(t=now, reports=reports)) and stored
    if not recorder.supervised or not stored:
        for event in ranks.events(reports, expect):
            recorder.emit(event)


def placement(model: torch.nn.Module) -> dict[str, Any]:
    """The local shards of `model` by device.

    Reads metadata only: no collective, no copy, no allocation, no CUDA context. It counts the local
    shard, because `.numel()` of a DTensor is the global count. Call it between steps: during a step
    FSDP2 replaces the shards with gathered parameters.

    Keys: `params` (global count), `shard_params`, `shard_bytes`, `shards` ({device: [count,
    bytes]}), `shard_devices`, `model_device` (where most bytes are), `dtype`, `mixed_dtype` (in
    which FSDP computes), `mesh_device` (None without a mesh), `meta_params` (parameters still on
    the meta device), `offload` (whether FSDP has an offload policy).
    """
    by_device: dict[str, list[int]] = {}
    dtypes: Counter[str] = Counter()
    meshes: Counter[str] = Counter()
    total = meta = 0
    with torch.no_grad():
        for parameter in model.parameters():
            total += parameter.numel()
            mesh = getattr(parameter, "device_mesh", None)
            if mesh is not None:
                meshes[str(mesh.device_type)] += 1
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            if local.is_meta:
                meta += local.numel()
            entry = by_device.setdefault(str(local.device), [0, 0])
            entry[0] += local.numel()
            entry[1] += local.numel() * local.element_size()
            dtypes[str(local.dtype).removeprefix("torch.")] += local.numel()
    return {
        "params": total,
        "shard_params": sum(count for count, _ in by_device.values()),
        "shard_bytes": sum(size for _, size in by_device.values()),
        "shards": by_device,
        "shard_devices": ", ".join(sorted(by_device)) or None,
        "model_device": max(by_device, key=lambda d: by_device[d][1]) if by_device else None,
        "dtype": ", ".join(name for name, _ in dtypes.most_common()) or None,
        "mixed_dtype": _mixed_dtype(model),
        "mesh_device": meshes.most_common(1)[0][0] if meshes else None,
        "meta_params": meta,
        "offload": offloads(model),
    }


def model_shapes(model: torch.nn.Module) -> Shapes | None:
    """Full parameter shapes by plain name; None if this rank cannot know them.

    A DTensor reports its full shape. FSDP1's flat parameters, Megatron's shards and ZeRO-3's empty
    parameters do not.
    """
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    sizes: dict[str, list[int]] = {}
    optional: set[str] = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        partial = type(parameter).__name__ == "FlatParameter" or getattr(
            parameter, "tensor_model_parallel", False
        )
        if partial or parameter.numel() == 0:
            return None
        plain = plain_name(name)
        sizes[plain] = list(parameter.shape)
        if first[id(parameter)] != name or not parameter.requires_grad:
            optional.add(plain)
    return Shapes(sizes, frozenset(optional)) if sizes else None


def offloads(model: torch.nn.Module) -> bool:
    """Return whether FSDP deliberately keeps parameters on the CPU (FSDP2's CPUOffloadPolicy,
    FSDP1's CPUOffload)."""
    return any(_fsdp2_offloads(module) or _fsdp1_offloads(module) for module in model.modules())


def _mixed_dtype(model: torch.nn.Module) -> str | None:
    """The dtype in which FSDP's mixed precision computes; None without it."""
    for module in model.modules():
        policies = [getattr(group, "mp_policy", None) for group in _fsdp2_groups(module)]
        for policy in (*policies, getattr(module, "mixed_precision", None)):
            if isinstance(dtype := getattr(policy, "param_dtype", None), torch.dtype):
                return str(dtype).removeprefix("torch.")
    return None


def _fsdp2_groups(module: torch.nn.Module) -> list[Any]:
    state_of = getattr(module, "_get_fsdp_state", None)
    state = None if state_of is None else state_of()
    # torch 2.5 to 2.10 have one parameter group per module, later versions a list.
    groups = getattr(state, "_fsdp_param_groups", None)
    return groups or [getattr(state, "_fsdp_param_group", None)]


def _fsdp2_offloads(module: torch.nn.Module) -> bool:
    policies = (getattr(group, "offload_policy", None) for group in _fsdp2_groups(module))
    return any(type(policy).__name__ == "CPUOffloadPolicy" for policy in policies)


def _fsdp1_offloads(module: torch.nn.Module) -> bool:
    return bool(getattr(getattr(module, "cpu_offload", None), "offload_params", False))


def cuda_facts(device: str | None) -> Mapping[str, Any]:
    """The facts that torch reports about CUDA and the rank's GPU.

    `device` is where the model is, such as `cuda:1`. If the process has no CUDA context, the
    device fields are missing, because reading them would create a context.
    """
    available = torch.cuda.is_available()
    context = bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
    facts: dict[str, Any] = {
        "cuda_available": available,
        "gpu_count": torch.cuda.device_count() if available else 0,
        "cuda_context": context,
    }
    if not context:
        return facts
    index = torch.cuda.current_device()
    facts["cuda_device"] = index
    if device is not None and device.startswith("cuda:"):
        index = int(device.partition(":")[2])
    properties = torch.cuda.get_device_properties(index)
    uuid = getattr(properties, "uuid", None)
    facts |= {
        "device_name": properties.name,
        "uuid": None if uuid is None else "GPU-" + str(uuid).removeprefix("GPU-"),
        "pci_bus": getattr(properties, "pci_bus_id", None),
        "capability": f"{properties.major}.{properties.minor}",
        "total_bytes": properties.total_memory,
        "allocated_bytes": torch.cuda.memory_allocated(index),
        "reserved_bytes": torch.cuda.memory_reserved(index),
    }
    free, total = torch.cuda.mem_get_info(index)
    facts["device_used_bytes"] = total - free
    return facts
