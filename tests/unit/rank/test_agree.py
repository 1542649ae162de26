"""The ranks' agreement: the same outcome on every rank, whichever rank is late; few requests."""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from miner_guard.rank.agree import Group, NoConsensus


class CountingStore:
    """torch's store, shared by threads of one process; counts requests by thread."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.requests: Counter[int] = Counter()
        self._lock = threading.Lock()

    def _count(self) -> threading.Lock:
        self.requests[threading.get_ident()] += 1
        return self._lock

    def add(self, key: str, amount: int, /) -> int:
        with self._count():
            value = int(self.values.get(key, b"0")) + amount
            self.values[key] = str(value).encode()
        return value

    def set(self, key: str, value: bytes, /) -> None:
        with self._count():
            self.values[key] = value

    def get(self, key: str, /) -> bytes:
        with self._count():
            return self.values[key]

    def check(self, keys: list[str], /) -> bool:
        with self._count():
            return all(key in self.values for key in keys)

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        with self._count():
            assert expected == "", "only a key that does not exist yet"
            return self.values.setdefault(key, desired.encode())

    def delete_key(self, key: str, /) -> bool:
        with self._count():
            return self.values.pop(key, None) is not None


Ask = Callable[[Group, int], object]


def run(ranks: int, ask: Ask, timeout_s: float = 20.0) -> tuple[list[object], CountingStore]:
    """The result of `ask(group, rank)` on each rank, and the store."""
    store = CountingStore()
    with ThreadPoolExecutor(ranks) as pool:
        waiting = [
            pool.submit(ask, Group(store, number, ranks, timeout_s), number)
            for number in range(ranks)
        ]
        return [each.result(60) for each in waiting], store


def shared(group: Group, question: str, answer: bytes) -> object:
    try:
        return group.share(question, lambda: answer)
    except NoConsensus as error:
        return str(error)


def test_every_rank_gets_rank_0s_answer_with_a_few_requests() -> None:
    ranks = 6

    def ask(group: Group, rank: int) -> object:
        answers = []
        for n in range(20):
            if rank == 0 and n % 10 == 9:
                time.sleep(0.5)
            answers.append(shared(group, f"q{n}", b"%d" % (n + rank)))
        return answers

    answers, store = run(ranks, ask)
    assert answers == [[b"%d" % n for n in range(20)]] * ranks
    numbered = [key for key in store.values if key[0].isdigit()]
    assert len(numbered) <= 8, "what is settled is deleted: a launch asks millions of questions"
    assert max(store.requests.values()) <= 20 * 40


@pytest.mark.parametrize("late", [0, 2])
@pytest.mark.parametrize("by_s", [0.3, 0.6, 3.5])
def test_all_ranks_have_the_same_outcome_however_late_one_rank_is(late: int, by_s: float) -> None:
    """An upload must not go out on some ranks after others were told that it is blocked. Around the
    timeout either outcome is right, but it must be the same on every rank."""

    def ask(group: Group, rank: int) -> object:
        first = shared(group, "q1", b"go")
        if rank == late:
            time.sleep(by_s)
        second = shared(group, "q2", b"go")
        third = shared(group, "q3", b"go")
        return first, second == b"go", third == b"go"

    answers, _ = run(4, ask, timeout_s=0.6)
    assert len(set(answers)) == 1
    first, second, third = answers[0]  # type: ignore[misc]
    assert first == b"go"
    assert second == third, "after a late rank they agree on nothing more"
    if by_s > 1:
        assert not second


def test_the_late_rank_and_its_host_are_named_on_the_others() -> None:
    """Otherwise no guard would blame the node that causes the hang."""

    def ask(group: Group, rank: int) -> object:
        shared(group, "both", b"go")
        return None if rank == 5 else (shared(group, "one is missing", b"go"), group.absent)

    answers, _ = run(6, ask, timeout_s=1.0)
    for answer in answers[:4]:
        assert answer is not None
        words, absent = answer  # type: ignore[misc]
        assert absent == f"rank 5 on {socket.gethostname()}"
        assert absent in words
