"""Checks the ranks' processes to detect, within seconds, ranks that exit while the others are still
training, and reports them as the cause when the rest of the launch fails as a result."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from miner_guard.detectors.rank_ends import Left, ended_early, left_behind
from miner_guard.eventlog.catalog import Finding, make_finding
from miner_guard.monitors.base import Context, Exit, Launch, Monitor
from miner_guard.monitors.evidence import header_of
from miner_guard.monitors.rank_processes import RankProcesses
from miner_guard.rank.layout import Now

_NOTICE_S = 3.0
"""How long a rank must be gone before it is reported: at the end of training, the ranks of a launch
exit up to a few seconds apart."""


class RankEndsMonitor(Monitor):
    """Runs before the incidents monitor, since what the other ranks print about the missing
    rank is only a consequence."""

    name = "rank_ends"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._begin()

    def _begin(self) -> None:
        self._processes = RankProcesses(self.context.state)
        self._gone_since: dict[int, float] = {}
        self._reported: set[int] = set()
        self._ranks: frozenset[int] = frozenset()
        self._live = True

    def on_launch(self, launch: Launch) -> Iterable[Finding]:
        self._begin()
        return ()

    def on_finding(self, finding: Finding) -> Iterable[Finding]:
        if finding.event == "miner_stopping":
            self._live = False
        return ()

    def on_tick(self, now: float, ranks: Mapping[int, Now]) -> Iterable[Finding]:
        self._ranks = frozenset(ranks)
        if not self._live or len(ranks) < 2:
            return
        if any(header.state == "failed" for header in ranks.values()):
            # Report immediately: the incidents monitor is about to name the failed rank's output as
            # the cause.
            yield from self._ended_early(ranks)
        gone = self._processes.observe(now, ranks).gone
        self._gone_since = {rank: self._gone_since.get(rank, now) for rank in gone}
        for_long = {rank for rank, since in self._gone_since.items() if now - since >= _NOTICE_S}
        if for_long - self._reported and (left := left_behind(ranks, gone)) is not None:
            yield self._finding(left)

    def on_exit(self, end: Exit) -> Iterable[Finding]:
        live, self._live = self._live, False
        if end.asked or end.finished or not live:
            return
        last = {rank: header_of(self.context.state, rank) for rank in self._ranks}
        yield from self._ended_early({r: now for r, now in last.items() if now is not None})

    def _ended_early(self, ranks: Mapping[int, Now]) -> Iterator[Finding]:
        left = ended_early(ranks)
        if left is not None and not self._reported.issuperset(left.ranks):
            yield self._finding(left)

    def _finding(self, left: Left) -> Finding:
        self._reported.update(left.ranks)
        rank = left.ranks[0] if len(left.ranks) == 1 else None
        return make_finding("rank_gone", rank=rank, detail=left.detail, ranks=list(left.ranks))
