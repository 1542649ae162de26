"""Uploads: reads what is published, tells the gate, verifies reported and printed pushes, and
audits as validators do.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from miner_guard.config import Config
from miner_guard.rank.journal import DecisionEntry, JournalEntry, UploadEntry
from miner_guard.rank.layout import FLAG_FIRST, Now, StepRecord
from miner_guard.record.events import Event, WriteOutage, event
from miner_guard.record.status_document import (
    NO_JUDGE,
    NO_REPO,
    LastAudit,
    LastDecision,
    LastIncident,
    LastUpload,
    RepoStatus,
    Section,
    StatusDocument,
    UploadsStatus,
)
from miner_guard.record.store import RunReader, decision_row, upload_row
from miner_guard.system.clock import OncePer, parse_iso_utc
from miner_guard.uploads import gate
from miner_guard.uploads.chain import commitment_of, configured
from miner_guard.uploads.gate import INPUTS_MAX_AGE_S, GateInputs
from miner_guard.uploads.pushes import (
    DecisionNotifier,
    ForecastWatch,
    Reported,
    RepoWatch,
    note_of,
    verify,
)
from miner_guard.uploads.repos import look_at
from miner_guard.validators.facts import Network, Published, fingerprint
from miner_guard.validators.profiles import chosen, profile_of
from miner_guard.watch.base import Context, Exit, Monitor
from miner_guard.watch.lines import PushLine, patterns, read_push

VERIFY_AFTER_S = (0.0, 3.0, 10.0)
"""Seconds to wait before each check of a push: a mismatch must be seen twice, an unreadable repo
three times."""


@dataclass(eq=False)
class Push:
    """A push that has begun or has been reported, until its outcome is stored."""

    entry: UploadEntry
    began: float | None
    """Monotonic seconds; None if only the end was reported."""

    before: Published
    """The repo before the push."""

    due: float | None = None
    """When to check it; None while it is running, infinity during a check."""

    checks: int = 0

    @property
    def tag(self) -> str | None:
        """The push's tag, else its outer and inner step; None if neither is known."""
        entry = self.entry
        if entry.tag:
            return entry.tag
        if entry.outer_step is None or entry.inner_step is None:
            return None
        return f"{entry.outer_step}.{entry.inner_step}"

    @property
    def reported(self) -> Reported:
        """What the repo must show, without the push's age. The steps of the tag count: a log's last
        step may be later than the pushed one."""
        entry, match = self.entry, re.search(r"(\d+)\.(\d+)$", self.entry.tag or "")
        steps = (entry.outer_step, entry.inner_step)
        outer, inner = (int(match[1]), int(match[2])) if match else steps
        return Reported(outer, inner, None, entry.checksum)

    @property
    def took(self) -> str:
        """How long the push took. A log shows only when it ended."""
        seconds = self.entry.seconds
        if seconds is None:
            return "pushed, according to the miner's log"
        return f"pushed in {seconds:.1f}s"


_WRITE_EVERY_S = 60.0
_AUDITS = {"audit_passed": "accepted", "audit_failed": "rejected", "audit_unknown": "unknown"}
_SHOWN_ROWS: Mapping[str, type[Section]] = {"decision": LastDecision, "upload": LastUpload}
"""Latest items shown in the status, by their tables in run.db."""

_ENTRY = ("decision_id", "outer_step", "inner_step", "bytes", "seconds", "attempts", "checksum")
"""Fields of an entry that are copied to its row."""


