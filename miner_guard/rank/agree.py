"""Gives all ranks the same answer: rank 0 provides it, and no rank gets it before all have asked.

The ranks of a node ask their leader by datagram; the leaders meet in the launcher's store, to which
every rank is already connected. So the guard needs one descriptor per rank at any world size (a
gloo group would need one per peer), and it never waits behind the GPU or the miner's collectives.
The first leader to write to the store decides whether a question is answered or has failed because
of a late rank, so that all ranks see the same outcome.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import socket
import struct
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from miner_guard.rank.environment import RankContext
from miner_guard.state_dir import make_folder
from miner_guard.system.boot import boot_id
from miner_guard.system.sockets import address

_MAX_DATAGRAM = 16384
_RETRY_S = 0.01
_LOOK_S = 0.5
"""Interval at which a waiting follower checks the store for a sign that its leader has given up."""

_NOT_THERE = frozenset({errno.ENOENT, errno.ECONNREFUSED, errno.ENOTDIR})


@dataclass(frozen=True)
class Ask:
    """One rank's question, as received by its leader."""

    FORM: ClassVar[struct.Struct] = struct.Struct("<QIdBB")

    number: int
    """1-based sequence number of the question."""

    mark: int
    """Hash of the question's text, which shows whether all ranks ask the same question."""

    asked: float
    """Monotonic time in seconds at which the rank asked; all ranks on a node share this clock."""

    is_root: bool
    """Whether rank 0 sent it; rank 0 provides the answer."""

    answer: bytes | None

    def pack(self) -> bytes:
        """Encode the question as a datagram."""
        form = (self.number, self.mark, self.asked, self.is_root, self.answer is not None)
        return self.FORM.pack(*form) + (self.answer or b"")

    @classmethod
    def unpack(cls, datagram: bytes) -> Ask:
        """Parse the question in a datagram. Raises struct.error if the datagram is too short."""
        number, mark, asked, is_root, answered = cls.FORM.unpack_from(datagram)
        rest = datagram[cls.FORM.size :]
        return cls(number, mark, asked, bool(is_root), rest if answered else None)


class NodeLeader:
    """Collects the questions from the ranks on its node. Without a path, this rank is alone on
    its node."""

    def __init__(self, path: Path | None) -> None:
        """Raises OSError."""
        self._path = path
        self._socket: socket.socket | None = None
        self._early: dict[int, list[tuple[Ask, str | bytes]]] = {}
        """Questions that other ranks sent before this rank asked them, by number."""

        self._asked: list[tuple[int, str | bytes]] = []
        if path is None:
            return
        path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        with address(path) as name:
            self._socket.bind(name)
        os.chmod(path, 0o600)

    def collect(self, own: Ask, size: int, timeout_s: float) -> list[Ask]:
        """Wait for the questions of the node's `size` ranks, and return them with this rank's own.
        Returns fewer if the earliest question has waited `timeout_s`."""
        heard = self._early.pop(own.number, [])
        asks = [own, *(ask for ask, _ in heard)]
        self._asked = [(ask.number, name) for ask, name in heard]
        while len(asks) < size and self._socket is not None:
            left = min(ask.asked for ask in asks) + timeout_s - time.monotonic()
            if left <= 0:
                break
            self._socket.settimeout(left)
            try:
                datagram, name = self._socket.recvfrom(_MAX_DATAGRAM)
                ask = Ask.unpack(datagram)
            except (TimeoutError, struct.error):
                continue
            if ask.number == own.number:
                asks.append(ask)
                self._asked.append((ask.number, name))
            elif ask.number > own.number:
                self._early.setdefault(ask.number, []).append((ask, name))
        return asks

    def answer(self, outcome: str, payload: bytes) -> None:
        """Reply to the ranks that asked. Does not wait for one that has exited."""
        for number, name in self._asked:
            with contextlib.suppress(OSError):
                assert self._socket is not None
                self._socket.settimeout(_LOOK_S)
                self._socket.sendto(b"%d %s\n%s" % (number, outcome.encode(), payload), name)
        self._asked = []

    def close(self) -> None:
        """Close the socket. The kernel refuses datagrams from ranks that ask later."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._path is not None:
            self._path.unlink(missing_ok=True)


class NodeFollower:
    """Asks its node's leader."""

    def __init__(self, path: Path | None) -> None:
        """Raises OSError."""
        self._path = path
        self._socket: socket.socket | None = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        # Let the kernel pick an address, so that no socket file is left behind.
        self._socket.bind("")

    def ask(self, own: Ask, deadline: float, gave_up: Callable[[], bool]) -> tuple[str, bytes]:
        """Ask the leader; return the outcome and the payload. The outcome is `late` if no reply
        comes by `deadline`, or if the leader `gave_up` earlier. Raises OSError."""
        if self._socket is None or self._path is None:
            return "late", b"this rank has given up"
        sent = self._send(self._socket, own.pack(), deadline, gave_up)
        while sent and (left := deadline - time.monotonic()) > 0:
            self._socket.settimeout(min(left, _LOOK_S))
            try:
                head, _, payload = self._socket.recv(_MAX_DATAGRAM).partition(b"\n")
            except TimeoutError:
                if gave_up():
                    break
                continue
            number, _, outcome = head.decode().partition(" ")
            if number == str(own.number):
                return outcome, payload
        return "late", b""

    def _send(
        self, own: socket.socket, datagram: bytes, deadline: float, gave_up: Callable[[], bool]
    ) -> bool:
        assert self._path is not None
        while (left := deadline - time.monotonic()) > 0:
            try:
                own.settimeout(left)
                with address(self._path) as name:
                    own.sendto(datagram, name)
                return True
            except OSError as error:
                if isinstance(error, TimeoutError) or error.errno not in _NOT_THERE:
                    raise
            # The leader has not started yet, or has given up.
            if gave_up():
                return False
            time.sleep(_RETRY_S)
        return False

    def close(self) -> None:
        """Release the socket."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


Channel = NodeLeader | NodeFollower


PAYLOAD_BYTES = 4096
LATE = "late rank"
"""The `where` field of a `guard_degraded` event that the supervisor handles as a hang."""

_EARLY_S = 0.5
_GRACE_S = 2.0
"""How much longer than the timeout a rank waits for its leader's reply."""

