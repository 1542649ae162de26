"""The gate: may this upload go out?

Pure and standard library only: it runs inside rank 0, and `miner-guard gate` asks the same
function. What it knows of the outside world is in gate-inputs.json, which the guard replaces
atomically. If the file is unreadable or invalid, its content counts as unknown, with the reason;
the gate never fails because of it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from miner_guard.config import GateSettings
from miner_guard.state_dir import finite, read_regular, write_atomic
from miner_guard.validators import rules
from miner_guard.validators.facts import (
    Candidate,
    Decision,
    Facts,
    Network,
    Published,
    Verdict,
    worst,
)
from miner_guard.validators.limits import Limits, in_force

_MAX_LENGTH = 240
"""Maximum length of a sentence in characters: a decision goes to every rank with all its verdicts,
and shares the journal with everything else that must not be lost."""


# what the gate knows


INPUTS_MAX_AGE_S = 300.0
"""Older facts about the repo and the network in gate-inputs.json count as unknown."""


@dataclass(frozen=True)
class GateInputs:
    """The content of gate-inputs.json; everything is unknown if the file does not exist."""

    published: Published = field(default_factory=Published)
    network: Network = field(default_factory=Network)
    bucket: str | None = None
    credentials: str | None = None
    """Fingerprint of the commitment that the credentials in use would produce."""

    limits: Mapping[str, Any] = field(default_factory=dict)
    """The profile's `[limits]`, which the rules read."""

    written_monotonic: float | None = None
    reason: str | None = None
    """Why the content is unknown; None if the file was read completely."""

    def aged(self, now: float) -> GateInputs:
        """Mark the repo and the network as unknown if, at `now` (monotonic), the file is older than
        `INPUTS_MAX_AGE_S`."""
        if self.reason is not None or self.written_monotonic is None:
            return self
        age = now - self.written_monotonic
        if 0 <= age <= INPUTS_MAX_AGE_S:
            return self
        if age < 0:
            reason = "gate-inputs.json was written before this host's last boot"
        else:
            reason = (
                f"gate-inputs.json is {age:.0f}s old (limit {INPUTS_MAX_AGE_S:.0f}s): is the guard "
                "running?"
            )
        return replace(
            self, published=Published(reason=reason), network=Network(reason=reason), reason=reason
        )


def unknown(reason: str) -> GateInputs:
    """Inputs with everything unknown."""
    return GateInputs(
        published=Published(reason=reason), network=Network(reason=reason), reason=reason
    )


def write(path: Path, inputs: GateInputs) -> None:
    """Replace the file. Raises OSError."""
    write_atomic(path, json.dumps(finite(asdict(inputs)), separators=(",", ":")) + "\n")


def read(path: Path) -> GateInputs:
    """The file's content; `reason` says what is wrong with it. Never raises.

    Does not reread an unchanged file: training asks the gate at every step.
    """
    global _last_read
    try:
        stat = os.stat(path)
    except FileNotFoundError:
        return unknown("gate-inputs.json does not exist: no guard has written it")
    except OSError as error:
        return unknown(f"gate-inputs.json cannot be read: {error}")
    version = (str(path), stat.st_ino, stat.st_mtime_ns, stat.st_size)
    # Read the tuple once and assign it once, so that other threads never see a mixed pair.
    last = _last_read
    if last is not None and last[0] == version:
        return last[1]
    inputs = _read_now(path)
    _last_read = (version, inputs)
    return inputs


_last_read: tuple[tuple[str, int, int, int], GateInputs] | None = None


def _read_now(path: Path) -> GateInputs:
    try:
        document = json.loads(read_regular(path))
        published = Published(**document.pop("published", {}))
        return GateInputs(published, Network(**document.pop("network", {})), **document)
    except OSError as error:
        return unknown(f"gate-inputs.json cannot be read: {error}")
    except (ValueError, RecursionError):
        return unknown("gate-inputs.json is torn or not JSON")
    except (AttributeError, TypeError) as error:
        return unknown(f"gate-inputs.json was written by a different version: {error}")


# the decision


def decide(
    candidate: Candidate, inputs: GateInputs, settings: GateSettings, *, now: float, wall: float
) -> Decision:
    """Judge a candidate at `now` (monotonic) and `wall`. Never raises: if a rule
    raises, the upload is blocked, with the error as the reason."""
    age, limits = None, Limits()
    current = inputs.aged(now)
    published, network = current.published, current.network
    try:
        facts = Facts(candidate, published, network, now, current.credentials, current.bucket)
        limits = in_force(Limits.of(settings, current.limits), network)
        age = rules.age_now(published, now)
        verdicts = rules.evaluate_all(rules.GATE, facts, limits)
    except Exception as error:  # noqa: BLE001 -- an error in the gate must block every rank, not raise in rank 0
        verdicts = (rules.rule_error("gate", error),)
    verdicts = tuple(map(_brief, verdicts))
    blocks = [v for v in verdicts if v.outcome == "block"]
    shadow = worst(verdicts) == "block" and settings.mode == "shadow"
    question = f"{candidate.kind} {candidate.outer_step} {candidate.inner_step} {wall}"
    return Decision(
        allowed=not blocks or shadow,
        kind=candidate.kind,
        outer_step=candidate.outer_step,
        inner_step=candidate.inner_step,
        reason=_reason(verdicts, blocks, shadow),
        verdicts=verdicts,
        due=published.empty or (age is not None and age > limits.repo_age_target_s),
        stale=age is not None and age > limits.repo_age_limit_s,
        shadow=shadow,
        retry_after_steps=max(
            (v.retry_after_steps for v in blocks if v.retry_after_steps is not None), default=None
        ),
        retry_after_s=max(
            (v.retry_after_s for v in blocks if v.retry_after_s is not None), default=None
        ),
        decided_at=wall,
        decision_id=hashlib.sha256(question.encode()).hexdigest()[:16],
    )


def _brief(verdict: Verdict) -> Verdict:
    value = verdict.seen
    if isinstance(value, (str, list)):
        value = value[:80] if isinstance(value, str) else [str(v)[:40] for v in value[:12]]
    return replace(verdict, seen=value, sentence=verdict.sentence[:_MAX_LENGTH])


def _reason(verdicts: Sequence[Verdict], blocks: Sequence[Verdict], shadow: bool) -> str:
    if blocks:
        words = "; ".join(v.sentence for v in blocks)
        return f"shadow mode, would be blocked: {words}" if shadow else words
    order = ("warn", "pass", "unknown")
    telling = sorted(verdicts, key=lambda v: order.index(v.outcome))
    return "; ".join(
        f"warning: {v.sentence}" if v.outcome == "warn" else v.sentence for v in telling
    )


def due(inputs: GateInputs, settings: GateSettings, now: float) -> bool:
    """Return whether the published files are known to be past their target age at `now`
    (monotonic)."""
    published = inputs.aged(now).published
    age = rules.age_now(published, now)
    return published.empty or (age is not None and age > settings.repo_age_target_s)
