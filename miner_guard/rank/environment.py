"""Reads this process's rank, and whatever the supervisor passed to it, from the environment,
once."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miner_guard.config import CostSettings, GateSettings, GpuSettings, HangSettings
from miner_guard.rank.layout import process_start
from miner_guard.rank.wire import WIRE
from miner_guard.state_dir import MARKER, RANK_SETTINGS, STATE_DIR, StateDir

RANK_ABOVE = "_MINER_GUARD_RANK_ABOVE"
"""Passed to a rank's child processes: the rank's pid, start time, rank and world size."""


@dataclass(frozen=True)
class RankSettings:
    """The settings that ranks need."""

    gate: GateSettings = field(default_factory=GateSettings)
    gpu: GpuSettings = field(default_factory=GpuSettings)
    hang: HangSettings = field(default_factory=HangSettings)
    costs: CostSettings = field(default_factory=CostSettings)
    launch: int = 0
    """Number of times that this run of the guard had started the miner before this launch."""


@dataclass(frozen=True)
class RankContext:
    """This rank's place among the others, and where it writes."""

    rank: int
    local_rank: int
    world_size: int
    run_id: str
    state: StateDir | None
    """None if no state directory is configured; the rank then writes nothing to disk."""

    settings: RankSettings
    remarks: tuple[str, ...] = ()
    """Human-readable remarks about unusable inputs."""

    local_world_size: int = 0
    """Ranks on this host; 0 if unknown."""

    generation: int = 0
    """How often torchrun has restarted its workers after a failure."""

    wire: str = ""
    """Where the guard listens (`rank.wire.WIRE`); empty if there is no guard."""


def find(env: Mapping[str, str] = os.environ, state_dir: str | Path | None = None) -> RankContext:
    """Find this rank's place: from torch.distributed if it is initialised, otherwise from
    torchrun's variables, otherwise rank 0 of 1."""
    remarks: list[str] = []
    rank, world_size = _number(env, "RANK", 0, remarks), _number(env, "WORLD_SIZE", 1, remarks)
    dist = initialised_distributed()
    if dist is not None:
        rank, world_size = dist.get_rank(), dist.get_world_size()
    below = _is_of_a_rank(env, rank, world_size)
    folder = None if below else _folder(env, state_dir, remarks)
    return RankContext(
        rank=rank,
        local_rank=_number(env, "LOCAL_RANK", 0, remarks),
        world_size=world_size,
        run_id=env.get(MARKER) or f"alone-{os.getpid()}",
        state=None if folder is None else StateDir(folder),
        settings=_settings(env.get(RANK_SETTINGS), remarks),
        local_world_size=_number(env, "LOCAL_WORLD_SIZE", 0, remarks),
        generation=_number(env, "TORCHELASTIC_RESTART_COUNT", 0, remarks),
        wire="" if below else env.get(WIRE, ""),
        remarks=tuple(remarks),
    )


def _folder(env: Mapping[str, str], path: str | Path | None, remarks: list[str]) -> Path | None:
    named = path or env.get(STATE_DIR) or env.get("MINER_GUARD_STATE_DIR")
    try:
        return Path(named).expanduser().absolute() if named else None
    except (OSError, RuntimeError, TypeError) as error:
        # The home or working directory is gone, but this must still be the same rank.
        remarks.append(f"the state directory {named} can't be found ({error}); nothing is recorded")
        return None


def mark(place: RankContext) -> None:
    """Mark child processes as belonging to this rank, because a spawned dataloader worker runs the
    top level of the script again and would mistake itself for the rank."""
    if place.wire or place.state is not None:
        os.environ[RANK_ABOVE] = (
            f"{os.getpid()} {process_start(os.getpid())} {place.rank} {place.world_size}"
        )


def unmark() -> None:
    """Undo `mark`, because this process is no longer a rank."""
    os.environ.pop(RANK_ABOVE, None)


def _is_of_a_rank(env: Mapping[str, str], rank: int, world_size: int) -> bool:
    """Return whether this process descends from a living rank and claims to be the same one. The
    record then belongs to that rank."""
    try:
        pid, start, its_rank, its_world = map(int, env.get(RANK_ABOVE, "").split())
        return (
            (its_rank, its_world) == (rank, world_size)
            and pid != os.getpid()
            and process_start(pid) == start
        )
    except (ValueError, OSError):
        return False


def loaded_module(name: str) -> Any:
    """The module `name` if the program has imported it to its end, else None; never imports it.

    While another thread imports a module, it is in `sys.modules` already, but lacks most of its
    attributes.
    """
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    return None if getattr(spec, "_initializing", False) else module


def initialised_distributed() -> Any | None:
    """`torch.distributed` if the program has imported and initialised it, else None. Never imports
    torch."""
    dist = loaded_module("torch.distributed")
    return dist if dist is not None and dist.is_available() and dist.is_initialized() else None


def _number(env: Mapping[str, str], name: str, default: int, remarks: list[str]) -> int:
    text = env.get(name)
    if text is None:
        return default
    try:
        number = int(text)
    except ValueError:
        number = -1
    if not 0 <= number < 1 << 31:
        remarks.append(f"{name}={text!r} in the environment is not a valid number; using {default}")
        return default
    return number


def _settings(text: str | None, remarks: list[str]) -> RankSettings:
    if not text:
        return RankSettings()
    try:
        document = json.loads(text)
        sections: dict[str, Any] = {
            f.name: _section(f.default_factory, document.get(f.name))
            for f in dataclasses.fields(RankSettings)
            if f.name != "launch"
        }
        return RankSettings(**sections, launch=int(document.get("launch", 0)))
    except (ValueError, TypeError, AttributeError) as error:
        remarks.append(
            f"the settings from the supervisor can't be read ({error}); using the defaults"
        )
        return RankSettings()


def _section(cls: Any, values: Any) -> Any:
    # Drop unknown keys: the supervisor's version may differ from the one in the miner's Python.
    names = {f.name for f in dataclasses.fields(cls)}
    return cls(**{key: value for key, value in (values or {}).items() if key in names})
