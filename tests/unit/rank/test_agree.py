"""The ranks' agreement: the same outcome on every rank, whichever rank is late; few requests."""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from collections.abc import Callable

import pytest

from miner_guard.rank import agree
from miner_guard.rank.agree import Group, NoConsensus


class CountingStore:
    """torch's store, shared by threads of one process; counts requests by rank."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.requests: Counter[str] = Counter()
        self._lock = threading.Lock()

    def of(self, rank: int) -> _Connection:
        return _Connection(self, rank)


class _Connection:
    def __init__(self, store: CountingStore, rank: int) -> None:
        self._store = store
        self._rank = rank

    def _count(self) -> threading.Lock:
        self._store.requests[str(self._rank)] += 1
        return self._store._lock

    def add(self, key: str, amount: int, /) -> int:
        with self._count():
            value = int(self._store.values.get(key, b"0")) + amount
            self._store.values[key] = str(value).encode()
        return value

    def set(self, key: str, value: bytes, /) -> None:
        with self._count():
            self._store.values[key] = value

    def get(self, key: str, /) -> bytes:
        with self._count():
            return self._store.values[key]

    def check(self, keys: list[str], /) -> bool:
        with self._count():
            return all(key in self._store.values for key in keys)

    def delete_key(self, key: str, /) -> bool:
        with self._count():
            return self._store.values.pop(key, None) is not None


Ask = Callable[[Group, int], object]


def run(ranks: int, ask: Ask, timeout_s: float = 20.0) -> tuple[list[object], CountingStore]:
    """The result of `ask(group, rank)` on each rank, and the store."""
    store = CountingStore()
    answers: list[object] = [None] * ranks

    def rank(number: int) -> None:
        answers[number] = ask(Group(store.of(number), number, ranks, timeout_s), number)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return answers, store


def shared(group: Group, question: str, answer: bytes | None = None) -> object:
    try:
        return group.share(question, answer)
    except NoConsensus as error:
        return str(error)


def test_every_rank_gets_rank_0s_answer() -> None:
    ranks = 6

    def ask(group: Group, rank: int) -> object:
        return [shared(group, f"q{n}", b"%d" % n if rank == 0 else None) for n in range(20)]

    answers, store = run(ranks, ask)
    assert answers == [[b"%d" % n for n in range(20)]] * ranks
    numbered = [key for key in store.values if key[0].isdigit()]
    assert len(numbered) <= 8, "what is settled is deleted: a launch asks millions of questions"


def test_ranks_that_ask_different_questions_are_all_reported_and_agree_again() -> None:
    def ask(group: Group, rank: int) -> object:
        return [shared(group, f"{rank == 5}", b"go"), shared(group, "same", b"go")]

    for different, same in run(6, ask)[0]:  # type: ignore[misc]
        assert "different questions" in different
        assert same == b"go"


@pytest.mark.parametrize("answer", [None, b"x" * (agree.PAYLOAD_BYTES + 1)])
def test_rank_0_joins_the_others_even_without_an_answer(answer: bytes | None) -> None:
    """Otherwise the other ranks would wait out their timeout, and could never agree again."""

    def ask(group: Group, rank: int) -> object:
        return [shared(group, "q", answer), shared(group, "q", b"go")]

    for without, after in run(4, ask)[0]:  # type: ignore[misc]
        assert "rank 0 had no answer, or its answer was too long" in without
        assert after == b"go"


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


def test_a_rank_asks_the_store_a_few_times() -> None:
    answers, store = run(8, lambda group, _: [shared(group, f"q{n}", b"go") for n in range(10)])
    assert answers == [[b"go"] * 10] * 8
    assert max(store.requests.values()) <= 10 * 40
