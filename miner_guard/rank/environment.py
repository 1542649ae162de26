"""Who this rank is and what the supervisor told it: read once, from the environment."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from miner_guard.config import CostSettings, GateSettings, GpuSettings, StepSettings
from miner_guard.statedir import MARKER, RANK_SETTINGS, STATE_DIR, StateDir

T = TypeVar("T")


@dataclass(frozen=True)
class RankSettings:
    """The ranks' share of the settings."""

    gate: GateSettings = field(default_factory=GateSettings)
    steps: StepSettings = field(default_factory=StepSettings)
    gpu: GpuSettings = field(default_factory=GpuSettings)
    costs: CostSettings = field(default_factory=CostSettings)
    launch: int = 0
    """How often the miner was started in this run of the guard, from 0."""


@dataclass(frozen=True)
class Place:
    """This rank among the others, and where it writes."""

    rank: int
    local_rank: int
    world_size: int
    run_id: str
    state: StateDir | None
    """None: no state directory was given, nothing is written to disk."""

    settings: RankSettings
    remarks: tuple[str, ...] = ()
    """What could not be used, for people."""


def find(env: Mapping[str, str] = os.environ, state_dir: str | Path | None = None) -> Place:
    """The place by torch.distributed where it is initialised, else by torchrun's variables, else rank 0 of 1."""
    remarks: list[str] = []
    rank, world_size = _number(env, "RANK", 0, remarks), _number(env, "WORLD_SIZE", 1, remarks)
    dist = initialised_distributed()
    if dist is not None:
        rank, world_size = dist.get_rank(), dist.get_world_size()
    folder = state_dir or env.get(STATE_DIR) or env.get("MINER_GUARD_STATE_DIR")
    return Place(
        rank=rank,
        local_rank=_number(env, "LOCAL_RANK", 0, remarks),
        world_size=world_size,
        run_id=env.get(MARKER) or f"alone-{os.getpid()}",
        state=StateDir(Path(folder).expanduser().absolute()) if folder else None,
        settings=_settings(env.get(RANK_SETTINGS), remarks),
        remarks=tuple(remarks),
    )


def initialised_distributed() -> Any | None:
    """`torch.distributed` where the program has imported and initialised it, else None. Never imports torch."""
    dist = sys.modules.get("torch.distributed")
    return dist if dist is not None and dist.is_available() and dist.is_initialized() else None


def _number(env: Mapping[str, str], name: str, default: int, remarks: list[str]) -> int:
    text = env.get(name)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError:
        remarks.append(f"{name}={text!r} in the environment is no number; {default} is used")
        return default


def _settings(text: str | None, remarks: list[str]) -> RankSettings:
    if not text:
        return RankSettings()
    try:
        document = json.loads(text)
        return RankSettings(
            gate=_section(GateSettings, document.get("gate")),
            steps=_section(StepSettings, document.get("steps")),
            gpu=_section(GpuSettings, document.get("gpu")),
            costs=_section(CostSettings, document.get("costs")),
            launch=int(document.get("launch", 0)),
        )
    except (ValueError, TypeError, AttributeError) as error:
        remarks.append(f"the settings from the supervisor can't be read ({error}); the defaults are used")
        return RankSettings()


def _section(cls: type[T], values: Any) -> T:
    # Unknown keys are left out: the supervisor may be of another version than what the miner's Python imports.
    known = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    return cls(**{key: value for key, value in (values or {}).items() if key in known})