class UploadsMonitor(Monitor):
    """Watches the repo, writes gate-inputs.json, stores decisions and uploads, and verifies pushes:
    those that a hook reports or, until one does, those that the miner prints."""

    name = "uploads"
    words = frozenset({b"push", b"upload"})

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        config = context.config
        self._repo = config.repo
        profile = profile_of(config.miner)
        self._limits = {} if profile is None else profile.limits
        self._credentials = fingerprint(commitment_of(configured(config.repo)))
        self._mutex = threading.Lock()
        self._watch = RepoWatch(config.gate)
        self._ahead = ForecastWatch(config.gate)
        self._voice = DecisionNotifier()
        self._network = Network(
            reason="no [chain] configured" if config.chain.network is None else "not checked yet"
        )
        self._written_at = self._newest_probe = float("-inf")
        self._outage = WriteOutage("gate-inputs.json", "; the gate treats the repo as unknown")
        self._unpaid = None if profile is None else profile.unpaid
        self._pushes: list[Push] = []
        watched = self._repo.kind != "none"
        # With `attach = "log"` the lines already produce entries, as a hook would.
        if config.miner.attach == "log" or not watched:
            self.words = frozenset()
        self._patterns = patterns(config.miner.profile) if self.words else ()
        self._printed: PushLine | None = None
        self._last: dict[str, Section] = {}
        """The latest item of each kind, for the status; run.db holds all of them."""

        if watched:
            context.jobs.every("repo", self._repo.refresh_every_s, self._refresh, first_after_s=0.0)
        else:
            judged = profile is None or profile.judges
            self._watch.latest = Published(reason=NO_REPO if judged else NO_JUDGE)
        context.jobs.once("gate inputs", self._write_inputs)
        context.jobs.once("recall", self._recall)

    def _recall(self) -> None:
        """Load the latest item of each kind that an earlier guard stored, unless this guard
        already has a newer item."""
        reader = RunReader(self.context.state.db)
        for stored in reader.events(["incident"], min_level="warning", limit=1, newest=True):
            incident = {**stored.fields, "rank": stored.rank, "wall": parse_iso_utc(stored.ts)}
            self._last.setdefault("incident", LastIncident.from_json(incident))
        for name, section in _SHOWN_ROWS.items():
            if (row := reader.last(name)) is not None:
                if name == "decision":
                    verdicts = json.loads(row["verdicts"])
                    row |= {"decision_id": row["id"], "decided_at": row["wall"]}
                    row |= {
                        "allowed": bool(row["allowed"]),
                        "note": note_of({"verdicts": verdicts}),
                    }
                self._last.setdefault(name, section.from_json(row))

    # the repo, in job threads

    def _refresh(self) -> None:
        began = self.context.clock.monotonic()
        self._probed(self._probe(), began)

    def _probe(self) -> Published:
        # Date it by this process's monotonic clock, whatever clock the child used.
        published = look_at(self._repo).published
        return replace(published, seen_at=self.context.clock.monotonic())

    def _probed(self, published: Published, began: float) -> None:
        clock = self.context.clock
        with self._mutex:
            if began < self._newest_probe:
                # A check that started later, perhaps after a push, has already completed.
                return
            self._newest_probe = began
            events = list(self._watch.observe(published, clock.monotonic()))
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
                written_monotonic=clock.monotonic(),
            )
            self._written_at = clock.monotonic()
            try:
                gate.write(self.context.state.gate_inputs, content)
                event = self._outage.succeeded()
            except OSError as error:
                event = self._outage.failed(error)
        if event is not None:
            self.context.emit(event)

    # the ranks

    def on_steps(self, rank: int, steps: Sequence[StepRecord]) -> Iterable[Event]:
        for step in steps if rank == 0 else ():
            with self._mutex:
                age = self._watch.age(step.end)
            yield from self._ahead.step(
                step.outer_step,
                step.inner_step,
                step.seconds,
                first=bool(step.flags & FLAG_FIRST),
                age_s=age,
                now=step.end,
            )

    def on_entry(self, rank: int, entry: JournalEntry) -> Iterable[Event]:
        if isinstance(entry, DecisionEntry):
            return self._decided(entry.decision)
        if isinstance(entry, UploadEntry):
            self.words = frozenset()
            return self._uploaded(rank, entry)
        return ()

    def _decided(self, document: Mapping[str, Any]) -> Iterator[Event]:
        self.context.write_row(*decision_row(document))
        document = {**document, "note": note_of(document, self._ahead.step_s)}
        self._last["decision"] = LastDecision.from_json(document)
        event = self._voice.say(document, self.context.clock.monotonic())
        if event is not None:
            yield event

    def _uploaded(self, rank: int, entry: UploadEntry) -> Iterator[Event]:
        now = self.context.clock.monotonic()
        if entry.phase == "started":
            with self._mutex:
                self._pushes.append(Push(entry, entry.t or now, self._watch.latest))
            return
        push = self._take(entry, now)
        if entry.phase == "failed":
            yield self._failed(push, str(entry.error), rank=rank or None)
        else:
            yield from self._check_later(push)

    def _take(self, entry: UploadEntry, now: float) -> Push:
        """The push whose end `entry` reports; it leaves the list."""
        with self._mutex:
            for push in self._pushes:
                if push.due is None and push.entry.decision_id == entry.decision_id != "":
                    self._pushes.remove(push)
                    return replace(push, entry=entry)
            began = None if entry.seconds is None else now - entry.seconds
            return Push(entry, began, self._watch.latest)

    def _failed(self, push: Push, why: str, *, rank: int | None = None) -> Event:
        self._store(push, "failed", error=why)
        return _upload_failed(f"tag {push.tag}: {why}", rank)

    def _check_later(self, push: Push) -> Iterator[Event]:
        if self._repo.kind == "none":
            yield self._unchecked(push, push.tag, "no [repo] is configured")
            return
        with self._mutex:
            push.due = float("inf")
            self._pushes.append(push)
        # Verify immediately: the next push may follow soon and replace the content to verify.
        self.context.jobs.once("verify upload", lambda: self._verify(push))

    def _unchecked(self, push: Push, tag: str | None, why: str, outcome: str = "reported") -> Event:
        """Store a push that only the miner has confirmed."""
        self._store(push, outcome, error=f"not verified: {why}")
        detail = f"{push.took}; not verified: {why}"
        text = f"UPLOAD REPORTED: tag {tag} {detail}"
        return event("upload_unverified", "info", text, tag=tag, detail=detail, source="guard")

    def on_exit(self, end: Exit) -> Iterable[Event]:
        with self._mutex:
            cut = [push for push in self._pushes if push.due is None]
            self._pushes = [push for push in self._pushes if push.due is not None]
        why = "the miner exited during the push; the published files may be inconsistent"
        return [self._failed(push, why) for push in cut]

    def on_event(self, event: Event) -> Iterable[Event]:
        fields, wall = event.fields, self.context.clock.wall()
        if event.name == "incident" and event.level != "info":
            self._last["incident"] = LastIncident(fields.get("label"), event.rank, wall)
        elif (outcome := _AUDITS.get(event.name)) is not None:
            self._last["audit"] = LastAudit(outcome, fields.get("detail"), wall)
        elif isinstance(fields.get("network"), Mapping):
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

    def _read(self, line: PushLine) -> Iterator[Event]:
        """Report and store a push known only from the miner's line."""
        with self._mutex:
            push = Push(UploadEntry(phase="finished", tag=line.tag), None, self._watch.latest)
        if line.error is not None:
            reason = f"the miner says: {line.error}"
            self._store(push, "failed", error=reason)
            yield _upload_failed(reason)
            return
        detail = "according to the miner's log"
        text = f"UPLOAD REPORTED: tag {line.tag} {detail}"
        yield event("upload_unverified", "info", text, tag=line.tag, detail=detail, source="log")
        yield from self._check_later(push)

    def on_tick(self, now: float, ranks: Mapping[int, Now]) -> Iterable[Event]:
        with self._mutex:
            events = list(self._watch.tick(now))
            ready = [push for push in self._pushes if push.due is not None and push.due <= now]
            for push in ready:
                push.due = float("inf")
            limit = min(_WRITE_EVERY_S, INPUTS_MAX_AGE_S / 3)
            rewrite = now - self._written_at >= limit
            self._written_at = now if rewrite else self._written_at
        if rewrite:
            self.context.jobs.once("gate inputs", self._write_inputs)
        for push in ready:
            self.context.jobs.once("verify upload", lambda push=push: self._verify(push))  # type: ignore[misc]
        return events

    # verification, in job threads

    def _verify(self, push: Push) -> None:
        clock = self.context.clock
        began = clock.monotonic()
        published, now = self._probe(), clock.monotonic()
        since = None if push.began is None else now - push.began
        result = verify(push.before, published, replace(push.reported, since_start_s=since))
        push.checks += 1
        enough = 2 if result.verified is False else len(VERIFY_AFTER_S)
        if not (result.verified or result.superseded) and push.checks < enough:
            push.due = now + VERIFY_AFTER_S[push.checks]
            return
        with self._mutex:
            if push not in self._pushes:
                # The guard is ending and has reported the push as unverified.
                return
            self._pushes.remove(push)
        self._probed(published, began)
        tag = push.tag or published.revision
        if result.superseded:
            self.context.emit(self._unchecked(push, tag, result.detail, "superseded"))
        elif result.verified:
            size = push.entry.bytes if published.size_bytes is None else published.size_bytes
            content = {"checksum": published.checksum, "bytes": size}
            self._store(push, "verified", verified=clock.wall(), **content)
            detail = f"{result.detail}, {push.took}"
            text = f"UPLOAD VERIFIED: tag {tag} {detail}"
            took_s = push.entry.seconds
            self.context.emit(
                event("upload_succeeded", "info", text, tag=tag, detail=detail, took_s=took_s)
            )
        elif result.verified is None:
            self.context.emit(self._unverified(push, f"reported as pushed, but {result.detail}"))
        else:
            self._store(push, "refuted", error=result.detail, checksum=published.checksum)
            reason = f"reported as pushed, but {result.detail} (tag {tag}). Upload again"
            self.context.emit(_upload_failed(reason))

    def _unverified(self, push: Push, why: str) -> Event:
        self._store(push, "reported", error=why)
        text = f"UPLOAD UNVERIFIED: tag {push.tag}: {why}"
        return event("upload_unverified", "warning", text, tag=push.tag, reason=why)

    def _store(self, push: Push, outcome: str, **more: Any) -> None:
        entry, wall = push.entry, self.context.clock.wall()
        row = {name: getattr(entry, name) for name in _ENTRY}
        row |= {"kind": entry.upload_kind, "tag": push.tag, **more}
        self._last["upload"] = LastUpload.from_json({**row, "outcome": outcome, "wall": wall})
        self.context.write_row(*upload_row(wall, outcome, **row))

    def on_stop(self) -> Iterable[Event]:
        why = "the guard ended before the push was checked; see `miner-guard audit`"
        with self._mutex:
            unchecked, self._pushes = [push for push in self._pushes if push.due is not None], []
        return [self._unverified(push, why) for push in unchecked]

    def snapshot(self) -> Mapping[str, Any]:
        now, settings = self.context.clock.monotonic(), self.context.config.gate
        with self._mutex:
            age, latest = self._watch.age(now), self._watch.latest
            pending = sum(push.due is not None for push in self._pushes)
            rounded = None if age is None else round(age)
            last: Any = self._last
            return UploadsStatus(
                repo=RepoStatus(
                    age_s=rounded,
                    reason=latest.reason,
                    empty=latest.empty,
                    revision=latest.revision,
                    outer_step=latest.outer_step,
                    inner_step=latest.inner_step,
                    due=age is not None and age > settings.repo_age_target_s,
                    stale=self._watch.is_stale(now),
                    limit_s=settings.repo_age_limit_s,
                ),
                min_inner_step=self._ahead.minimum,
                network=self._unpaid,
                pending=pending,
                **last,
            ).to_json()


