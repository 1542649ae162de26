"""Every rule passes, warns, blocks and is unknown when it should."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from miner_guard.validators import rules
from miner_guard.validators.facts import Facts, Published, Verdict, fingerprint
from miner_guard.validators.limits import Limits
from tests.support.rule_facts import META, NOW, OURS, RISING, SN38, SPACED, aged, chain, facts, step

Judge = Callable[[Facts, Limits], Verdict]


def base(ours: int | None, network: int | None = 56) -> Facts:
    return facts(base_outer_step=ours, network=chain(outer_step=network))


def blocks(*listed: object, block: int | None = 1000, read_ago_s: float = 0.0) -> Facts:
    network = chain(block=block, seen_at=NOW - read_ago_s)
    return facts(config={"block_list": list(listed)}, network=network)


def meta(**change: object) -> Facts:
    return facts(metadata={**META, **change})


def report(**report: object) -> Facts:
    return facts(files={"params": 3, **report})


def committed(value: str | None, ours: str | None = OURS) -> Facts:
    return facts(network=chain(commitment=value), credentials=ours)


def bucket(name: str | None, uid: int | None = 7) -> Facts:
    return facts(name=name, network=chain(uid=uid))


ROWS: dict[Judge, list[tuple[Facts, str]]] = {
    rules.min_inner_step: [(facts(inner_step=50), "pass"), (facts(inner_step=49), "block")],
    rules.published_inner_step: [
        (step(60), "pass"),
        (step(20), "warn"),
        (step(0), "block"),
        (facts(), "unknown"),
    ],
    rules.repo_age: [
        (facts(published=aged(400)), "pass"),
        (facts(published=aged(2100)), "warn"),
        (facts(published=aged(299)), "block"),
        (facts(), "unknown"),
    ],
    rules.published_age: [
        (facts(published=aged(600)), "pass"),
        (facts(published=aged(4799)), "warn"),
        (facts(published=aged(4800)), "block"),
        (facts(published=Published(empty=True)), "block"),
        (facts(), "unknown"),
    ],
    # One step ahead of the network is normal just after an AllReduce.
    rules.base_age: [
        (base(56), "pass"),
        (base(57), "pass"),
        (base(55), "block"),
        (base(58), "warn"),
        (base(55, None), "unknown"),
        (base(None), "unknown"),
    ],
    rules.block_list: [
        (blocks(900), "pass"),
        (blocks(840), "warn"),
        (blocks(799), "block"),
        # The block grows between two readings of the chain.
        (blocks(900, read_ago_s=1201), "warn"),
        (blocks(900, read_ago_s=1213), "block"),
        (blocks(), "block"),
        (facts(config={}, network=chain(block=9)), "block"),
        (blocks("7"), "block"),
        (blocks(1, block=None), "unknown"),
        (facts(network=chain(block=9)), "unknown"),
    ],
    rules.metadata: [
        (meta(), "pass"),
        (meta(peer_id=None), "pass"),
        (meta(inner_step="84"), "pass"),
        (meta(**{f"more_{n}": n for n in range(20)}), "pass"),
        (facts(metadata={"outer_step": 56, "inner_step": 84}), "block"),
        (meta(inner_step="x"), "block"),
        (meta(inner_step=86), "warn"),
        (meta(outer_step=55), "warn"),
        (facts(), "unknown"),
    ],
    rules.gradients: [
        (report(size_bytes=9, problems=[]), "pass"),
        (report(warnings=["1 missing"]), "warn"),
        (report(problems=["NaN"]), "block"),
        (report(params=0), "block"),
        (report(size_bytes=9e9), "block"),
        (facts(), "unknown"),
        (report(reason="no answer within 9 s"), "unknown"),
    ],
    rules.commitment: [
        (committed(OURS), "pass"),
        (committed(OURS, "128:ff"), "warn"),
        (committed("127:ff"), "block"),
        (committed("0:e3b0"), "block"),
        (committed(None), "unknown"),
        (committed(OURS, None), "unknown"),
    ],
    rules.bucket: [
        (bucket("llama-4b-ws-4-007"), "pass"),
        (bucket("llama-4b-ws-4-007", 8), "block"),
        (bucket("llama-4b-ws-4-0007"), "block"),
        (bucket("llama-1b-007"), "block"),
        (bucket("my-bucket"), "block"),
        (bucket("llama-4b-ws-4-007", None), "unknown"),
        (bucket(None), "unknown"),
    ],
    rules.loss: [
        (facts(loss=3.4), "pass"),
        (facts(loss=2.9, recent_losses=RISING), "warn"),
        (facts(loss=3.1, recent_losses=(3.0, 3.1) * 5), "pass"),
        (facts(loss=2.0, recent_losses=RISING[::-1]), "pass"),
        (facts(loss=float("nan")), "block"),
        (facts(), "unknown"),
    ],
}


@pytest.mark.parametrize(
    ("judge", "given", "outcome"),
    [(judge, *row) for judge, rows in ROWS.items() for row in rows],
    ids=[f"{judge.__name__}-{n}" for judge, rows in ROWS.items() for n in range(len(rows))],
)
def test_a_rule_answers_as_its_table_says(judge: Judge, given: Facts, outcome: str) -> None:
    verdict = judge(given, SPACED if judge is rules.repo_age else SN38)
    assert verdict.outcome == outcome, verdict.sentence
    assert verdict.sentence


def test_every_rule_has_a_row_for_each_answer_that_it_can_give() -> None:
    for judge, _ in {*rules.GATE, *rules.AUDIT}:
        outcomes = {outcome for _, outcome in ROWS[judge]}
        assert outcomes >= {"pass", "block"}, judge
        assert "unknown" in outcomes or judge is rules.min_inner_step


def test_a_storage_whose_clock_is_ahead_does_not_block() -> None:
    """An age below zero was "too soon" for every minimum interval."""
    judged = rules.repo_age(facts(published=aged(-3)), SN38)
    assert (judged.outcome, judged.seen) == ("pass", 0.0), judged.sentence


def test_the_commitment_itself_is_in_no_fingerprint() -> None:
    secret = "0123456789abcdef" * 8
    assert secret[:8] not in str(fingerprint(secret))
    assert fingerprint(None) is None
