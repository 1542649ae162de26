"""The audit: fetches the files as a validator does, and applies the profile's rules to them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miner_guard.config import ChainSettings, RepoSettings
from miner_guard.record.events import Event, event
from miner_guard.record.redaction import without_secrets
from miner_guard.system import probe
from miner_guard.uploads import chain
from miner_guard.uploads.chain import commitment_of, configured, keys_of, placeholder
from miner_guard.validators import rules
from miner_guard.validators.facts import (
    AllReduce,
    Axon,
    Candidate,
    Facts,
    Network,
    Published,
    Verdict,
    fingerprint,
)
from miner_guard.validators.files import Layout, RootMetadata, read_inner_step
from miner_guard.validators.inspection import inspect_file
from miner_guard.validators.limits import Limits, in_force
from miner_guard.validators.shapes import Shapes


@dataclass
class AuditMemory:
    """The last inspected gradients file: a repeated audit does not fetch it again."""

    identity: Mapping[str, Any] | None = None
    """Key, size and checksum, which the storage returns without a download."""

    model: Shapes | None = None
    """The shapes that the file was compared with."""

    report: Mapping[str, Any] = field(default_factory=dict)

    def unchanged(self, model: Shapes | None) -> Mapping[str, Any] | None:
        """Identity of the file that the fetching child can skip."""
        return self.identity if self.model == model else None

    def inspected(
        self, fetched: Mapping[str, Any], model: Shapes | None, report: Mapping[str, Any]
    ) -> None:
        """Remember the report on the fetched file, unless the inspection was inconclusive."""
        if fetched.get("checksum") is not None and report.get("reason") is None:
            self.identity = {name: fetched[name] for name in ("key", "size_bytes", "checksum")}
            self.model, self.report = model, dict(report)


FETCH_S = 600.0
"""Deadline for fetching everything; gradients.pt may be large."""

MAX_BYTES = 2 * 1024**3
"""The audit skips a larger gradients.pt, because inspecting it takes memory."""

_FOLDER = "miner-guard-audit-"
_ABANDONED_S = 6 * 3600.0
"""Age at which a leftover folder counts as abandoned; no audit runs nearly this long."""


@dataclass(frozen=True)
class AuditReport:
    """The result of an audit."""

    outcome: str
    """`accepted`, `rejected`, or `unknown` if the repo could not be read."""

    detail: str
    verdicts: tuple[Verdict, ...] = ()
    outer_step: int | None = None
    seconds: float = 0.0
    fetched_bytes: int = 0
    credentials: str = "configured"
    """Which read keys the audit used: `commitment` (those on chain, which validators use) or
    `configured`."""

    read_from: str | None = None
    """The validator version whose rules the audit applied; None without a profile."""

    not_checked: tuple[str, ...] = ()
    """Descriptions of the checks that validators make but an audit cannot."""

    def as_dict(self) -> dict[str, Any]:
        verdicts = [v.as_dict() for v in self.verdicts]
        return {**vars(self), "verdicts": verdicts, "not_checked": list(self.not_checked)}

    def event(self) -> Event:
        """The report as an event."""
        fields = {k: v for k, v in self.as_dict().items() if k != "outcome"}
        if self.outcome == "accepted":
            return event("audit_passed", "info", f"AUDIT PASSED: {self.detail}", **fields)
        if self.outcome == "rejected":
            return event("audit_failed", "critical", f"AUDIT FAILED: {self.detail}", **fields)
        return event("audit_unknown", "warning", f"AUDIT UNKNOWN: {self.detail}", **fields)


@dataclass(frozen=True)
class FetchChild:
    """How to run the child process that fetches and inspects the files."""

    deadline_s: float = FETCH_S
    python: str = sys.executable


@dataclass(frozen=True)
class AuditInputs:
    """The inputs to an audit other than the repo and the chain."""

    model: Shapes | None = None
    """The shapes that the gradients must match."""

    memory: AuditMemory = field(default_factory=AuditMemory)

    allreduce: AllReduce | None = None
    axon: Axon | None = None


def audit_repo(
    repo: RepoSettings, on: ChainSettings, limits: Limits, inputs: AuditInputs | None = None
) -> AuditReport:
    """Read the chain, if one is configured, and audit the repo accordingly. Never raises."""
    inputs = inputs or AuditInputs()
    if on.network is None:
        return run(repo, limits, Network(reason="no [chain] configured"), inputs=inputs)
    reading = chain.query(on)
    ahead = chain.progress(repo, limits, reading.master_commitment)
    network = chain.network_of(
        reading,
        ahead,
        time.monotonic(),
        form=limits.commitment_form,
        per_allreduce=on.blocks_per_allreduce,
    )
    if limits.alive_timeout_s is not None and reading.reason is None:
        axon = chain.reach(reading.axon, limits.alive_timeout_s)
        inputs = dataclasses.replace(inputs, axon=axon)
    return run(repo, limits, network, reading.commitment, inputs=inputs)


def run(
    repo: RepoSettings,
    limits: Limits,
    network: Network,
    commitment: str | None = None,
    *,
    inputs: AuditInputs | None = None,
    child: FetchChild | None = None,
) -> AuditReport:
    """Audit the repo. `commitment`: the hotkey's on-chain commitment, if known. Never raises."""
    keys = None if commitment is None else keys_of(commitment, limits.commitment_form)
    if repo.kind == "none":
        words = (
            "no repo is configured; pass the -c or --state-dir that you passed to `run`, or set "
            "[repo] kind"
        )
        report = AuditReport("unknown", words)
    elif keys is not None and placeholder(commitment or "", limits.commitment_form):
        words = (
            "the on-chain commitment is all x's, so validators find no keys in it; make the "
            "miner commit its keys"
        )
        verdict = Verdict("commitment", "block", None, None, words)
        report = AuditReport("rejected", words, (verdict,), credentials="commitment")
    else:
        access = _Access(keys, (configured(repo) or {}).get("R2_ACCOUNT_ID"))
        inputs, child = inputs or AuditInputs(), child or FetchChild()
        audit = _Audit(repo, in_force(limits, network), network, access, inputs, child)
        report = audit.report()
    return dataclasses.replace(report, read_from=limits.read_from, not_checked=limits.not_checked)


