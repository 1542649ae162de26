"""Gives all ranks the same answer: rank 0 provides it, and no rank gets it before all have asked.

The ranks meet in the launcher's store, to which every rank is already connected. So an agreement
needs no descriptor of its own (a gloo group needs one per peer), and it never waits behind the GPU
or the miner's collectives. The first rank to write a question's outcome decides whether it is
answered or has failed because of a late rank, so that all ranks see the same outcome.
"""

from __future__ import annotations

import itertools
import socket
import time
import zlib
from collections.abc import Callable
from typing import Any, Protocol

LATE = "late rank"
"""The `where` field of a `guard_degraded` event that the supervisor handles as a hang."""

_EARLY_S = 0.5
_FIRST_POLL_S, _MAX_POLL_S = 0.0005, 0.1
_COUNT_SHIFT = 40
"""The store keeps one running sum per question. The bits from this one up count ranks, and the bits
below it hold the sum of their 24-bit marks."""

_MARK = (1 << 24) - 1

_ADVICE = (
    "every rank must ask at the same step; the ranks cannot agree again until the miner restarts"
)

_MAX_NAMED = 4
"""How many late ranks to name; the others are only counted."""

_GO, _DIFFER, _LATE = b"go", b"differ", b"late"


class NoConsensus(Exception):
    """The ranks did not agree on an answer: a rank did not ask, asked something else, or was
    late."""


class AgreementStore(Protocol):
    """The methods of torch's Store that the agreement uses."""

    def add(self, key: str, amount: int, /) -> int: ...
    def set(self, key: str, value: bytes, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...
    def delete_key(self, key: str, /) -> bool: ...


class Group:
    """The agreement among all ranks in a process group. Every rank creates one and asks the same
    questions in the same order."""

    def __init__(self, store: AgreementStore, rank: int, world_size: int, timeout_s: float) -> None:
        """Does not wait for the other ranks. Raises whatever the store raises."""
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._number = 0
        self._agreed = False
        self.broken: str | None = None
        self.late = False
        """Whether the group broke because a rank was late after the ranks had agreed at least once.
        (If they never agreed, the program might be asking on some ranks only, and a restart would
        not help.)"""

        self.absent = ""
        """The ranks that had not yet asked when the group broke; empty if unknown."""

        store.set(f"host/{rank}", socket.gethostname().encode())

    def share(self, question: str, answer: Callable[[], bytes]) -> bytes:
        """Return on every rank what `answer`, which must not raise, returns on rank 0. Collective.

        If a rank does not ask within the timeout, every rank raises NoConsensus, as does every
        later call.
        """
        if self.broken is not None:
            raise NoConsensus(self.broken)
        self._number += 1
        started = time.monotonic()
        try:
            outcome, payload = self._ask(question, answer, started + self._timeout_s)
        except Exception as error:  # noqa: BLE001 - torch's versions raise different types; it is reported
            outcome, payload = _LATE, f"{type(error).__name__}: {error}"[:120].encode()
        if outcome == _LATE:
            self._break(time.monotonic() - started, payload.decode(errors="replace"))
        self._agreed = True
        if outcome == _DIFFER:
            raise NoConsensus(
                f"the ranks are asking different questions; this rank asks: {question}"
            )
        return payload

    def count(self, name: str, amount: int) -> int:
        """Add to a number that all ranks share, without waiting for them; returns the sum. Raises
        whatever the store raises."""
        return int(self._store.add(f"count/{name}", amount))

    def _ask(self, question: str, answer: Callable[[], bytes], end: float) -> tuple[bytes, bytes]:
        """Return the outcome and, if it is `go`, the answer; if it is `late`, the ranks that are
        missing."""
        store, number = self._store, self._number
        if self._rank == 0:
            store.set(f"{number}/answer", answer())
        store.set(f"at/{self._rank}", b"%d" % number)
        mark = zlib.crc32(question.encode()) & _MARK
        arrived = store.add(f"{number}/in", (1 << _COUNT_SHIFT) + mark)
        if arrived >> _COUNT_SHIFT == self._world_size:
            same = arrived & ((1 << _COUNT_SHIFT) - 1) == self._world_size * mark
            outcome = self._decide(_GO if same else _DIFFER)
        elif poll(lambda: store.check([f"{number}/outcome"]), end):
            outcome = bytes(store.get(f"{number}/outcome"))
        else:
            outcome = self._decide(_LATE)
        if outcome == _LATE:
            return outcome, self._missing()
        payload = bytes(store.get(f"{number}/answer"))
        if self._rank == 0:
            # Every rank has the outcome of the question before, because all have asked this one.
            for name in ("answer", "in", "outcome"):
                store.delete_key(f"{number - 1}/{name}")
        return outcome, payload

    def _decide(self, outcome: bytes) -> bytes:
        """Write the outcome unless another rank has; returns the outcome that counts."""
        key = f"{self._number}/outcome"
        return bytes(self._store.compare_set(key, "", outcome.decode()))

    def _missing(self) -> bytes:
        """Name the ranks that have not asked this question; empty if unknown."""
        try:
            late = [rank for rank in range(self._world_size) if not self._has_asked(rank)]
            hosts: dict[str, list[int]] = {}
            for rank in late[:_MAX_NAMED]:
                key = f"host/{rank}"
                host = self._store.get(key).decode() if self._store.check([key]) else "unknown host"
                hosts.setdefault(host, []).append(rank)
        except Exception:  # noqa: BLE001 - torch's versions raise different types; the names are only an extra
            return b""
        named = [
            f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} on {host}"
            for host, ranks in hosts.items()
        ]
        more = f" and {len(late) - _MAX_NAMED} more" if len(late) > _MAX_NAMED else ""
        return f"{', '.join(named)}{more}".encode()

    def _has_asked(self, rank: int) -> bool:
        key = f"at/{rank}"
        return self._store.check([key]) and int(self._store.get(key)) >= self._number

    def _break(self, waited: float, reason: str) -> None:
        missed = waited >= self._timeout_s - _EARLY_S
        self.late = missed and self._agreed
        self.absent = reason if reason.startswith("rank") else ""
        what = (
            f"not every rank asked within {self._timeout_s:g} s"
            if missed
            else f"the ranks could not agree after {waited:.1f} s: a rank exited or asked too late"
        )
        self.broken = f"{what}; {_ADVICE}"
        raise NoConsensus(f"{self.broken} ({reason})" if reason else self.broken)


def poll(done: Callable[[], bool], end: float) -> bool:
    """Wait until `done()` is true or `end` has passed; returns whether it became true. It polls,
    because in some torch versions some stores are unusable after a timed-out `store.wait`."""
    pause = _FIRST_POLL_S
    while not done():
        remaining = end - time.monotonic()
        if remaining <= 0:
            return False
        time.sleep(min(pause, remaining))
        pause = min(pause * 2, _MAX_POLL_S)
    return True


_calls = itertools.count(1)
"""Numbers the groups, to keep their keys apart. All ranks create the same number of groups."""


def group_of(dist: Any, timeout_s: float) -> Group:
    """Create the group of all ranks of `torch.distributed`. Raises whatever the store raises."""
    c10d = dist.distributed_c10d
    prefix = f"miner_guard/agree/{next(_calls)}"
    store = c10d.PrefixStore(prefix, c10d._get_default_store())
    return Group(store, dist.get_rank(), dist.get_world_size(), timeout_s)
