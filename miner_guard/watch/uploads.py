"""Uploads: reads what is published, tells the gate, verifies reported and printed pushes, and
audits as validators do.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from miner_guard.config import Config
from miner_guard.rank.journal import DecisionEntry, JournalEntry, UploadEntry
from miner_guard.rank.layout import FLAG_FIRST, Now, StepRecord
from miner_guard.record.events import Event, event
from miner_guard.record.section import Section
from miner_guard.record.status_document import (
    NO_REPO,
    ForecastStatus,
    LastAudit,
    LastDecision,
    LastIncident,
    LastRestart,
    LastUpload,
    RepoStatus,
    UploadsStatus,
)
from miner_guard.record.store import (
    Row,
    RunReader,
    RunStore,
    decision_row,
    repo_age_row,
    upload_row,
)
from miner_guard.record.write_errors import WriteOutage
from miner_guard.system.clock import parse_iso_utc
from miner_guard.system.once import OncePer
from miner_guard.uploads import gate
from miner_guard.uploads.chain import commitment_of, configured
from miner_guard.uploads.gate import GateInputs, Watched
from miner_guard.uploads.pushes import (
    DecisionNotifier,
    ForecastWatch,
    Reported,
    RepoWatch,
    note_of,
    verify,
)
from miner_guard.uploads.repos import look_at
from miner_guard.validators.facts import AllReduce, Network, Published, fingerprint
from miner_guard.validators.files import Layout
from miner_guard.validators.limits import Limits
from miner_guard.validators.profiles import chosen, limits_of, network_of
from miner_guard.watch.base import Context, Exit, Monitor
from miner_guard.watch.lines import Patterns, PushLine, patterns, read_push

VERIFY_AFTER_S = (0.0, 3.0, 10.0)
"""Seconds to wait before each check of a push: a mismatch must be seen twice, an unreadable repo
three times."""


@dataclass(frozen=True)
class PendingPush:
    """A push that has not been reported as complete yet."""

    entry: UploadEntry
    at: float | None
    before: Published


@dataclass(frozen=True)
class Push:
    """A reported push that awaits verification."""

    entry: UploadEntry
    began: float | None
    """Monotonic seconds; None if only the end was reported."""

    before: Published | None
    due: float
    checks: int = 0


def steps_of(entry: UploadEntry) -> tuple[int | None, int | None]:
    """Outer and inner step from the tag, else from the entry: a log's last step may be later than
    the pushed one."""
    match = re.search(r"(\d+)\.(\d+)$", entry.tag or "")
    return (int(match[1]), int(match[2])) if match else (entry.outer_step, entry.inner_step)


def took(entry: UploadEntry) -> str:
    """Describe how long the push took. A log shows only when a push ended, not how long it took."""
    seconds = entry.seconds
    return (
        "pushed, according to the miner's log" if seconds is None else f"pushed in {seconds:.1f}s"
    )


def tag_of(entry: UploadEntry) -> str | None:
    """The push's tag, else its outer and inner step; None if neither is known."""
    if entry.tag:
        return entry.tag
    if entry.outer_step is None or entry.inner_step is None:
        return None
    return f"{entry.outer_step}.{entry.inner_step}"


def not_verified(entry: UploadEntry, tag: str | None, why: str) -> Event:
    """The event for a push that only the miner has confirmed."""
    detail = f"{took(entry)}; not verified: {why}"
    return event(
        "upload_reported",
        "info",
        f"UPLOAD REPORTED: tag {tag} {detail}",
        tag=tag,
        detail=detail,
        source="guard",
    )


_WRITE_EVERY_S = 60.0
_AUDITS = {"audit_passed": "accepted", "audit_failed": "rejected", "audit_unknown": "unknown"}
_SHOWN: Mapping[str, type[Section]] = {"decision": LastDecision, "upload": LastUpload}
"""Latest items shown in the status, by their tables in run.db."""

_SHOWN_EVENTS: Mapping[str, tuple[str, type[Section]]] = {
    "incident": ("incident", LastIncident),
    "restart": ("miner_restarting", LastRestart),
}


