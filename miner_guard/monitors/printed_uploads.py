"""Reports pushes that are known only from the miner's printed lines; the `uploads` monitor verifies
them later."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from miner_guard.attach.patterns import patterns
from miner_guard.detectors.log_lines import Patterns, PushLine, read_push
from miner_guard.eventlog.catalog import Finding, make_finding
from miner_guard.monitors.base import Context, Monitor
from miner_guard.rank.journal import JournalEntry, UploadEntry


class PrintedUploadsMonitor(Monitor):
    """Reports nothing if upload verification is off. Stays silent for the
    rest of the run once a hook has reported a push."""

    name = "push_lines"
    words = frozenset({b"push", b"upload"})

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        repo = context.config.repo
        # With `attach = "log"` these lines already produce entries, as a hook would.
        self._silent = (
            context.config.miner.attach == "log" or repo.kind == "none" or not repo.verify_uploads
        )
        self._patterns = Patterns(()) if self._silent else patterns(context.config.miner.profile)
        self._last: PushLine | None = None

    def on_entry(self, rank: int, entry: JournalEntry) -> Iterable[Finding]:
        self._silent = self._silent or isinstance(entry, UploadEntry)
        return ()

    def reads_lines(self) -> bool:
        return not self._silent

    def on_lines(self, lines: Sequence[bytes]) -> Iterator[Finding]:
        for raw in lines:
            push = read_push(raw.decode("utf-8", "replace"), self._patterns)
            if push is None or (push == self._last and push.tag is not None):
                # Several ranks may print the same push.
                continue
            self._last = push
            if push.error is not None:
                yield make_finding(
                    "upload_failed", reason=f"the miner says: {push.error}", source="log"
                )
            else:
                yield make_finding(
                    "upload_reported",
                    tag=push.tag,
                    detail="according to the miner's log",
                    source="log",
                )
