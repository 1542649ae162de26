"""Chain: whether the network pays, registration and incentive, and the network's outer step."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from miner_guard.record.events import Event, event
from miner_guard.system.clock import OncePer
from miner_guard.uploads import chain
from miner_guard.uploads.chain import ChainReading, master_state, network_of
from miner_guard.validators.facts import Network, Published
from miner_guard.validators.limits import Limits
from miner_guard.validators.profiles import profile_of
from miner_guard.validators.rules import BLOCK_S
from miner_guard.watch.base import Context, Monitor

_REPO_LOOKS = 2
"""Looks at the repo per query of the chain, which changes every 12 s and matters less."""

_STATUS_EVERY_S = 600.0
_REPEAT_S = 900.0


class ChainMonitor(Monitor):
    """Reports changes; passes every chain state to the monitor that writes gate-inputs.json."""

    name = "chain"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._settings = context.config.chain
        profile = profile_of(context.config.miner)
        self._described = None if profile is None else profile.dated
        limits = {} if profile is None else profile.limits
        self._limits = Limits.of(context.config.gate, limits)
        master = (self._settings.master_uid, self._limits.master_hotkey)
        self._has_master = master != (None, None)
        self._status = OncePer(_STATUS_EVERY_S)
        self._unregistered = OncePer(_REPEAT_S)
        self._latest: tuple[ChainReading, Network, float] | None = None
        self._unpaid: str | None = None
        self._moved: tuple[int, float] | None = None
        if self._settings.network is not None:
            every_s = _REPO_LOOKS * context.config.repo.refresh_every_s
            context.jobs.every("chain", every_s, self._refresh, first_after_s=0.0)

    def _refresh(self) -> None:
        reading = chain.query(self._settings, self._limits.master_hotkey)
        # Read the clock first: querying the master's repo can be slow.
        now = self.context.clock.monotonic()
        master = Published(reason="not requested")
        if reading.reason is None and self._has_master:
            repo = self.context.config.repo
            master = master_state(repo, self._limits, reading.master_commitment)
        for each in self.observe(reading, master, now):
            self.context.emit(each)

    def observe(self, reading: ChainReading, master: Published, now: float) -> Iterator[Event]:
        """The events for one chain poll at `now` (monotonic). Their `network` field goes to
        the gate."""
        frozen = self._frozen_s(reading, now)
        # Use the time of the poll that first saw this block: the chain keeps advancing even
        # if this node has stalled.
        seen_at = now if self._moved is None else self._moved[1]
        form, per_allreduce = self._limits.commitment_form, self._settings.blocks_per_allreduce
        network = network_of(reading, master, seen_at, form=form, per_allreduce=per_allreduce)
        self._latest = (reading, network, now)
        words = chain.summary(reading, network.outer_step)
        today = datetime.date.fromtimestamp(self.context.clock.wall())
        self._unpaid = unpaid = chain.unpaid(reading, self._described, today)
        if frozen is not None:
            words += f"; no new block for {frozen:.0f}s: check whether the node has stalled"
        if self._has_master and reading.reason is None and master.outer_step is None:
            words += f"; network outer step unknown ({master.reason})"
        if unpaid is not None:
            words = f"pays no miner: {unpaid}; {words}"
        paid = (reading.registered_at, unpaid is None)
        state = (reading.registered, reading.uid, network.outer_step, bool(reading.errors), paid)
        news = self._status.ask(now, (reading.reason, frozen is None, *state))
        level = "info" if {reading.reason, frozen, unpaid} == {None} else "warning"
        if not news:
            level = "debug"
        if reading.registered:
            self._unregistered.clear()
        elif reading.registered is False:
            level = "critical" if self._unregistered.ask(now) else "debug"
            words = (
                f"UNREGISTERED: the hotkey is not registered on subnet {self._settings.netuid} at "
                f"block {reading.block}: the miner earns nothing until it is registered again"
            )
        yield event(
            "chain_status",
            level,
            f"CHAIN {words}",
            summary=words,
            reason=reading.reason,
            network=asdict(network),
            **chain.as_fields(reading),
        )

    def _frozen_s(self, reading: ChainReading, now: float) -> float | None:
        """Return the seconds since the last new block, or None if fewer than ten block times have
        passed. A stalled node gives the miner outdated data."""
        if reading.block is None:
            return None
        if self._moved is None or reading.block != self._moved[0]:
            self._moved = (reading.block, now)
        still = now - self._moved[1]
        return still if still >= 10 * BLOCK_S else None

    def snapshot(self) -> Mapping[str, Any]:
        of_whom = {"netuid": self._settings.netuid, "hotkey": self._settings.hotkey}
        if self._latest is None:
            reason = "no [chain] configured" if self._settings.network is None else "not yet"
            return {**of_whom, "block": None, "reason": reason}
        reading, network, read_at = self._latest
        return {
            **of_whom,
            **chain.as_fields(reading),
            "age_s": round(self.context.clock.monotonic() - read_at),
            "unpaid": self._unpaid,
            "reason": reading.reason,
            "outer_step": network.outer_step,
        }