_FIRST_POLL_S, _MAX_POLL_S = 0.001, 0.1
_COUNT_SHIFT = 40
"""The store keeps one running sum per question. The bits from this one up count ranks, and the bits
below it hold the sum of their 24-bit marks."""

_MARK = (1 << 24) - 1

_ADVICE = (
    "every rank must ask at the same step; the ranks cannot agree again until the miner restarts"
)

_NODE = "node "
_NAMED = 4
"""How many late nodes to name; the others are only counted."""

_GO, _DIFFER, _NO_ANSWER, _LATE = "go", "differ", "no answer", "late"


class NoConsensus(Exception):
    """The ranks did not agree on an answer: a rank did not ask, asked something else, or was late,
    or rank 0 had no answer."""


class AgreementStore(Protocol):
    """The methods of torch's Store that the agreement uses."""

    def add(self, key: str, amount: int, /) -> int: ...
    def set(self, key: str, value: bytes, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def delete_key(self, key: str, /) -> bool: ...


@dataclass(frozen=True)
class Member:
    """A rank's identity in the agreement."""

    rank: int
    world_size: int
    node: str
    """Name of the node; the same for all ranks that can reach each other at `socket`."""

    socket: Path | None
    """Where the node's leader listens; None if the rank is alone on its node."""

    host: str = ""
    """The node's name in messages."""


class SingleRank:
    """Agreement for a world size of 1: the rank's own answer is the only one."""

    def share(self, question: str, answer: bytes | None) -> bytes:
        """Return the answer. Raises NoConsensus if there is none."""
        if answer is None:
            raise NoConsensus("rank 0 had no answer")
        return answer


class Group:
    """The agreement among all ranks in a process group. Every rank creates one and asks the same
    questions in the same order."""

    def __init__(self, store: AgreementStore, member: Member, timeout_s: float) -> None:
        """Does not wait for the other ranks. Raises OSError, and whatever the store raises."""
        self._store = store
        self._member = member
        self._timeout_s = timeout_s
        self._number = 0
        self._agreed = False
        self.broken: str | None = None
        self.late = False
        """Whether the group broke because a rank was late after the ranks had agreed at least once.
        (If they never agreed, the program might be asking on some ranks only, and a restart would
        not help.)"""

        first = store.add(f"members/{member.node}", 1) == 1
        self._channel: Channel = NodeLeader(member.socket) if first else NodeFollower(member.socket)
        self.absent = ""
        """The nodes that had not yet asked when the group broke; empty if unknown."""

        self._node_size: int | None = None
        self._leader = 0
        """This rank's 1-based number among the leaders; 0 if unknown."""

        store.add("registered", 1)

    def share(self, question: str, answer: bytes | None) -> bytes:
        """Return rank 0's `answer` on every rank. Collective.

        If a rank does not ask within the timeout, every rank raises NoConsensus, as does every
        later call. Rank 0 must call this even if it has no answer, because the others wait for it.
        """
        if self.broken is not None:
            raise NoConsensus(self.broken)
        self._number += 1
        started = time.monotonic()
        fits = answer is not None and len(answer) <= PAYLOAD_BYTES
        own = Ask(
            number=self._number,
            mark=zlib.crc32(question.encode()) & _MARK,
            asked=started,
            is_root=self._member.rank == 0,
            answer=answer if fits else None,
        )
        try:
            outcome, payload = self._ask(own)
        except Exception as error:  # noqa: BLE001 - torch's versions raise different types; it is reported
            outcome, payload = _LATE, f"{type(error).__name__}: {error}"[:120].encode()
        if outcome == _LATE:
            self._break(time.monotonic() - started, payload.decode(errors="replace"))
        self._agreed = True
        if outcome == _DIFFER:
            raise NoConsensus(
                f"the ranks are asking different questions; this rank asks: {question}"
            )
        if outcome == _NO_ANSWER:
            raise NoConsensus("rank 0 had no answer, or its answer was too long")
        return payload

    def close(self) -> None:
        """Release the socket; the group must not be used afterwards."""
        self._channel.close()

    def _break(self, waited: float, reason: str) -> None:
        missed = waited >= self._timeout_s - _EARLY_S
        self.late = missed and self._agreed
        self.absent = reason if reason.startswith(_NODE) else ""
        what = (
            f"not every rank asked within {self._timeout_s:g} s"
            if missed
            else f"the ranks could not agree after {waited:.1f} s: a rank exited or asked too late"
        )
        self.broken = f"{what}; {_ADVICE}"
        self._channel.close()
        raise NoConsensus(f"{self.broken} ({reason})" if reason else self.broken)

    def _ask(self, own: Ask) -> tuple[str, bytes]:
        if isinstance(self._channel, NodeFollower):
            deadline = own.asked + self._timeout_s + _GRACE_S
            return self._channel.ask(own, deadline, lambda: self._store.check(["broken"]))
        outcome, payload = self._lead(self._channel, own)
        self._channel.answer(outcome, payload)
        if outcome == _LATE:
            # Tell any follower on this node that asks after the socket is closed.
            self._store.set("broken", b"1")
        return outcome, payload

    # How the leaders agree through the store.

    def _lead(self, channel: NodeLeader, own: Ask) -> tuple[str, bytes]:
        size = self._size_of_node(own.asked + self._timeout_s)
        if size is None:
            return self._too_late(own.number)
        asks = channel.collect(own, size, self._timeout_s)
        end = min(ask.asked for ask in asks) + self._timeout_s
        # A question that has waited too long has failed, even if the late rank is this leader: the
        # rank that asked it has given up, and an answer now would reach only some of the ranks.
        if len(asks) < size or time.monotonic() > end:
            return self._too_late(own.number)
        root = next((ask for ask in asks if ask.is_root), None)
        if size == self._member.world_size:
            # All ranks are on this node, so its leader decides.
            return _judged(sum(ask.mark for ask in asks) == size * own.mark, root)
        self._store.set(f"leader/{self._leader}/at", str(own.number).encode())
        if root is not None:
            known = b"" if root.answer is None else b"1" + root.answer
            self._store.set(f"{own.number}/answer", known)
        arrived = self._store.add(
            f"{own.number}/in", (size << _COUNT_SHIFT) + sum(ask.mark for ask in asks)
        )
        if arrived >> _COUNT_SHIFT == self._member.world_size:
            same = arrived & ((1 << _COUNT_SHIFT) - 1) == self._member.world_size * own.mark
            outcome = self._decide(own.number, _GO if same else _DIFFER)
        else:
            outcome = self._outcome(own.number, end)
        if outcome != _GO:
            return outcome, self._absent(own.number) if outcome == _LATE else b""
        payload = bytes(self._store.get(f"{own.number}/answer"))
        if root is not None:
            self._forget(own.number - 1)
        return (_GO, payload[1:]) if payload else (_NO_ANSWER, b"")

    def _size_of_node(self, end: float) -> int | None:
        """Wait until all ranks have registered, and return the number of ranks on this node.
        Returns None if some have not registered by `end`."""
        if self._node_size is None:
            world_size = self._member.world_size
            if not _poll(lambda: self._store.add("registered", 0) >= world_size, end):
                return None
            self._node_size = self._store.add(f"members/{self._member.node}", 0)
            self._leader = self._store.add("leaders", 1)
            name = f"{self._member.host or self._member.node} with rank {self._member.rank}"
            self._store.set(f"leader/{self._leader}/name", name.encode())
        return self._node_size

    def _too_late(self, number: int) -> tuple[str, bytes]:
        outcome = self._decide(number, _LATE)
        return outcome, self._absent(number) if outcome == _LATE else b""

    def _absent(self, number: int) -> bytes:
        """Return the nodes on which some ranks have not asked question `number`; empty if
        unknown."""
        late = []
        try:
            for leader in range(1, self._store.add("leaders", 0) + 1):
                if not self._has_asked(leader, number):
                    late.append(bytes(self._store.get(f"leader/{leader}/name")).decode())
        except Exception:  # noqa: BLE001 - torch's versions raise different types; the names are only an extra
            return b""
        more = f" and {len(late) - _NAMED} more" if len(late) > _NAMED else ""
        return f"{_NODE}{', '.join(late[:_NAMED])}{more}".encode() if late else b""

    def _has_asked(self, leader: int, number: int) -> bool:
        key = f"leader/{leader}/at"
        return self._store.check([key]) and int(self._store.get(key)) >= number

    def _outcome(self, number: int, end: float) -> str:
        """Wait for the outcome that a leader decides on; it is `late` if none has decided by
        `end`."""
        if not _poll(lambda: self._store.check([f"{number}/outcome"]), end):
            return self._decide(number, _LATE)
        return bytes(self._store.get(f"{number}/outcome")).decode()

    def _decide(self, number: int, outcome: str) -> str:
        """Write the outcome unless another leader has; returns the outcome that counts."""
        if self._store.add(f"{number}/decided", 1) == 1:
            self._store.set(f"{number}/outcome", outcome.encode())
            return outcome
        if not _poll(lambda: self._store.check([f"{number}/outcome"]), time.monotonic() + _GRACE_S):
            return _LATE
        return bytes(self._store.get(f"{number}/outcome")).decode()

    def _forget(self, number: int) -> None:
        """Delete a question from the store. Every rank already has its outcome, because all of them
        have asked the next question."""
        for name in ("answer", "in", "decided", "outcome"):
            self._store.delete_key(f"{number}/{name}")


def _judged(same: bool, root: Ask | None) -> tuple[str, bytes]:
    if not same:
        return _DIFFER, b""
    return (_NO_ANSWER, b"") if root is None or root.answer is None else (_GO, root.answer)


def _poll(done: Callable[[], bool], end: float) -> bool:
    """Wait until `done()` is true or `end` has passed; returns whether it became true. It polls,
    because in some torch versions some stores are unusable after a timed-out `store.wait`."""
    pause = _FIRST_POLL_S
    while not done():
        left = end - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(pause, left))
        pause = min(pause * 2, _MAX_POLL_S)
    return True


_calls = itertools.count(1)
"""Numbers the groups, to keep their keys apart. All ranks create the same number of groups."""


def group_of(dist: Any, place: RankContext) -> Group:
    """Create the group of all ranks of `torch.distributed`. Raises OSError, and whatever the store
    raises."""
    call = next(_calls)
    c10d = dist.distributed_c10d
    store = c10d.PrefixStore(f"miner_guard/agree/{call}", c10d._get_default_store())
    rank, node, path = dist.get_rank(), None, None
    if place.state is not None and (boot := boot_id()) is not None:
        make_folder(place.state.flight)
        folder = os.stat(place.state.flight)
        # Ranks are on the same node if they share both the folder and the kernel: nodes may share a
        # network folder.
        node = f"{boot}/{folder.st_dev}/{folder.st_ino}"
        path = place.state.agreement_of(f"{zlib.crc32(node.encode()):08x}-{call}")
    host = socket.gethostname()
    member = Member(rank, dist.get_world_size(), node or f"rank {rank}", path, host)
    return Group(store, member, place.settings.gate.broadcast_timeout_s)
