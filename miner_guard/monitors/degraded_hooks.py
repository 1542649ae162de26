"""Reports ranks in which the hook could not begin. All that the guard learns of such a rank is the
line that it prints, because it has no flight record."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from miner_guard.eventlog.catalog import Finding, make_finding
from miner_guard.monitors.base import Context, Monitor
from miner_guard.system.once import Once

_LINE = re.compile(rb"^(?:\[[^\]]*\]:? ?)?GUARD DEGRADED: (.{1,500})")
"""The line of `miner_guard.InertGuard` and of the sitecustomize, after torchrun's prefix if it has
one."""

_MAX_LINES = 20


class DegradedHooksMonitor(Monitor):
    """Reports each different line once."""

    name = "degraded_hooks"
    words = frozenset({b"degraded"})

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._reported = Once(_MAX_LINES)

    def on_lines(self, lines: Sequence[bytes]) -> Iterator[Finding]:
        for line in lines:
            match = _LINE.match(line)
            if match is None:
                continue
            what = match[1].decode("utf-8", "replace").strip()
            if self._reported.first(what):
                yield make_finding("guard_degraded", what=what, source="log")
