"""Queries the chain. Each query runs in a child process with a deadline."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from miner_guard.config import ChainSettings
from miner_guard.record.redaction import without_secrets
from miner_guard.system import probe


@dataclass(frozen=True)
class ChainReading:
    """The result of one query. If it failed, `reason` says why and all other fields are None."""

    reason: str | None = None
    block: int | None = None
    registered: bool | None = None
    """Whether the hotkey is registered; None if no hotkey is configured or the query failed."""

    uid: int | None = None
    incentive: float | None = None
    trust: float | None = None
    rank: float | None = None
    emission: float | None = None
    stake: float | None = None
    last_update: int | None = None
    """Block number of the neuron's last update."""

    axon: str | None = None
    """`ip:port` where validators reach the miner; empty if it announces none, None if unknown."""

    commitment: str | None = None
    """The committed text. It is public, but it contains the read keys: never log or store it."""

    master_commitment: str | None = None
    neurons: int | None = None
    bittensor: str | None = None
    errors: Mapping[str, str] | None = None
    """Fields that could not be read, each with its reason."""


_FIELDS = ChainReading.__dataclass_fields__


def query(settings: ChainSettings, *, python: str = sys.executable) -> ChainReading:
    """Query the chain, for at most `settings.timeout_s`. Never raises."""
    if settings.network is None or settings.netuid is None:
        missing = " and ".join(
            key for key in ("network", "netuid") if getattr(settings, key) is None
        )
        return ChainReading(reason=f"no [chain] {missing} configured")
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
        return ChainReading(reason=answer.reason or "the query returned no answer")
    return ChainReading(**{name: value for name, value in answer.value.items() if name in _FIELDS})


def summary(reading: ChainReading, outer_step: int | None = None) -> str:
    """The text after `CHAIN `."""
    if reading.reason is not None:
        return f"unknown: {reading.reason}"
    words = [f"block {reading.block}"]
    if reading.registered is not None:
        words.append(f"registered as uid {reading.uid}" if reading.registered else "NOT registered")
    for name, value in (
        ("incentive", reading.incentive),
        ("trust", reading.trust),
        ("rank", reading.rank),
    ):
        if value is not None:
            words.append(f"{name} {value:.4f}")
    if reading.emission is not None:
        words.append(f"emission {reading.emission:.4g}")
    if reading.last_update is not None and reading.block is not None:
        words.append(f"updated {reading.block - reading.last_update} blocks ago")
    if reading.registered:
        words.append(
            "nothing committed"
            if reading.commitment is None
            else f"commitment {len(reading.commitment)} characters"
        )
    if outer_step is not None:
        words.append(f"network outer step {outer_step}")
    words += [f"{what} unknown ({why})" for what, why in (reading.errors or {}).items()]
    return ", ".join(words)


def as_fields(reading: ChainReading) -> dict[str, Any]:
    """The result for an event: everything but the commitments."""
    left_out = {"commitment", "master_commitment", "reason", "rank"}
    # An event's `rank` is reserved for the process that it concerns.
    return {name: getattr(reading, name) for name in _FIELDS if name not in left_out} | {
        "chain_rank": reading.rank
    }
