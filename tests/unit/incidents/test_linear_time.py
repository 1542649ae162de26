"""A long line delays the guard only in proportion to its length: every pattern is tested with the
text that costs it the most."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import pytest

from miner_guard.incidents import knowledge
from miner_guard.incidents.scan import Scanner
from tests.unit.incidents.adversaries import adversaries, distinct, hostile

_SIZE = 4096


@pytest.mark.slow
def test_no_pattern_takes_more_than_linear_time_on_its_own_adversary() -> None:
    """`wallet_permission` took 12 s on one line of 17 KB, with the interpreter's lock held."""

    def took(search: Callable[[str], object], text: str) -> float:
        started = time.process_time()
        search(text)
        return time.process_time() - started

    careless = r"\w+.*\w+.*denied"
    search = re.compile(careless).search
    assert any(took(search, text) > 0.1 for text in adversaries(careless, 128)), "it would show"
    too_slow = []
    for entry in distinct(knowledge.load().entries):
        assert entry.expression is not None
        for text in adversaries(entry.expression, _SIZE):
            if (seconds := took(entry.matches, text)) > 0.1:
                too_slow.append((entry.label, entry.expression, text[:40], seconds))
                break
    assert not too_slow


def prepared() -> Scanner:
    """A scanner that has seen its first line with a trigger, which prepares the search for all
    later ones."""
    knowledge.load().match("error")
    return Scanner(knowledge.load())


def test_a_metagraph_on_one_line_is_scanned_in_no_time() -> None:
    neuron = b'{"uid":%d,"hotkey":"5FabcDEFghiJKLmnoPQRstuVWXyz012345","coldkey":"5GabcDEFghiJKLmnoPQRstuVWXyz","axon":"x"}'
    line = b'{"error":null,"neurons":[' + b",".join(neuron % uid for uid in range(256)) + b"]}\n"
    scanner = prepared()
    started = time.process_time()
    scanner.feed(line)
    assert time.process_time() - started < 1.0


def test_an_exception_name_without_an_end_is_scanned_in_no_time() -> None:
    scanner = prepared()
    started = time.process_time()
    scanner.feed(b"Error" * 100_000 + b"x!\n")
    assert time.process_time() - started < 3.0


@pytest.mark.parametrize("kind", list(hostile()))
def test_hostile_text_is_scanned_at_2_mb_a_second(kind: str) -> None:
    """This test is more lenient, so that it passes on a busy machine."""
    text, scanner = hostile()[kind], prepared()
    started = time.process_time()
    for at in range(0, len(text), 65536):
        scanner.feed(text[at : at + 65536])
    took = time.process_time() - started
    assert len(text) / 1e6 / took > 1
