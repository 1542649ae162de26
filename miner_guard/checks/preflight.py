"""The scope of a preflight, the facts that follow from the miner's command and profile, and the
checks in table order."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miner_guard.checks import environment, gpu, host, storage
from miner_guard.checks.check import Check, Expectation, Snapshot, expected
from miner_guard.config import Config
from miner_guard.state_dir import StateDir, read_json
from miner_guard.system.launcher_args import number_of, value_of
from miner_guard.validators.profiles import Profile, chosen, load_profile


@dataclass(frozen=True)
class PreflightRequest:
    """The input of a preflight: the miner's command, its environment, and the settings."""

    config: Config
    state: StateDir
    command: Sequence[str] = ()
    env: Mapping[str, str] = dataclasses.field(default_factory=lambda: dict(os.environ))
    """The miner's environment."""

    torch: bool = True
    """If False, query torch only if there is a driver or a GPU is expected: importing torch takes
    seconds."""


def profile_of(config: Config) -> Profile | None:
    """The chosen profile; None without one."""
    named = chosen(config.miner)
    try:
        return None if named is None else load_profile(named)
    except (OSError, ValueError):
        # Loading the settings has already reported the profile's error.
        return None


def expectation_of(request: PreflightRequest, present: int | None) -> Expectation:
    """The expected number of GPUs: from the setting, the last run's count in host.json, the
    profile, or the GPUs present, in that order."""
    setting = request.config.gpu.expect
    memory = read_json(request.state.host_facts)
    last = memory.get("gpu_count") if isinstance(memory, dict) else None
    profile = profile_of(request.config)
    compute = {} if profile is None else profile.compute
    demand = compute.get("min_gpus")
    ranks = number_of(request.command, "--nproc-per-node")
    if compute.get("gpus_per_rank") and ranks:
        demand = int(compute["gpus_per_rank"]) * ranks
    return expected(
        None if setting == "auto" else int(setting),
        last if isinstance(last, int) else None,
        demand,
        present,
    )


def ports_of(request: PreflightRequest) -> list[dict[str, Any]]:
    """Ports that the miner will listen on, where its settings or command specify them."""
    command = request.command
    endpoint = (value_of(command, "--rdzv-endpoint") or "").rpartition(":")[2]
    named = {
        "rendezvous": number_of(command, "--master-port")
        or (int(endpoint) if endpoint.isdigit() else None),
        "axon": number_of(command, "--axon.port"),
        "DHT": number_of(command, "--dht.port"),
    }
    ports = {number: use for use, number in named.items() if number is not None}
    if "rendezvous" not in ports.values() and request.config.miner.master_port:
        ports[request.config.miner.master_port] = "rendezvous"
    # Port 0 is any free one.
    return [{"port": number, "use": use} for number, use in ports.items() if number]


def folders_of(request: PreflightRequest) -> list[str]:
    """Folders that the miner and the guard write to: the state directory, the working directory,
    checkpoints, a local repo."""
    more = [request.config.health.checkpoint_dir, request.config.repo.path]
    return list(dict.fromkeys([str(request.state.root), str(Path.cwd()), *(p for p in more if p)]))


_SUBJECTS = (
    gpu.driver_checks,
    gpu.count_checks,
    gpu.cuda_checks,
    gpu.gpu_checks,
    gpu.held_memory_checks,
    host.host_checks,
    environment.environment_checks,
    storage.storage_checks,
    host.minimum_checks,
)


def judge(snapshot: Snapshot) -> list[Check]:
    """Run all checks on `snapshot`. Pure: the same snapshot gives the same checks."""
    return [check for checks in _SUBJECTS for check in checks(snapshot)]
