"""The guard's view of the chain: each query runs in a child with a deadline."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from miner_guard.config import ChainSettings
from miner_guard.eventlog.redact import without_secrets
from miner_guard.system import probe


@dataclass(frozen=True)
class ChainLook:
    """The result of one query. All fields are None where `reason` explains a failure."""

    reason: str | None = None
    block: int | None = None
    registered: bool | None = None
    """None where no hotkey is configured or the query failed."""

    uid: int | None = None
    incentive: float | None = None
    trust: float | None = None
    rank: float | None = None
    emission: float | None = None
    stake: float | None = None
    last_update: int | None = None
    """Block of the neuron's last update."""

    axon: str | None = None
    """`ip:port` where validators reach the miner; empty if it announces none, None if unknown."""

    commitment: str | None = None
    """As committed. It is public but holds the read keys: never log or store it."""

    master_commitment: str | None = None
    neurons: int | None = None
    bittensor: str | None = None
    errors: Mapping[str, str] | None = None
    """Fields that could not be read, each with its reason."""


_FIELDS = ChainLook.__dataclass_fields__


def look(settings: ChainSettings, *, python: str = sys.executable) -> ChainLook:
    """Query the chain, for `settings.timeout_s` at most. Never raises."""
    if settings.network is None or settings.netuid is None:
        missing = " and ".join(
            key for key in ("network", "netuid") if getattr(settings, key) is None
        )
        return ChainLook(reason=f"no [chain] {missing} configured")
    request = {
        "network": settings.network,
        "netuid": settings.netuid,
        "hotkey": settings.hotkey,
        "master_uid": settings.master_uid,
    }
    # Public data only: secrets do not belong in a process that runs third-party code.
    env = without_secrets(os.environ)
    answer = probe.ask(
        "miner_guard.health.chain_probe", request, settings.timeout_s, python=python, env=env
    )
    if answer.reason is not None or not isinstance(answer.value, dict):
        return ChainLook(reason=answer.reason or "the look gave no answer")
    return ChainLook(**{name: value for name, value in answer.value.items() if name in _FIELDS})


def summary(look: ChainLook, outer_step: int | None = None) -> str:
    """The text after `CHAIN `."""
    if look.reason is not None:
        return f"unknown: {look.reason}"
    said = [f"block {look.block}"]
    if look.registered is not None:
        said.append(f"registered as uid {look.uid}" if look.registered else "NOT registered")
    for name, value in (("incentive", look.incentive), ("trust", look.trust), ("rank", look.rank)):
        if value is not None:
            said.append(f"{name} {value:.4f}")
    if look.emission is not None:
        said.append(f"emission {look.emission:.4g}")
    if look.last_update is not None and look.block is not None:
        said.append(f"updated {look.block - look.last_update} blocks ago")
    if look.registered:
        said.append(
            "nothing committed"
            if look.commitment is None
            else f"commitment {len(look.commitment)} characters"
        )
    if outer_step is not None:
        said.append(f"network outer step {outer_step}")
    said += [f"{what} unknown ({why})" for what, why in (look.errors or {}).items()]
    return ", ".join(said)


def as_fields(look: ChainLook) -> dict[str, Any]:
    """The result for an event: everything but the commitments."""
    left_out = {"commitment", "master_commitment", "reason", "rank"}
    # An event's `rank` is reserved for the process that it concerns.
    return {name: getattr(look, name) for name in _FIELDS if name not in left_out} | {
        "chain_rank": look.rank
    }
