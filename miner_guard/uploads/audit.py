"""The audit: fetches the files as a validator does, and applies the profile's rules to them."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import os
import re
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miner_guard.config import Config, RepoSettings
from miner_guard.record.events import Event, event
from miner_guard.record.redaction import without_secrets
from miner_guard.uploads import chain
from miner_guard.uploads.chain import commitment_of, configured, keys_of, placeholder
from miner_guard.uploads.repos import Fetch, Look, look_at
from miner_guard.uploads.repos.base import FETCHED_PREFIX
from miner_guard.validators import rules
from miner_guard.validators.facts import (
    Candidate,
    Facts,
    Network,
    Published,
    Verdict,
    fingerprint,
    gradients_key,
    read_inner_step,
    whole,
)
from miner_guard.validators.inspection import inspect_file
from miner_guard.validators.limits import Limits, in_force
from miner_guard.validators.profiles import profile_of
from miner_guard.validators.shapes import Shapes

FETCH_S = 600.0
"""Deadline for fetching everything; gradients.pt may be large."""

MAX_BYTES = 2 * 1024**3
"""The audit skips a larger gradients.pt, because inspecting it takes memory."""

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
    credentials: str = "configured"
    """Which read keys the audit used: `commitment` (those on chain, which validators use) or
    `configured`."""

    read_from: str | None = None
    """The validator version whose rules the audit applied; None without a profile."""

    assumed: tuple[str, ...] = ()
    """What a validator knows and the audit took for granted, each with what would prove it."""

    not_checked: tuple[str, ...] = ()
    """Descriptions of the checks that validators make but an audit cannot."""

    network: tuple[str, ...] = ()
    """The network's own state: whether it pays, by the profile and by the chain; who owns the
    subnet, who sets weights, and how much is burned."""

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "verdicts": [v.as_dict() for v in self.verdicts]}

    def event(self) -> Event:
        """The report as an event."""
        fields = {k: v for k, v in self.as_dict().items() if k != "outcome"}
        if self.outcome == "accepted":
            return event("audit_passed", "info", f"AUDIT PASSED: {self.detail}", **fields)
        if self.outcome == "rejected":
            return event("audit_failed", "critical", f"AUDIT FAILED: {self.detail}", **fields)
        return event("audit_unknown", "warning", f"AUDIT UNKNOWN: {self.detail}", **fields)


def audit_repo(
    config: Config, model: Shapes | None = None, *, checkout: Path | None = None
) -> AuditReport:
    """Read the chain, if one is configured, and audit the repo by the chosen profile. `model`: the
    shapes that the gradients must match. `checkout`: a clone of the validators' code that decides.
    Raises only what loading the profile raises."""
    repo, on, profile = config.repo, config.chain, profile_of(config.miner)
    limits = Limits.of(config.gate, {} if profile is None else profile.limits)
    state = [] if profile is None or profile.unpaid is None else [profile.unpaid]
    network, reading = Network(reason="no [chain] configured"), chain.ChainReading()
    if on.network is not None:
        reading = chain.query(on, limits.master_hotkey)
        network = chain.network_of(
            reading,
            chain.master_state(repo, limits, reading.master_commitment),
            time.monotonic(),
            form=limits.commitment_form,
            per_allreduce=on.blocks_per_allreduce,
        )
        described = None if profile is None else profile.dated
        now = chain.unpaid(reading, described, datetime.date.today())
        state += [*filter(None, [now]), f"chain {chain.summary(reading)}"]
    if profile is not None and not profile.judges and repo.kind == "none":
        words = (
            f"{profile.title}: nothing is published that validators judge; `miner-guard status` "
            "shows the client's state and its age"
        )
        return AuditReport("unknown", words, network=tuple(state))
    report = Audit(repo, limits, network, reading.commitment, model, checkout).report()
    return dataclasses.replace(report, network=tuple(state))


def _sweep() -> None:
    """Remove the folders that killed audits and probes left behind: up to 2 GiB each."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FETCHED_PREFIX}*"):
        # Another audit may be removing its folder at this moment, or the folder belongs to another
        # user.
        with contextlib.suppress(OSError):
            if time.time() - folder.lstat().st_mtime > _ABANDONED_S:
                shutil.rmtree(folder)


