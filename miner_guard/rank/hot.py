"""Selects the hook's hot path: the compiled one if it was built for this layout, otherwise the
Python one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from miner_guard.flight_recorder import layout
from miner_guard.flight_recorder.layout import PHASES
from miner_guard.rank.notify import notification
from miner_guard.rank.phases import COLUMNS, Phase, PhaseNames, Phases, packed
from miner_guard.rank.recorder import NOTIFY_EVERY_S, Recorder

if TYPE_CHECKING:
    from miner_guard.flight_recorder import _hot

PYTHON_HOOK = "_MINER_GUARD_PYTHON_HOOK"
"""Environment variable that makes ranks use the Python path even if the compiled one is
available."""

PHASE_FLAGS = {
    **dict.fromkeys(("inference", "val_loss", "example_loss", "monitor"), layout.FLAG_EVAL),
    **dict.fromkeys(("upload", "allreduce", "load_state", "pause"), layout.FLAG_SYNC),
}
"""Maps each phase to the flag for a step that spent time in it."""

_LAYOUT = {
    "header_offset": layout.NOW_OFFSET,
    "header_size": layout.NOW.size,
    "ring_offset": layout.RING_OFFSET,
    "ring_slots": layout.RING_SLOTS,
    "step_size": layout.STEP_SIZE,
    "step_bytes": layout.STEP.size,
    "file_size": layout.FILE_SIZE,
    "phases": len(PHASES),
    "interface": 2,
}
"""The layout that the compiled module must have been built for. `interface` is the version of its
functions."""

Remember = Callable[[float], None]
Memory = Callable[[], tuple[float | None, float | None]]


def compiled() -> tuple[Any | None, str]:
    """Return the compiled module and its path, or None and the reason why it is not used."""
    if os.environ.get(PYTHON_HOOK):
        return None, f"{PYTHON_HOOK} is set"
    try:
        from miner_guard.flight_recorder import _hot
    except ImportError as error:
        return None, f"not built: {error}"
    if _hot.LAYOUT != _LAYOUT:
        return None, f"{_hot.__file__} was built from different sources; reinstall the package"
    return _hot, str(_hot.__file__)


@dataclass
class HotPath:
    """The code that runs at every phase and step."""

    phases: Phases | _hot.HotPhases
    names: PhaseNames
    step: Callable[..., int] | None
    """Handles a whole step if all reported values are plain numbers (`HotPhases.step`); None if the
    Python path must handle it."""

    take_own: Callable[[], tuple[float, int]]
    """Returns the seconds spent in `step` since the last call, and the number of those steps."""

    watch: Callable[[int], None]
    """Takes a signal number, and makes `step` return 2 once that signal's handler has changed. 0
    watches no signal."""


def hot_path(
    recorder: Recorder, allowances: Mapping[str, float], remember: Remember, memory: Memory
) -> HotPath:
    """Create a rank's hot path. It calls `remember` with each loss, and `memory` to read the
    allocated and reserved bytes.

    `allowances`: how long each phase may last according to the settings, in seconds by name.
    """
    module, _ = compiled()
    if module is None:
        phases = Phases(recorder.flight, recorder.monotonic)
        return HotPath(
            phases,
            PhaseNames(partial(Phase, phases), allowances),
            step=None,
            take_own=lambda: (0.0, 0),
            watch=lambda _signal: None,
        )
    hot = module.HotPhases(
        None if recorder.flight is None else recorder.flight.map,
        None if recorder.monotonic is time.monotonic else recorder.monotonic,
        remember,
        memory,
        tuple((name, PHASE_FLAGS.get(name, 0)) for name in PHASES),
        NOTIFY_EVERY_S,
    )
    if (reached := recorder.notifier.reached) is not None:
        hot.reach(*reached, notification(recorder.place.rank))

    def phase(name: str, allowance_s: float, longest_s: float) -> _hot.HotPhase:
        column = PHASES.index(COLUMNS.get(name, "other"))
        made: _hot.HotPhase = module.HotPhase(hot, packed(name), column, allowance_s, longest_s)
        return made

    return HotPath(hot, PhaseNames(phase, allowances), hot.step, hot.take_own, hot.watch)
