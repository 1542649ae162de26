"""Journals the start and the end of an upload: `with guard.upload(decision): …`."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from miner_guard.flight_recorder import journal
from miner_guard.rank.phases import AnyPhase
from miner_guard.rank.recorder import Recorder, describe
from miner_guard.uploads.decision import GateDecision


class UploadRecorder:
    """Records one upload. Rank 0 always reports it; any other rank reports it only if it fails
    there."""

    def __init__(
        self,
        recorder: Recorder,
        phase: AnyPhase,
        decision: GateDecision,
        *,
        finished: Callable[[], None],
        tag: str | None = None,
    ) -> None:
        """`finished` is called when the upload ends without an error."""
        self._recorder = recorder
        self._phase = phase
        self._finished = finished
        self._started = 0.0
        self.decision = decision
        self.tag = tag
        """The tag of the upload, such as `5.56.51`."""

        self.size_bytes: int | None = None
        self.attempts: int | None = None
        self.checksum: str | None = None
        """Set if the publisher reports it."""

        self.error: str | None = None
        """Set if the upload failed without an exception."""

    def __enter__(self) -> UploadRecorder:
        self._started = self._recorder.monotonic()
        if not self.decision.allowed:
            self._recorder.report_error(
                "upload", "the miner started an upload that the gate had blocked"
            )
        if self._recorder.place.rank == 0:
            self._write("started")
        self._phase.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._phase.__exit__(kind, error, trace)
        if error is not None and self.error is None:
            self.error = describe(error)
        if self.error is not None:
            self._write("failed")
            return
        self._finished()
        if self._recorder.place.rank == 0:
            self._write("finished")

    def _write(self, phase: str) -> None:
        try:
            self._recorder.journal(self._entry(phase))
        except Exception as error:  # noqa: BLE001 - the upload itself continues; reported as guard_degraded
            self._recorder.report_error(
                "upload entry", f"the upload could not be recorded: {describe(error)}"
            )

    def _entry(self, phase: str) -> journal.UploadEntry:
        decision = self.decision
        return journal.UploadEntry(
            phase=phase,
            decision_id=decision.decision_id,
            outer_step=decision.outer_step,
            inner_step=decision.inner_step,
            kind=decision.kind,
            tag=self.tag,
            seconds=None if phase == "started" else self._recorder.monotonic() - self._started,
            bytes=self.size_bytes,
            attempts=self.attempts,
            checksum=_shown(self.checksum),
            error=self.error,
        )


def _shown(checksum: str | None) -> str | None:
    """Return the first 32 characters. The guard would redact a whole sha256, because it looks like
    a private key."""
    return None if checksum is None else checksum[:32]
