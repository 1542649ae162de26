"""Checks by pid and start time whether the ranks' processes are alive, so the guard notices a
rank's death within seconds."""

from __future__ import annotations

from collections.abc import Mapping

from miner_guard.detectors.hang import Processes
from miner_guard.monitors.evidence import identity_of
from miner_guard.rank.layout import Identity, Now, ranks_elsewhere
from miner_guard.state_dir import StateDir
from miner_guard.system import processes

_REFRESH_S = 10.0
"""Refresh interval for rank identities, since a launcher may replace a rank's process; a missing
process is looked up again immediately."""


class RankProcesses:
    """Tracks the ranks' processes. Each call reads one /proc file per rank."""

    def __init__(self, state: StateDir) -> None:
        self._state = state
        self._identities: dict[int, Identity] = {}
        self._refreshed = float("-inf")

    def observe(self, now: float, ranks: Mapping[int, Now]) -> Processes:
        """The state of the ranks' processes; one that cannot be inspected counts as alive."""
        if ranks.keys() != self._identities.keys() or now - self._refreshed >= _REFRESH_S:
            self._refreshed = now
            self._identities = {
                rank: known
                for rank in ranks
                if (known := identity_of(self._state, rank)) is not None
            }
        states = {
            rank: self._state_of(rank, identity)
            for rank, identity in list(self._identities.items())
        }
        return Processes(
            gone={rank for rank, state in states.items() if state == "gone"},
            stopped={rank for rank, state in states.items() if state in ("T", "t")},
            absent=self._absent(),
            elsewhere=ranks_elsewhere(self._identities.values()),
        )

    def pid(self, rank: int) -> int | None:
        """The last known pid of the rank's process."""
        known = self._identities.get(rank)
        return None if known is None else known.pid

    def _state_of(self, rank: int, identity: Identity) -> str:
        state = _state(identity)
        if state != "gone":
            return state
        successor = identity_of(self._state, rank)
        if successor is None or successor == identity:
            return "gone"
        self._identities[rank] = successor
        return _state(successor)

    def _absent(self) -> set[int]:
        """Ranks on this node that have not reported; known only if the launcher set the world
        size."""
        known = list(self._identities.values())
        if not known or any(one.local_world_size != one.world_size for one in known):
            return set()
        return set(range(known[0].world_size)) - self._identities.keys()


def _state(identity: Identity) -> str:
    try:
        seen = processes.stat(identity.pid)
    except OSError:
        return "unknown"
    if seen is None or seen.process.start != identity.process_start or seen.state in "ZX":
        return "gone"
    return seen.state