def _upload_failed(reason: str, rank: int | None = None) -> Event:
    return event("upload_failed", "error", f"UPLOAD FAILED: {reason}", rank=rank, reason=reason)


_EVERY_S = 600.0
_REPEAT_S = 3600.0
"""How long to log an unchanged verdict only at debug level."""


class AuditMonitor(Monitor):
    """Runs the audits. Inactive without a repo, or if `[repo] audit_every_s` is 0."""

    name = "audit"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        config = context.config
        self._running = threading.Lock()
        self._reports = OncePer(_REPEAT_S)
        self._every_s = interval_s(config)
        if self._every_s > 0:
            context.jobs.every("audit", self._every_s, self._audit_published)

    def on_event(self, event: Event) -> Iterable[Event]:
        if event.name == "upload_succeeded" and self._every_s > 0:
            self.context.jobs.once("audit", self._audit)
        return ()

    def _audit_published(self) -> None:
        """Audit, unless nothing was ever published: then there is nothing to reject yet."""
        uploads = StatusDocument.from_json(self.context.status()).uploads
        sent = uploads.upload is not None and uploads.upload.outcome == "verified"
        if sent or not uploads.repo.empty or uploads.repo.age_s is not None:
            self._audit()

    def _audit(self) -> None:
        # Import late: a guard that audits nothing does not need the rules.
        from miner_guard.uploads.audit import audit_repo
        from miner_guard.validators import shapes

        # If an audit is still running, it or the next scheduled one covers the push.
        if not self._running.acquire(blocking=False):
            return
        try:
            report = audit_repo(self.context.config, shapes.read(self.context.state.shapes))
        finally:
            self._running.release()
        event = report.event()
        blocked = tuple(v.rule for v in report.verdicts if v.outcome == "block")
        new = self._reports.ask(self.context.clock.monotonic(), (report.outcome, blocked))
        self.context.emit(event if new else event.at("debug"))


def interval_s(config: Config) -> float:
    """Seconds between audits; 0 if audits are off."""
    if config.repo.kind == "none":
        return 0.0
    if config.repo.audit_every_s is not None:
        return config.repo.audit_every_s
    return _EVERY_S if chosen(config.miner) is not None else 0.0