def _sweep() -> None:
    """Remove the folders that killed audits left behind: up to 2 GiB each."""
    for left in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*"):
        # Another audit may be removing its folder at this moment, or the folder belongs to another
        # user.
        with contextlib.suppress(OSError):
            if time.time() - left.lstat().st_mtime > _ABANDONED_S:
                shutil.rmtree(left)


@dataclass(frozen=True)
class _Access:
    """The read keys that the audit uses to open the repo: those committed on chain, or our own."""

    keys: Mapping[str, str] | None
    """The keys committed on chain; None if unknown."""

    own_account: str | None
    """The account in the settings."""

    @property
    def whose(self) -> str:
        return "configured" if self.keys is None else "commitment"

    def rejected(self, refused: str | None, reason: str | None) -> str | None:
        """Return why no validator can open the bucket; None if the cause may be our own network."""
        if self.keys is None:
            return None
        if refused is not None:
            return (
                f"the keys committed on chain cannot open the bucket ({refused}); commit the keys "
                "in use"
            )
        if self.own_account is not None and self.keys["R2_ACCOUNT_ID"] != self.own_account:
            return (
                "the account committed on chain is not the one in use and does not respond "
                f"({reason}); commit again"
            )
        return None


@dataclass(frozen=True)
class _Audit:
    """One audit and its inputs."""

    repo: RepoSettings
    limits: Limits
    network: Network
    access: _Access
    inputs: AuditInputs
    child: FetchChild
    start: float = field(default_factory=time.monotonic)

    def report(self) -> AuditReport:
        """Fetch the files that validators fetch, and judge them."""
        try:
            _sweep()
            with tempfile.TemporaryDirectory(prefix=_FOLDER) as folder:
                return self._report(folder)
        except OSError as error:
            return self._ended("unknown", "", f"cannot store the files: {error.strerror or error}")

    def _report(self, folder: str) -> AuditReport:
        network, limits = self.network, self.limits
        since = network.blocks_since_allreduce
        epoch = rules.epoch_scored(None, network.outer_step, since, limits)
        answer = self._fetch(folder, None if epoch is None else epoch.outer_step)
        fetched = answer.value if isinstance(answer.value, Mapping) else {}
        refused = fetched.get("refused")
        if refused is not None or answer.reason is not None or not fetched:
            reason = refused or answer.reason or "no answer"
            if (why := self.access.rejected(refused, answer.reason)) is not None:
                return self._ended("rejected", "commitment", why)
            return self._ended("unknown", "", f"could not check: {reason}")
        if (damage := fetched.get("damaged")) is not None:
            return self._ended("rejected", "metadata", damage)
        epoch = epoch or rules.epoch_scored(fetched.get("outer_step"), None, None, limits)
        if epoch is None:
            words = (
                "nothing is published: metadata.json is missing or contains no outer step; "
                "upload a revision"
            )
            return self._ended("rejected", "repo_age", words)
        return self._judged(fetched, epoch)

    def _ended(self, outcome: str, rule: str, words: str) -> AuditReport:
        verdicts = () if outcome == "unknown" else (Verdict(rule, "block", None, None, words),)
        seconds = round(time.monotonic() - self.start, 2)
        whose = self.access.whose
        return AuditReport(outcome, words, verdicts, seconds=seconds, credentials=whose)

    def _judged(self, fetched: Mapping[str, Any], epoch: rules.Epoch) -> AuditReport:
        files = self._inspected(fetched)
        facts = _facts(fetched, epoch.outer_step, self.network, repo=self.repo, files=files)
        facts = dataclasses.replace(
            facts,
            tried=self.access.keys is not None,
            axon=self.inputs.axon,
            allreduce=self.inputs.allreduce,
        )
        verdicts = rules.audit_verdicts(facts, self.limits)
        unseen = rules.unseen_facts(facts, self.limits)
        outcome = rules.audit_outcome(verdicts, unseen)
        seconds = time.monotonic() - self.start
        size = int(fetched.get("fetched_bytes") or 0)
        cost = f"{size} bytes in {seconds:.1f}s"
        words = rules.audit_detail(outcome, verdicts, epoch=epoch, cost=cost, unseen=unseen)
        if self.limits.read_from is not None:
            words += f"; rules of {self.limits.read_from}"
        return AuditReport(
            outcome, words, verdicts, epoch.outer_step, round(seconds, 2), size, self.access.whose
        )

    def _fetch(self, folder: str, outer_step: int | None) -> probe.Answer:
        env: Mapping[str, str] = os.environ
        repo, limits, keys = self.repo, self.limits, self.access.keys
        if keys is not None and limits.endpoint is not None:
            endpoint = limits.endpoint.format(account=keys["R2_ACCOUNT_ID"])
            repo = dataclasses.replace(repo, endpoint=endpoint)
        # Use the committed keys alone, as a validator does; without them, use our read-only keys.
        if (readers := keys or configured(repo)) is not None:
            env = {**without_secrets(env), **readers}
            repo = dataclasses.replace(repo, credentials="env", credentials_file=None)
        request = {
            "repo": dataclasses.asdict(repo),
            "outer_step": outer_step,
            "names": {"uid": self.network.uid},
            "folder": folder,
            "max_bytes": min(limits.gradients_max_bytes or MAX_BYTES, MAX_BYTES),
            "known": self.inputs.memory.unchanged(self.inputs.model),
            "layout": dataclasses.asdict(Layout.of(limits)),
        }
        return probe.ask("miner_guard.uploads.repos.child", request, self.child.deadline_s, env=env)

    def _inspected(self, fetched: Mapping[str, Any]) -> Mapping[str, Any]:
        if fetched.get("empty"):
            key = fetched.get("key")
            missing = (
                f"{key} does not exist; upload it now, because validators are scoring this epoch"
            )
            return {"problems": [missing], "params": 0}
        if fetched.get("unchanged"):
            return self.inputs.memory.report
        size, max_bytes = int(fetched.get("size_bytes") or 0), self.limits.gradients_max_bytes
        if fetched.get("file") is not None:
            path = Path(str(fetched["file"]))
            model = self.inputs.model
            report = inspect_file(path, self.limits, shapes=model, python=self.child.python)
            self.inputs.memory.inspected(fetched, model, report)
            return report
        if max_bytes is not None and size > max_bytes:
            return {
                "size_bytes": size,
                "problems": [f"{size} bytes, more than the plausible maximum of {max_bytes}"],
            }
        return {"size_bytes": size, "reason": f"{size} bytes; an audit fetches at most {MAX_BYTES}"}


def _facts(
    fetched: Mapping[str, Any],
    outer_step: int,
    network: Network,
    *,
    repo: RepoSettings,
    files: Mapping[str, Any],
) -> Facts:
    metadata = fetched.get("metadata")
    inner = read_inner_step(metadata)
    now = time.monotonic()
    published = Published(
        age_s=fetched.get("age_s"),
        reason=None,
        empty=bool(fetched.get("empty")),
        seen_at=now,
        outer_step=outer_step,
        inner_step=inner,
        size_bytes=fetched.get("size_bytes"),
        checksum=fetched.get("checksum"),
        metadata=metadata,
        config=fetched.get("config"),
    )
    named = RootMetadata.of(metadata).outer_step
    # The root metadata names the newest step; the epoch that is scored may be the one before.
    outer = outer_step if named is None else named
    # The root metadata's inner step does not apply to the previous epoch.
    kind = "archive" if inner == 0 and outer == outer_step else "gradient"
    candidate = Candidate(
        kind,
        outer,
        inner if inner is not None else 0,
        files=files,
        config=fetched.get("config") or {},
        metadata=metadata or {},
    )
    in_use = fingerprint(commitment_of(configured(repo)))
    return Facts(candidate, published, network, now, in_use, repo.bucket)
