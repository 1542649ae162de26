"""Hang: no progress for too long. Names the culprit, keeps the evidence, then does what `[hang]
action` says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from miner_guard.detectors.hang import Hang, HangDetector
from miner_guard.eventlog.catalog import Finding, make_finding
from miner_guard.exits import CRASH_LOOP
from miner_guard.flight_recorder.records import Now, StepRecord
from miner_guard.monitors import evidence, evidence_folders
from miner_guard.monitors.base import Context, Launch, Monitor
from miner_guard.monitors.evidence import Subject
from miner_guard.monitors.tail import Tail
from miner_guard.rank.consensus.agree import LATE
from miner_guard.state_dir import is_full

_WHY_NO_STEP = {
    None: "the miner does not call the hook; start it with --attach sn38, auto or log",
    "sn38": "--attach sn38 found nothing that it knows in this miner; try --attach auto or log",
    "auto": (
        "--attach auto found no training loop of torch in this miner; try --attach log, or "
        "call the hook"
    ),
    "log": "none of the miner's lines was known as a step's; describe them in [miner] log_patterns",
}
"""By way of attaching: why a miner that lives shows no step, and what to do."""


class HangMonitor(Monitor):
    """Feeds the detector and acts on its answer."""

    name = "hang"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._settings = context.config.hang
        self._detector = HangDetector(self._settings)
        self._tail = Tail()
        self._last_incident: str | None = None
        self._ranks: Mapping[int, Now] = {}
        """As they were at the last tick."""

        self._hang: Hang | None = None
        self._launched = 0.0
        self._said_blind = False

    def on_launch(self, launch: Launch) -> Iterable[Finding]:
        self._detector.launched(launch.started)
        self._tail = Tail()
        self._last_incident, self._ranks, self._hang = None, {}, None
        self._launched, self._said_blind = launch.started, False
        return ()

    def on_steps(self, rank: int, steps: Sequence[StepRecord]) -> Iterable[Finding]:
        for step in steps:
            self._detector.stepped(step.end, step.seconds, step.phases)
        if self._hang is not None and not self._hang.lasting:
            self._hang = None
        return ()

    def on_output(self, chunk: bytes) -> Iterable[Finding]:
        self._tail.add(chunk)
        if self.context.config.miner.attach == "log":
            self._detector.printed(self.context.clock.monotonic())
        return ()

    def on_finding(self, finding: Finding) -> Iterable[Finding]:
        if finding.event == "incident":
            self._last_incident = str(finding.fields.get("label"))
        lasting = self._hang is not None and self._hang.lasting
        if finding.fields.get("where") == LATE and not lasting:
            now, allowed_s = (
                self.context.clock.monotonic(),
                self.context.config.gate.broadcast_timeout_s,
            )
            hang = self._detector.late(now, self._ranks, allowed_s)
            return self._said(hang, evidence.subjects(self.context.state, self._ranks))
        return ()

    def on_tick(self, now: float, ranks: Mapping[int, Now]) -> Iterable[Finding]:
        self._ranks = ranks
        suspected = self._detector.idle_s(now) > min(self._detector.limit_s, self._settings.min_s)
        who = (
            evidence.subjects(self.context.state, ranks) if suspected and self._hang is None else []
        )
        hang = self._detector.look(
            now, ranks, gone={subject.rank for subject in who if subject.gone}
        )
        return self._blind(now, ranks) if hang is None else self._said(hang, who)

    def _said(self, hang: Hang, who: list[Subject]) -> Iterable[Finding]:
        self._hang = hang
        detail = hang.detail + (
            f"; before it: INCIDENT {self._last_incident}" if self._last_incident else ""
        )
        story: dict[str, Any] = {
            "detail": detail,
            "culprits": list(hang.culprits),
            "idle_s": hang.idle_s,
            "limit_s": hang.limit_s,
        }
        output = self._tail.text()
        self.context.jobs.once(
            "hang evidence", lambda: self._gather_and_act(hang, who, story, output)
        )
        return [
            make_finding(
                "hang_detected", rank=hang.culprits[0] if len(hang.culprits) == 1 else None, **story
            )
        ]

    def _blind(self, now: float, ranks: Mapping[int, Now]) -> Iterable[Finding]:
        """A miner that lives and shows no step is watched by nobody: said once a launch."""
        attach, waited = self.context.config.miner.attach, now - self._launched
        seen = self._detector.has_stepped or self._hang is not None or (ranks and attach != "log")
        if seen or self._said_blind or waited <= self._settings.first_step_s:
            return ()
        self._said_blind = True
        what = (
            f"no step seen for {waited / 60:.0f} min, so slow steps and hangs are not "
            f"either: {_WHY_NO_STEP[attach]}"
        )
        return [make_finding("guard_degraded", what=what)]

    def _gather_and_act(
        self, hang: Hang, who: list[Subject], story: dict[str, Any], output: bytes
    ) -> None:
        """In a job's thread."""
        folder = evidence_folders.folder(self.context.state, self.context.clock.wall(), "hang")
        try:
            told = {**story, "status": dict(self.context.status())}
            had = evidence.gather(
                self.context.state,
                folder,
                who,
                told,
                output,
                self.context.redactor,
                self._settings.stack_timeout_s,
            )
            if had.late is not None:
                self.context.emit(
                    make_finding(
                        "hang_evidence", detail=had.late.detail, ranks=list(had.late.ranks)
                    )
                )
            ranks = (
                ", ".join(f"rank {rank}" for rank in had.stacks_of) or "no rank's stacks, the rest"
            )
            self.context.emit(make_finding("stack_dump", ranks=ranks, path=str(folder)))
            evidence_folders.prune(self.context.state, self.context.config.logs.keep_incidents)
        except OSError as error:
            what = f"the evidence of the hang could not be stored: {error.strerror or error}"
            self.context.emit(make_finding("guard_degraded", what=what, disk_full=is_full(error)))
        finally:
            self._act(hang, str(story["detail"]))

    def _act(self, hang: Hang, detail: str) -> None:
        if self._hang is not hang:
            # Gathering takes seconds: ranks that step again, or a launch that is another one, must
            # not pay for it.
            what = "it ended by itself while its evidence was gathered; the miner is left alone"
            self.context.emit(make_finding("hang_evidence", level="info", detail=what, ranks=[]))
        elif self._settings.action == "restart":
            self.context.control.restart(f"hang: {detail}")
        elif self._settings.action == "stop":
            self.context.control.stop(f"hang: {detail}", CRASH_LOOP)

    def snapshot(self) -> Mapping[str, Any]:
        now = self.context.clock.monotonic()
        watching = bool(self._ranks)
        return {
            "watching": watching,
            "reason": None
            if watching
            else "no rank has reported: the miner does not use the hook, or not yet",
            "idle_s": round(self._detector.idle_s(now), 1) if watching else None,
            "limit_s": round(self._detector.limit_s, 1) if watching else None,
            "hang": self._hang.detail if self._hang is not None else None,
        }
