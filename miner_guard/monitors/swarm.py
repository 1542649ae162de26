"""The swarm as seen in the miner's log: how many peers are participating, and how AllReduces
ended."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from miner_guard.attach.patterns import patterns
from miner_guard.detectors.log_lines import AllReduceEnd, Patterns, PeersLine, read_swarm
from miner_guard.eventlog.catalog import Finding, make_finding
from miner_guard.monitors.base import Context, Launch, Monitor
from miner_guard.validators.profiles import chosen

_REPEAT_S = 600.0
"""Peers may come and go at every outer step: a loss of peers is reported again after this long, or
when even fewer are left."""


class SwarmMonitor(Monitor):
    """Inactive unless the profile has patterns for peers or AllReduces."""

    name = "swarm"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        profile = chosen(context.config.miner)
        self._patterns = Patterns(()) if profile is None else patterns(profile)
        of = self._patterns
        if not (of.peers or of.allreduce_finished or of.allreduce_failed):
            self.words = frozenset()
        self._peers: int | None = None
        self._reported: dict[str, tuple[int, float]] = {}
        """The number last reported for each event, and when."""

        self._allreduces = {"finished": 0, "failed": 0}
        self._last: dict[str, Any] | None = None

    def on_launch(self, launch: Launch) -> Iterator[Finding]:
        # A new process has not joined its peers yet: do not report them as lost.
        self._peers = None
        return iter(())

    def on_lines(self, lines: Sequence[bytes]) -> Iterator[Finding]:
        for raw in lines:
            parsed = read_swarm(raw.decode("utf-8", "replace"), self._patterns)
            if isinstance(parsed, PeersLine):
                yield from self._counted(parsed.peers)
            elif isinstance(parsed, AllReduceEnd):
                yield self._ended(parsed)

    def _counted(self, peers: int) -> Iterator[Finding]:
        before, self._peers = self._peers, peers
        if before is None or before == peers:
            return
        event = "peers_lost" if peers < before else "peers_joined"
        finding = make_finding(event, peers=peers, before=before)
        yield finding if self._is_news(event, peers) else finding.at("debug")

    def _is_news(self, event: str, peers: int) -> bool:
        now = self.context.clock.monotonic()
        number, at = self._reported.get(event, (peers, float("-inf")))
        if now - at < _REPEAT_S and not (event == "peers_lost" and peers < number):
            return False
        self._reported[event] = (peers, now)
        return True

    def _ended(self, end: AllReduceEnd) -> Finding:
        outcome = "finished" if end.error is None else "failed"
        self._allreduces[outcome] += 1
        reason = None if end.error is None else end.error[:200]
        self._last = {"outcome": outcome, "reason": reason, "wall": self.context.clock.wall()}
        return make_finding(
            "allreduce_ended",
            outcome=outcome if reason is None else f"failed: {reason}",
            reason=reason,
        )

    def snapshot(self) -> Mapping[str, Any]:
        return {"peers": self._peers, "allreduces": dict(self._allreduces), "last": self._last}