@dataclass(frozen=True)
class Audit:
    """One audit and its inputs."""

    repo: RepoSettings
    limits: Limits
    network: Network
    commitment: str | None = None
    """The hotkey's on-chain commitment, if known."""

    model: Shapes | None = None
    checkout: Path | None = None
    start: float = field(default_factory=time.monotonic)

    @functools.cached_property
    def keys(self) -> Mapping[str, str] | None:
        """The read keys committed on chain, with which the audit opens the repo; None if unknown:
        it uses our own."""
        form = self.limits.commitment_form
        return None if self.commitment is None else keys_of(self.commitment, form)

    def report(self, deadline_s: float = FETCH_S) -> AuditReport:
        """Fetch the files that validators fetch, and judge them. Never raises."""
        form = self.limits.commitment_form
        if self.repo.kind == "none":
            words = "no repo is configured; pass the -c that you gave to `run`, or set [repo] kind"
            return self._ended("unknown", "", words)
        if self.keys is not None and placeholder(self.commitment or "", form):
            words = (
                "the on-chain commitment is all x's, so validators find no keys in it; make the "
                "miner commit its keys"
            )
            return self._ended("rejected", "commitment", words)
        try:
            _sweep()
            with tempfile.TemporaryDirectory(prefix=FETCHED_PREFIX) as folder:
                return self._report(folder, deadline_s)
        except OSError as error:
            return self._ended("unknown", "", f"cannot store the files: {error.strerror or error}")

    def _report(self, folder: str, deadline_s: float) -> AuditReport:
        network, limits = self.network, in_force(self.limits, self.network)
        since = network.blocks_since_allreduce
        epoch = rules.epoch_scored(None, network.outer_step, since, limits)
        outer_step = None if epoch is None else epoch.outer_step
        max_bytes = min(limits.gradients_max_bytes or MAX_BYTES, MAX_BYTES)
        look = self.look(Fetch(outer_step, folder, max_bytes), deadline_s)
        published = look.published
        # Without the epoch, only the root metadata is certainly what validators read.
        unseen = {} if epoch is not None else rules.unseen_facts(network, {}, limits)
        setting = "".join(f"; not proven without {words}" for words in unseen)
        if look.damaged is not None:
            outcome = "unknown" if unseen else "rejected"
            return self._ended(outcome, "metadata", look.damaged + setting)
        if published.outer_step is None:
            metadata = published.metadata
            if metadata is not None and "outer_step" in metadata and unseen:
                return self._ended("unknown", "", f"{published.reason}{setting}")
            if published.empty or metadata is not None:
                words = (
                    "nothing is published: metadata.json is missing or contains no outer step; "
                    "upload a revision"
                )
                return self._ended("rejected", "repo_age", words)
            if (why := self._shut_out(look)) is not None:
                return self._ended("rejected", "commitment", why)
            return self._ended("unknown", "", f"could not check: {published.reason}")
        epoch = epoch or rules.epoch_scored(published.outer_step, None, None, limits)
        assert epoch is not None
        return self._judged(look, epoch)

    def look(self, fetch: Fetch, deadline_s: float) -> Look:
        """Fetch the files as a validator does."""
        env: Mapping[str, str] = os.environ
        repo, limits, keys = self.repo, self.limits, self.keys
        if keys is not None and limits.endpoint is not None:
            endpoint = limits.endpoint.format(account=keys["R2_ACCOUNT_ID"])
            repo = dataclasses.replace(repo, endpoint=endpoint)
        # Use the committed keys alone, as a validator does; without them, use our read-only keys.
        if (readers := keys or configured(repo)) is not None:
            env = {**without_secrets(env), **readers}
            repo = dataclasses.replace(repo, credentials="env", credentials_file=None)
        return look_at(repo, fetch=fetch, deadline_s=deadline_s, env=env)

    def inspect(self, file: Path) -> Mapping[str, Any]:
        """The report on the fetched gradients."""
        return inspect_file(file, self.limits, shapes=self.model)

    def _shut_out(self, look: Look) -> str | None:
        """Return why no validator can open the bucket; None if the cause may be our own network."""
        if self.keys is None:
            return None
        if look.refused is not None:
            return (
                f"the keys committed on chain cannot open the bucket ({look.refused}); commit the "
                "keys in use"
            )
        in_use = configured(self.repo)
        if in_use is not None and self.keys["R2_ACCOUNT_ID"] != in_use["R2_ACCOUNT_ID"]:
            return (
                "the account committed on chain is not the one in use and does not respond "
                f"({look.published.reason}); commit again"
            )
        return None

    def _ended(self, outcome: str, rule: str, words: str) -> AuditReport:
        verdicts = () if outcome == "unknown" else (Verdict(rule, "block", None, None, words),)
        return self._made(outcome, words, verdicts)

    def _made(
        self, outcome: str, words: str, verdicts: tuple[Verdict, ...], **more: Any
    ) -> AuditReport:
        return AuditReport(
            outcome,
            words,
            verdicts,
            seconds=round(time.monotonic() - self.start, 2),
            credentials="configured" if self.keys is None else "commitment",
            read_from=self.limits.read_from,
            not_checked=self.limits.not_checked,
            **more,
        )

    def _judged(self, look: Look, epoch: rules.Epoch) -> AuditReport:
        limits = in_force(self.limits, self.network)
        facts = self._facts(look.published, epoch.outer_step, self._inspected(look))
        verdicts = rules.evaluate_all(rules.AUDIT, facts, limits)
        unseen = rules.unseen_facts(self.network, facts.candidate.files or {}, limits)
        outcome = rules.audit_outcome(verdicts, unseen)
        judge = f"rules of {limits.read_from}" if limits.read_from is not None else None
        if self.checkout is not None:
            decided = self._clone_verdict(look, facts, epoch.outer_step)
            verdicts = (decided, *(v for v in verdicts if v.outcome != "block"))
            outcome = rules.audit_outcome((decided,), unseen)
            judge = f"decided by {decided.limit}"
        size = look.published.size_bytes or 0 if self._gradients(look) is not None else 0
        cost = f"{size} bytes in {time.monotonic() - self.start:.1f}s"
        words = rules.audit_detail(outcome, verdicts, epoch=epoch, cost=cost, unseen=unseen)
        return self._made(
            outcome,
            "; ".join(filter(None, (words, judge))),
            verdicts,
            outer_step=epoch.outer_step,
            assumed=rules.assumed_facts(facts, limits),
        )

    def _clone_verdict(self, look: Look, facts: Facts, outer_step: int) -> Verdict:
        """What the clone's own validator says, given what is known and the kindest assumption for
        the rest."""
        from miner_guard.validators import checkout

        assert self.checkout is not None
        rule, clone = "validator", str(self.checkout)
        if self.model is None:
            words = "the validator needs the model's shapes: call `guard.diagnose(model)`"
            return Verdict(rule, "unknown", None, clone, words)
        network, limits = self.network, in_force(self.limits, self.network)
        form = limits.bucket or "{uid}"
        listed = (look.published.config or {}).get("block_list")
        newest = [b for b in listed if isinstance(b, int)] if isinstance(listed, list) else []
        digits = re.search(r"\d+$", self.repo.bucket or "")
        uid = network.uid if network.uid is not None else int(digits[0]) if digits else 0
        commitment = self.commitment or "k" * sum(limits.commitment_form)
        has_epoch = network.outer_step is not None and network.blocks_since_allreduce is not None
        state = checkout.BucketState(
            network_epoch=(network.outer_step or 0) if has_epoch else outer_step,
            blocks_per_allreduce=limits.blocks_per_allreduce or 400,
            blocks_since_allreduce=(network.blocks_since_allreduce or 0) if has_epoch else 10**6,
            block=rules.current_block(network, facts.now) or max(newest, default=0),
            age=rules.age_now(facts.published, facts.now) or 0.0,
            commitment=commitment,
            model=form.partition("-{")[0],
            uid=uid,
            bucket=self.repo.bucket or form.format(uid=uid),
            account=commitment[:32],
            good_keys=(commitment[32:64],),
            objects=dict(look.objects),
            shapes=self.model.of,
        )
        answer = checkout.ask(self.checkout, state)
        if "reason" in answer:
            return Verdict(
                rule, "unknown", None, clone, f"no verdict of {clone}: {answer['reason']}"
            )
        name = f"validator {answer['version']} at {answer['commit']}"
        if answer["accepts"] and answer["worth"] == "something":
            words = "its own functions score the published files"
            return Verdict(rule, "pass", answer["worth"], name, words)
        why = {"nothing": "the score is zero", "nan": "the loss is NaN"}[answer["worth"]]
        words = "; ".join(answer["why"][-3:] or [why])
        words = f"its own functions reject them: {words}"
        return Verdict(rule, "block", answer["worth"], name, words)

    def _gradients(self, look: Look) -> Path | None:
        return look.objects.get(gradients_key(look.published.outer_step or 0))

    def _inspected(self, look: Look) -> Mapping[str, Any]:
        size = look.published.size_bytes
        if size is None:
            key = gradients_key(look.published.outer_step or 0)
            missing = (
                f"{key} does not exist; upload it now, because validators are scoring this epoch"
            )
            return {"problems": [missing], "params": 0}
        if (file := self._gradients(look)) is not None:
            return self.inspect(file)
        max_bytes = self.limits.gradients_max_bytes
        if max_bytes is not None and size > max_bytes:
            problem = f"{size} bytes, more than the plausible maximum of {max_bytes}"
            return {"size_bytes": size, "problems": [problem]}
        return {"size_bytes": size, "reason": f"{size} bytes; an audit fetches at most {MAX_BYTES}"}

    def _facts(self, published: Published, outer_step: int, files: Mapping[str, Any]) -> Facts:
        now, metadata = time.monotonic(), published.metadata
        inner = read_inner_step(metadata)
        named = whole(metadata, "outer_step")
        # The root metadata names the newest step; the epoch that is scored may be the one before,
        # to which its inner step does not apply.
        outer = outer_step if named is None else named
        candidate = Candidate(
            "archive" if inner == 0 and outer == outer_step else "gradient",
            outer,
            inner if inner is not None else 0,
            files=files,
            config=published.config or {},
            metadata=metadata or {},
        )
        missing = published.size_bytes is None
        published = dataclasses.replace(
            published, seen_at=now, inner_step=inner, outer_step=outer_step, empty=missing
        )
        in_use = fingerprint(commitment_of(configured(self.repo)))
        tried = self.keys is not None
        return Facts(candidate, published, self.network, now, in_use, self.repo.bucket, tried)
