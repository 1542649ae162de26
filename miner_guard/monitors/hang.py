"""Hang: no progress for too long. Names the culprit, collects evidence, then applies `[hang]
action`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from miner_guard.detectors.hang import Hang, HangDetector, Processes
from miner_guard.eventlog.catalog import Finding, make_finding
from miner_guard.eventlog.status_document import HangStatus
from miner_guard.eventlog.write_errors import not_stored
from miner_guard.exits import CRASH_LOOP
from miner_guard.monitors import evidence, evidence_before_init, evidence_folders
from miner_guard.monitors.base import Context, Exit, Launch, Monitor
from miner_guard.monitors.evidence import Subject
from miner_guard.monitors.rank_processes import RankProcesses
from miner_guard.monitors.tail import Tail
from miner_guard.rank.agree import LATE
from miner_guard.rank.layout import ENDED_STATES, Now, StepRecord, ranks_elsewhere
from miner_guard.record.words import counted, rank_list
from miner_guard.system.processes import cpu_s

_CPU_EVERY_S = 30.0
_CPU_LOOKS = 10
"""While no rank reports, the monitor reads the miner's CPU time every `_CPU_EVERY_S`, or this many
times per hang limit if that is more often. Each reading scans all of /proc, so keep them rare."""


class HangMonitor(Monitor):
    """Feeds the detector and acts on its results; inactive while the miner is being stopped."""

    name = "hang"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._settings = context.config.hang
        self._detector = HangDetector(self._settings)
        self._begin(None)

    def _begin(self, launch: Launch | None) -> None:
        """Reset the state for a new launch."""
        self._tail = Tail()
        self._processes = RankProcesses(self.context.state)
        self._last_incident: str | None = None
        self._ranks: Mapping[int, Now] = {}
        """The ranks' headers at the last tick."""

        self._hang: Hang | None = None
        self._launch = launch
        """None if no launch is running or the launch is being stopped."""

        self._died: float | None = None
        """When a rank's death was first noticed."""

        self._cpu_read = float("-inf")

    def on_launch(self, launch: Launch) -> Iterable[Finding]:
        self._detector.launched(launch.started)
        self._begin(launch)
        return ()

    def on_exit(self, end: Exit) -> Iterable[Finding]:
        self._launch = self._hang = None
        return ()

    def on_steps(self, rank: int, steps: Sequence[StepRecord]) -> Iterable[Finding]:
        for step in steps:
            self._detector.stepped(step.end, step.seconds, step.phases)
        if self._hang is not None and not self._hang.lasting:
            self._hang = None
        return ()

    def on_output(self, chunk: bytes) -> Iterable[Finding]:
        self._tail.add(chunk)
        if self.context.config.miner.attach == "log" or not self._ranks:
            self._detector.printed(self.context.clock.monotonic())
        return ()

    def on_finding(self, finding: Finding) -> Iterable[Finding]:
        if finding.event == "incident":
            self._last_incident = str(finding.fields.get("label"))
        if finding.event == "miner_stopping":
            # During a stop, a rank that waits for one that has already exited is not hanging.
            self._launch = self._hang = None
        lasting = self._hang is not None and self._hang.lasting
        if finding.fields.get("where") == LATE and not lasting and self._launch is not None:
            now, allowed_s = (
                self.context.clock.monotonic(),
                self.context.config.gate.broadcast_timeout_s,
            )
            what = str(finding.fields.get("what"))
            self._found(self._detector.late(now, self._ranks, allowed_s, what))
        return ()

    def on_tick(self, now: float, ranks: Mapping[int, Now]) -> Iterable[Finding]:
        self._ranks = ranks
        if self._launch is None:
            return ()
        processes = self._processes.observe(now, ranks)
        if not ranks:
            self._read_cpu(now, self._launch.pid)
        hang = self._lost(now, ranks, processes) or self._detector.check(now, ranks, processes)
        if hang is not None:
            self._found(hang)
        return ()

    def _read_cpu(self, now: float, pid: int) -> None:
        if now - self._cpu_read < min(_CPU_EVERY_S, self._detector.limit_s / _CPU_LOOKS):
            return
        self._cpu_read = now
        with contextlib.suppress(OSError):
            # Without a free descriptor /proc can't be read: the CPU time is then unknown, which is
            # no reason to report a hang.
            self._detector.used_cpu(now, cpu_s(pid))

    def _lost(self, now: float, ranks: Mapping[int, Now], processes: Processes) -> Hang | None:
        """Detect a dead rank whose launcher leaves the others waiting."""
        died = [
            rank
            for rank in processes.gone
            if rank in ranks and ranks[rank].state not in ENDED_STATES
        ]
        if not died:
            self._died = None
            return None
        self._died = now if self._died is None else self._died
        if now - self._died <= self._settings.gone_s:
            return None
        return self._detector.lost(now, ranks, processes, self._settings.gone_s)

    def _found(self, hang: Hang) -> None:
        """Gather evidence and report in a job: locating the culprit takes a moment."""
        self._hang = hang
        who = evidence.subjects(self.context.state, self._ranks)
        output = self._tail.text()
        self.context.jobs.once("hang evidence", lambda: self._gather_and_act(hang, who, output))

    # in a job thread

    def _gather_and_act(self, hang: Hang, who: list[Subject], output: bytes) -> None:
        folder = evidence_folders.folder(self.context.state, self.context.clock.wall(), "hang")
        story = self._story(hang, {}, _elsewhere(hang, who))
        reported = False
        try:
            scene = evidence.Scene(self.context.state, folder, who, self._settings.stack_timeout_s)
            early = [] if who else self._before_init(folder)
            frames = scene.frames()
            blamed = self._with_culprits(hang, scene.behind())
            story = self._story(blamed, frames, _elsewhere(blamed, who))
            if where := evidence_before_init.described(early):
                story["detail"] += f"; at {where}"
            reported = self._report(hang, story)
            had = scene.store(
                {**story, "status": dict(self.context.status())}, output, self.context.redactor
            )
            if had.late is not None:
                self.context.emit(
                    make_finding(
                        "hang_evidence", detail=had.late.detail, ranks=list(had.late.ranks)
                    )
                )
            named = [f"rank {rank}" for rank in had.stacks_of]
            named += [f"pid {place.pid}" for place in early]
            ranks = ", ".join(named) or "no stacks, only other evidence"
            self.context.emit(make_finding("stack_dump", ranks=ranks, path=str(folder)))
            evidence_folders.prune(self.context.state, self.context.config.logs.keep_incidents)
        except OSError as error:
            self.context.emit(not_stored("evidence of the hang", error))
        finally:
            if reported or self._report(hang, story):
                self._act(hang, str(story["detail"]))

    def _with_culprits(self, hang: Hang, behind: tuple[int, ...]) -> Hang:
        """Name `behind` as the culprits if the headers name none. FSDP's forward pass is not a
        phase, so all headers look alike, but the stacks show which ranks the others are waiting
        for."""
        if hang.culprits or not behind:
            return hang
        rest = sorted(self._ranks.keys() - set(behind))
        where = (
            f"the collective that {rank_list(rest)} {'is' if len(rest) == 1 else 'are'} waiting in"
            if rest
            else "any collective, alone on its node"
        )
        detail = f"{rank_list(behind)} outside {where}, for {hang.idle_s:.0f}s"
        return replace(hang, culprits=behind, detail=detail)

    def _before_init(self, folder: Path) -> list[evidence_before_init.Place]:
        """Find the code that the miner's processes are executing while no rank is known; empty if
        no launch is running."""
        launch = self._launch
        if launch is None:
            return []
        return evidence_before_init.places(
            self.context.state, folder, launch.pid, self._settings.stack_timeout_s
        )

    def _story(self, hang: Hang, frames: Mapping[int, str], elsewhere: str) -> dict[str, Any]:
        """The fields of the hang event and of hang.json; `frames` maps each rank to its innermost
        frame in the miner's code. `elsewhere` points to the other nodes, or is empty."""
        named = {
            rank: frames[rank] for rank in hang.culprits or sorted(frames)[:1] if rank in frames
        }
        where = ", ".join(
            frame if len(hang.culprits) == 1 else f"rank {rank}: {frame}"
            for rank, frame in named.items()
        )
        detail = hang.detail + elsewhere + (f"; at {where}" if where else "")
        if self._last_incident:
            detail += f"; before it: INCIDENT {self._last_incident}"
        return {
            "detail": detail,
            "culprits": list(hang.culprits),
            "idle_s": hang.idle_s,
            "limit_s": hang.limit_s,
            "frames": {str(rank): frame for rank, frame in frames.items()},
        }

    def _report(self, hang: Hang, story: Mapping[str, Any]) -> bool:
        """Report the hang; False if it cleared or the miner is being stopped."""
        if self._launch is None or self._hang is not hang:
            return False
        culprits = story["culprits"]
        rank = culprits[0] if len(culprits) == 1 else None
        self.context.emit(make_finding("hang_detected", rank=rank, **story))
        return True

    def _act(self, hang: Hang, detail: str) -> None:
        if self._launch is None:
            return
        if self._hang is not hang:
            # Gathering takes seconds. If the ranks are stepping again, or another launch has
            # replaced this one, leave the miner alone.
            what = "the hang cleared while the guard collected evidence; the miner keeps running"
            self.context.emit(make_finding("hang_evidence", level="info", detail=what, ranks=[]))
        elif hang.finished:
            self.context.control.finish(f"hang at exit: {detail}")
        elif self._settings.action == "restart":
            self.context.control.restart(f"hang: {detail}")
        elif self._settings.action == "stop":
            self.context.control.stop(f"hang: {detail}", CRASH_LOOP)

    def snapshot(self) -> Mapping[str, Any]:
        now = self.context.clock.monotonic()
        watching = bool(self._ranks)
        return HangStatus(
            watching=watching,
            reason=None
            if watching
            else "no rank has reported: the miner does not use the hook or has not called it yet",
            idle_s=round(self._detector.idle_s(now), 1) if watching else None,
            limit_s=round(self._detector.limit_s, 1) if watching else None,
            hang=self._hang.detail if self._hang is not None else None,
        ).to_json()


def _elsewhere(hang: Hang, who: Sequence[Subject]) -> str:
    """Return a hint to look at the other nodes if they run ranks and no rank on this node stands
    out; otherwise an empty string."""
    others = ranks_elsewhere(subject.identity for subject in who)
    if hang.culprits or hang.finished or others <= 0:
        return ""
    return f"; {counted(others, 'rank')} on other nodes: check the guards there for the late rank"