def _shown_row(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """A row of `decision` or `upload` with the names that the status shows."""
    if "verdicts" not in row:
        return row
    names = {"decision_id": row["id"], "decided_at": row["wall"], "allowed": bool(row["allowed"])}
    return {**row, **names, "note": note_of(json.loads(row["verdicts"]))}


_ROW = ("decision_id", "outer_step", "inner_step", "bytes", "seconds", "attempts", "checksum")
"""Fields of an entry that are copied to its row in the ledger."""


class UploadsMonitor(Monitor):
    """Watches the repo, writes gate-inputs.json, keeps the ledger, and verifies pushes: those that
    a hook reports or, until one does, those that the miner prints."""

    name = "uploads"
    words = frozenset({b"push", b"upload"})

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        config = context.config
        self._repo = config.repo
        self._limits = limits_of(context.config.miner)
        self._layout = Layout.of(Limits.of(config.gate, self._limits))
        self._credentials = fingerprint(commitment_of(configured(config.repo)))
        self._mutex = threading.Lock()
        self._watch = RepoWatch(config.gate)
        self._ahead = ForecastWatch(config.gate, Limits.of(config.gate, self._limits))
        self._voice = DecisionNotifier()
        self._network = Network(
            reason="no [chain] configured" if config.chain.network is None else "not checked yet"
        )
        self._file = (
            RunStore(context.state.db, context.emit, context.clock.monotonic)
            if context.write_row is None
            else None
        )
        self._written_at = self._newest_probe = float("-inf")
        self._outage = WriteOutage("gate-inputs.json", "; the gate treats the repo as unknown")
        self._watched = Watched.of(config)
        self._dead = network_of(config.miner)
        self._began: dict[str, PendingPush] = {}
        self._pushes: list[Push] = []
        self._unsettled: list[UploadEntry] = []
        # With `attach = "log"` the lines already produce entries, as a hook would.
        # With `attach = "log"` the lines already produce entries, as a hook would.
        verifies = self._repo.kind != "none" and self._repo.verify_uploads
        if config.miner.attach == "log" or not verifies:
            self.words = frozenset()
        self._patterns = patterns(config.miner.profile) if self.words else Patterns(())
        self._printed: PushLine | None = None
        self._last: dict[str, Any] = dict.fromkeys(
            ("decision", "upload", "audit", "incident", "restart")
        )
        if self._repo.kind != "none":
            context.jobs.every("repo", self._repo.refresh_every_s, self._refresh, first_after_s=0.0)
        else:
            self._watch.latest = Published(reason=NO_REPO)
        context.jobs.once("gate inputs", self._write_inputs)
        context.jobs.once("recall", self._recall)

    def _recall(self) -> None:
        """Load the latest item of each kind that an earlier guard stored, unless this guard
        already has a newer item."""
        reader = RunReader(self.context.state.db)
        for name, (wanted, kind) in _SHOWN_EVENTS.items():
            for stored in reader.events([wanted], limit=1, newest=True):
                if self._last[name] is None:
                    wall = parse_iso_utc(stored.ts)
                    shown = {**stored.fields, "rank": stored.rank, "wall": wall}
                    self._last[name] = kind.from_json(shown)
        for name, section in _SHOWN.items():
            row = reader.last(name)
            if row is not None and self._last[name] is None:
                self._last[name] = section.from_json(_shown_row(row))

    def _write(self, *rows: Row) -> None:
        if self._file is not None:
            self._file.write(*rows)
        elif self.context.write_row is not None:
            for row in rows:
                self.context.write_row(*row)

    # the repo, in job threads

    def _refresh(self) -> None:
        began = self.context.clock.monotonic()
        self._probed(self._probe(), began)

    def _probe(self) -> Published:
        # Date it by this process's monotonic clock, whatever clock the child used.
        return replace(look_at(self._repo, self._layout), seen_at=self.context.clock.monotonic())

    def _probed(self, published: Published, began: float) -> None:
        clock = self.context.clock
        with self._mutex:
            if began < self._newest_probe:
                # A check that started later, perhaps after a push, has already completed.
                return
            self._newest_probe = began
            events = list(self._watch.observe(published, clock.monotonic()))
        self._write(
            repo_age_row(
                clock.wall(),
                published.age_s,
                outer_step=published.outer_step,
                inner_step=published.inner_step,
                size_bytes=published.size_bytes,
                checksum=published.checksum,
                reason="the repo is empty" if published.empty else published.reason,
            )
        )
        self._write_inputs()
        for each in events:
            self.context.emit(each)

    def _write_inputs(self) -> None:
        clock = self.context.clock
        with self._mutex:
            # Documents can be large, and no gate rule reads their published content.
            content = GateInputs(
                published=replace(self._watch.latest, config=None, metadata=None),
                network=self._network,
                bucket=self._repo.bucket,
                credentials=self._credentials,
                limits=self._limits,
                watched=self._watched,
                written_monotonic=clock.monotonic(),
            )
            self._written_at = clock.monotonic()
            try:
                gate.write(self.context.state.gate_inputs, content)
                event = self._outage.succeeded()
            except OSError as error:
                event = self._outage.failed(error, lost=0)
        if event is not None:
            self.context.emit(event)

    # the ranks

    def on_steps(self, rank: int, steps: Sequence[StepRecord]) -> Iterable[Event]:
        if rank != 0:
            return
        for step in steps:
            with self._mutex:
                age, published = self._watch.age(step.end), self._watch.latest.inner_step
            yield from self._ahead.step(
                step.outer_step,
                step.inner_step,
                step.seconds,
                first=bool(step.flags & FLAG_FIRST),
                age_s=age,
                now=step.end,
                published_inner_step=published,
            )

    def on_entry(self, rank: int, entry: JournalEntry) -> Iterable[Event]:
        if isinstance(entry, DecisionEntry):
            return self._decided(entry.decision)
        if isinstance(entry, UploadEntry):
            self.words = frozenset()
            return self._uploaded(rank, entry)
        return ()

    def _decided(self, document: Mapping[str, Any]) -> Iterator[Event]:
        self._write(decision_row(document))
        note = note_of(document.get("verdicts") or ())
        self._last["decision"] = LastDecision.from_json({**document, "note": note})
        event = self._voice.say(document, self.context.clock.monotonic())
        if event is not None:
            yield event

    def _uploaded(self, rank: int, entry: UploadEntry) -> Iterator[Event]:
        decision = entry.decision_id
        now = self.context.clock.monotonic()
        if entry.phase == "started":
            with self._mutex:
                self._began[decision] = PendingPush(entry, entry.t or now, self._watch.latest)
            yield event(
                "upload_started",
                "info",
                f"UPLOAD STARTED: tag {tag_of(entry)}",
                rank=rank or None,
                tag=tag_of(entry),
            )
            return
        seconds = entry.seconds
        with self._mutex:
            guessed = PendingPush(
                entry, None if seconds is None else now - seconds, self._watch.latest
            )
        begun = self._began.pop(decision, guessed) if decision else guessed
        if entry.phase == "failed":
            self._store(entry, "failed", error=entry.error)
            yield event(
                "upload_failed",
                "error",
                f"UPLOAD FAILED: tag {tag_of(entry)}: {entry.error}",
                rank=rank or None,
                reason=f"tag {tag_of(entry)}: {entry.error}",
            )
            return
        yield from self._reported(entry, begun.at, begun.before)

    def _reported(
        self, entry: UploadEntry, began: float | None, before: Published | None
    ) -> Iterator[Event]:
        if self._repo.kind == "none" or not self._repo.verify_uploads:
            why = (
                "no [repo] is configured"
                if self._repo.kind == "none"
                else "repo.verify_uploads is off"
            )
            self._store(entry, "reported", error=f"not verified: {why}")
            yield not_verified(entry, tag_of(entry), why)
            return
        push = Push(entry, began, before, self.context.clock.monotonic())
        self._unsettled.append(entry)
        # Verify immediately: the next push may follow soon and replace the content to verify.
        self.context.jobs.once("verify upload", lambda: self._verify(push))

    def on_exit(self, end: Exit) -> Iterable[Event]:
        cut, self._began = list(self._began.values()), {}
        for begun in cut:
            why = "the miner exited during the push; the published files may be inconsistent"
            self._store(begun.entry, "failed", error=why)
            yield event(
                "upload_failed",
                "error",
                f"UPLOAD FAILED: tag {tag_of(begun.entry)}: {why}",
                reason=f"tag {tag_of(begun.entry)}: {why}",
            )

    def on_event(self, event: Event) -> Iterable[Event]:
        fields, wall = event.fields, self.context.clock.wall()
        if event.name == "incident":
            self._last["incident"] = LastIncident(str(fields.get("label")), event.rank, wall)
        elif event.name == "miner_restarting":
            self._last["restart"] = LastRestart(fields.get("cause"), fields.get("attempt"), wall)
        elif event.name in _AUDITS:
            outcome = _AUDITS[event.name]
            self._last["audit"] = LastAudit(outcome, fields.get("detail"), wall)
        elif event.name in ("chain_status", "chain_unknown") and isinstance(
            fields.get("network"), Mapping
        ):
            with self._mutex:
                self._network = Network(**fields["network"])
            self.context.jobs.once("gate inputs", self._write_inputs)
        return ()

    def on_lines(self, lines: Sequence[bytes]) -> Iterator[Event]:
        for raw in lines:
            push = read_push(raw.decode("utf-8", "replace"), self._patterns)
            # Several ranks may print the same push.
            if push is not None and (push != self._printed or push.tag is None):
                self._printed = push
                yield from self._read(push)

    def _read(self, push: PushLine) -> Iterator[Event]:
        """Report and store a push known only from the miner's line."""
        entry = UploadEntry(phase="finished", tag=push.tag)
        if push.error is not None:
            reason = f"the miner says: {push.error}"
            self._store(entry, "failed", error=reason)
            yield event("upload_failed", "error", f"UPLOAD FAILED: {reason}", reason=reason)
            return
        detail = "according to the miner's log"
        yield event(
            "upload_reported",
            "info",
            f"UPLOAD REPORTED: tag {push.tag} {detail}",
            tag=push.tag,
            detail=detail,
            source="log",
        )
        with self._mutex:
            before = self._watch.latest
        yield from self._reported(entry, None, before)

    def on_tick(self, now: float, ranks: Mapping[int, Now]) -> Iterable[Event]:
        with self._mutex:
            events = list(self._watch.tick(now))
            ready = [push for push in self._pushes if push.due <= now]
            self._pushes = [push for push in self._pushes if push.due > now]
            rewrite = now - self._written_at >= min(
                _WRITE_EVERY_S, self.context.config.gate.inputs_max_age_s / 3
            )
            self._written_at = now if rewrite else self._written_at
        if rewrite:
            self.context.jobs.once("gate inputs", self._write_inputs)
        for push in ready:
            self.context.jobs.once("verify upload", lambda push=push: self._verify(push))  # type: ignore[misc]
        return events

    # verification, in job threads

    def _verify(self, push: Push) -> None:
        began = self.context.clock.monotonic()
        published = self._probe()
        entry, now = push.entry, self.context.clock.monotonic()
        since = None if push.began is None else now - push.began
        reported = Reported(*steps_of(entry), since, tag_of(entry), entry.bytes, entry.checksum)
        result = verify(push.before, published, reported)
        checks = push.checks + 1
        if (
            not result.superseded
            and checks < (2 if result.verified is False else len(VERIFY_AFTER_S))
            and not result.verified
        ):
            with self._mutex:
                self._pushes.append(replace(push, due=now + VERIFY_AFTER_S[checks], checks=checks))
            return
        self._probed(published, began)
        self._unsettled.remove(entry)
        tag = tag_of(entry) or published.revision
        if result.verified:
            self._store(
                entry,
                "verified",
                verified=self.context.clock.wall(),
                checksum=published.checksum,
                bytes=entry.bytes if published.size_bytes is None else published.size_bytes,
            )
            detail = f"{result.detail}, {took(entry)}"
            self.context.emit(
                event(
                    "upload_succeeded",
                    "info",
                    f"UPLOAD VERIFIED: tag {tag} {detail}",
                    tag=tag,
                    detail=detail,
                )
            )
        elif result.superseded:
            self._store(entry, "superseded", error=result.detail)
            self.context.emit(not_verified(entry, tag, result.detail))
        elif result.verified is None:
            self._store(entry, "reported", error=result.detail)
            self.context.emit(
                event(
                    "upload_unverified",
                    "warning",
                    f"UPLOAD UNVERIFIED: tag {tag}: reported as pushed, but {result.detail}",
                    tag=tag,
                    reason=f"reported as pushed, but {result.detail}",
                )
            )
        else:
            self._store(entry, "refuted", error=result.detail, checksum=published.checksum)
            reason = f"reported as pushed, but {result.detail} (tag {tag}). Upload again"
            self.context.emit(
                event("upload_failed", "error", f"UPLOAD FAILED: {reason}", reason=reason)
            )

    def _store(self, entry: UploadEntry, outcome: str, **more: Any) -> None:
        row = (
            {name: getattr(entry, name) for name in _ROW}
            | {"tag": tag_of(entry), "kind": entry.kind}
            | more
        )
        wall = self.context.clock.wall()
        shown = {**row, "outcome": outcome, "wall": wall}
        self._last["upload"] = LastUpload.from_json(shown)
        self._write(upload_row(wall, outcome, **row))

    def on_stop(self) -> Iterable[Event]:
        for entry in list(self._unsettled):
            why = "the guard ended before the push was checked; see `miner-guard audit`"
            self._store(entry, "reported", error=f"not verified: {why}")
            yield event(
                "upload_unverified",
                "warning",
                f"UPLOAD UNVERIFIED: tag {tag_of(entry)}: {why}",
                tag=tag_of(entry),
                reason=why,
            )
        if self._file is not None:
            self._file.close()

    def snapshot(self) -> Mapping[str, Any]:
        now = self.context.clock.monotonic()
        with self._mutex:
            age, latest, ahead = self._watch.age(now), self._watch.latest, self._ahead.latest
            return UploadsStatus(
                repo_age_s=None if age is None else round(age),
                repo=RepoStatus(
                    age_s=None if age is None else round(age),
                    reason=latest.reason,
                    empty=latest.empty,
                    revision=latest.revision,
                    outer_step=latest.outer_step,
                    inner_step=latest.inner_step,
                    due=age is not None and age > self.context.config.gate.repo_age_target_s,
                    stale=self._watch.is_stale(now),
                    limit_s=self.context.config.gate.repo_age_limit_s,
                ),
                forecast=None
                if ahead is None
                else ForecastStatus(**asdict(ahead), late=ahead.late),
                network=self._dead,
                pending=len(self._pushes),
                **self._last,
            ).to_json()


if TYPE_CHECKING:
    from miner_guard.uploads.audit import AuditInputs, AuditReport

_EVERY_S = 600.0
_REPEAT_S = 3600.0
"""How long to log an unchanged verdict only at debug level."""


class AuditMonitor(Monitor):
    """Runs the audits. Inactive without a repo, or if `[repo] audit_every_s` is 0."""

    name = "audit"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        config = context.config
        self._limits = Limits.of(config.gate, limits_of(config.miner))
        self._inputs: AuditInputs | None = None
        self._allreduce: AllReduce | None = None
        self._running = threading.Lock()
        self._reports = OncePer(_REPEAT_S)
        self._every_s = interval_s(config)
        if self._every_s > 0:
            context.jobs.every("audit", self._every_s, self._audit)

    def on_event(self, event: Event) -> Iterable[Event]:
        if event.name == "upload_succeeded" and self._every_s > 0:
            self.context.jobs.once("audit", self._audit)
        elif event.name == "allreduce_ended":
            self._allreduce = allreduce_of(event.fields)
        return ()

    def _audit(self) -> None:
        # If an audit is still running, it or the next scheduled one covers the push.
        if not self._running.acquire(blocking=False):
            return
        try:
            report = self._report()
        finally:
            self._running.release()
        event = report.event()
        blocked = tuple(v.rule for v in report.verdicts if v.outcome == "block")
        new = self._reports.ask(self.context.clock.monotonic(), (report.outcome, blocked))
        self.context.emit(event if new else event.at("debug"))

    def _report(self) -> AuditReport:
        # Import late: a guard that audits nothing does not need the rules.
        from miner_guard.uploads import audit
        from miner_guard.validators import shapes

        config = self.context.config
        if self._inputs is None:
            self._inputs = audit.AuditInputs()
        model = shapes.read(self.context.state.shapes)
        inputs = replace(self._inputs, model=model, allreduce=self._allreduce)
        return audit.audit_repo(config.repo, config.chain, self._limits, inputs)


def interval_s(config: Config) -> float:
    """Seconds between audits; 0 if audits are off."""
    if config.repo.kind == "none":
        return 0.0
    if config.repo.audit_every_s is not None:
        return config.repo.audit_every_s
    return _EVERY_S if chosen(config.miner) is not None else 0.0


def allreduce_of(fields: Any) -> AllReduce:
    """Return how an AllReduce ended. `fields` are those of its event, or the `swarm` monitor's
    section of the status."""
    failed = fields.get("reason") is not None
    return AllReduce(str(fields["reason"]) if failed else None)
