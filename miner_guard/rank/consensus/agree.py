"""One answer for all ranks: rank 0 says it, and nobody has it before everybody has asked.

On a gloo group of its own, so that it never waits behind the GPU or the miner's collectives.
"""

from __future__ import annotations

import re
import time
import zlib
from datetime import timedelta
from typing import Any

PAYLOAD_BYTES = 4096
_WORDS = PAYLOAD_BYTES // 8
_EARLY_S = 0.5
"""gloo gives up a little before or after the timeout it was given."""

LATE = "late rank"
"""`where` of the `guard_degraded` that the supervisor handles as a hang."""

_LENGTH, _OWN, _SUM, _HEAD = 0, 1, 2, 3


class NoConsensus(Exception):
    """The ranks have no common answer: one did not ask, asked something else, or the group is
    broken."""


class GroupFactory:
    """Makes the group; where that failed, again at the 1st, 2nd, 4th, 8th … question and not at
    each.

    By questions and not by time, so that all ranks try at the same one: a try is collective and may
    last the timeout.
    """

    def __init__(self, dist: Any, timeout_s: float) -> None:
        self._dist = dist
        self._timeout_s = timeout_s
        self._failure: str | None = None
        self._asked = 0

    def group(self) -> Group:
        """The group. Collective. Raises Disagreed where it is not there."""
        self._asked += self._failure is not None
        if self._asked & (self._asked - 1):
            raise NoConsensus(f"the ranks have no group to agree in: {self._failure}")
        try:
            return Group(self._dist, self._timeout_s)
        except (
            Exception
        ) as error:  # what torch.distributed raises differs between backends and versions
            self._failure = _reason(error)
            raise NoConsensus(f"the ranks' group could not be made: {self._failure}") from error


class SingleRank:
    """A world of one rank: its own answer is everybody's."""

    def share(self, question: str, answer: bytes | None) -> bytes:
        """The answer. Raises Disagreed where there is none."""
        if answer is None:
            raise NoConsensus("rank 0 had no answer")
        return answer


class Group:
    """All ranks of the default process group. Making it is collective."""

    def __init__(self, dist: Any, timeout_s: float) -> None:
        """Raises what torch.distributed raises."""
        import torch

        self._torch = torch
        self._dist = dist
        self._timeout_s = timeout_s
        self._rank: int = dist.get_rank()
        self._size: int = dist.get_world_size()
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self.broken: str | None = None
        self._agreed = False
        self.late = False
        """It broke since a rank that had asked before did not come in time. (Where none has ever
        agreed, the program may ask on some ranks only: a restart would not mend that.)"""

        # Kept until the next one: gloo's thread would else be the last to let go of it, take the
        # interpreter's lock for that, and abort the process where the interpreter ends just then.
        self._last: Any = None

    def share(self, question: str, answer: bytes | None) -> bytes:
        """Rank 0's `answer`, on every rank. Collective.

        A sum rather than a broadcast: nobody leaves a sum before everybody is in it, while a
        broadcast lets some ranks go with an answer that others never get. Raises Disagreed, on
        every rank that asked, where a rank is later than the timeout; the group is broken from then
        on.
        """
        if self.broken is not None:
            raise NoConsensus(self.broken)
        mark = zlib.crc32(question.encode())
        words = self._torch.zeros(_HEAD + _WORDS, dtype=self._torch.int64)
        words[_SUM] = mark
        if self._rank == 0:
            # Without an answer too: the others wait for this one.
            fits = answer is not None and len(answer) <= PAYLOAD_BYTES
            own = answer if answer is not None and fits else b""
            words[_LENGTH], words[_OWN] = len(own) if fits else -1, mark
            padded = bytearray(own.ljust(PAYLOAD_BYTES, b"\0"))
            words[_HEAD:] = self._torch.frombuffer(padded, dtype=self._torch.int64)
        started = time.monotonic()
        try:
            self._last = self._dist.all_reduce(words, group=self._group, async_op=True)
            self._last.wait()
        except Exception as error:  # torch raises RuntimeError and, since 2.2, DistBackendError
            waited = time.monotonic() - started
            missed = waited >= self._timeout_s - _EARLY_S
            self.late = missed and self._agreed
            self.broken = (
                f"not every rank asked within {self._timeout_s:g} s"
                if missed
                else f"the group of the ranks broke after {waited:.1f} s, a rank is gone or gave up"
            )
            self.broken += (
                "; every rank must ask, at the same step; none agree again before a "
                "restart of the miner"
            )
            raise NoConsensus(f"{self.broken} ({_reason(error)})") from error
        self._agreed = True
        head: list[int] = words[:_HEAD].tolist()
        # The marks add up to a multiple of rank 0's only if all ranks asked the same.
        if head[_SUM] != head[_OWN] * self._size:
            raise NoConsensus(f"the ranks ask different questions; this one: {question}")
        if head[_LENGTH] < 0:
            raise NoConsensus("rank 0 had no answer, or one that is too long")
        used = words[_HEAD : _HEAD + -(-head[_LENGTH] // 8)].tolist()
        return b"".join(word.to_bytes(8, "little", signed=True) for word in used)[: head[_LENGTH]]


def _reason(error: BaseException) -> str:
    """gloo's own words, without the path of its source file."""
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[[^\]]*\]\s*", "", first).split(". ")[0][:120]
