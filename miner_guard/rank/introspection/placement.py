"""Finds out where a rank's model really is: parameter counts and bytes of the local shards by
device, without reading tensor data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from miner_guard.validators.shapes import Shapes, plain_name


def placement(model: torch.nn.Module) -> dict[str, Any]:
    """The local shards of `model` by device.

    Reads metadata only: no collective, no copy, no allocation, no CUDA context. It counts the local
    shard, because `.numel()` of a DTensor is the global count. Call it between steps: during a step
    FSDP2 replaces the shards with gathered parameters.

    Keys: `params` (global count), `shard_params`, `shard_bytes`, `shards` ({device: [count,
    bytes]}), `shard_devices`, `model_device` (where most bytes are), `dtype`, `mesh_device` (None
    without a mesh), `meta_params` (parameters still on the meta device), `offload` (whether FSDP
    has an offload policy).
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
        "mesh_device": meshes.most_common(1)[0][0] if meshes else None,
        "meta_params": meta,
        "offload": offloads(model),
    }


def shapes(model: torch.nn.Module) -> Shapes | None:
    """Full parameter shapes by plain name; None if this rank cannot know them.

    A DTensor reports its full shape. FSDP1's flat parameters, Megatron's shards and ZeRO-3's empty
    parameters do not.
    """
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, list[int]] = {}
    optional: set[str] = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        partial = type(parameter).__name__ == "FlatParameter" or getattr(
            parameter, "tensor_model_parallel", False
        )
        if partial or parameter.numel() == 0:
            return None
        plain = plain_name(name)
        found[plain] = list(parameter.shape)
        if first[id(parameter)] != name or not parameter.requires_grad:
            optional.add(plain)
    return Shapes(found, frozenset(optional)) if found else None


def offloads(model: torch.nn.Module) -> bool:
    """Return whether FSDP deliberately keeps parameters on the CPU (FSDP2's CPUOffloadPolicy,
    FSDP1's CPUOffload)."""
    return any(_fsdp2_offloads(module) or _fsdp1_offloads(module) for module in model.modules())


def _fsdp2_offloads(module: torch.nn.Module) -> bool:
    state_of = getattr(module, "_get_fsdp_state", None)
    if state_of is None:
        return False
    state = state_of()
    # torch 2.5 to 2.10 have one parameter group per module, later versions a list.
    groups = getattr(state, "_fsdp_param_groups", None) or [
        getattr(state, "_fsdp_param_group", None)
    ]
    return any(
        type(getattr(g, "offload_policy", None)).__name__ == "CPUOffloadPolicy" for g in groups
    )


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
