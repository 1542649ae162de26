"""How individual rules read their input; no input makes one raise."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from miner_guard.validators import rules
from miner_guard.validators.facts import OUTCOMES, fingerprint
from miner_guard.validators.limits import Limits, in_force
from miner_guard.validators.metadata import read_inner_step
from miner_guard.validators.rules import audit_rules, epoch_scored, gate_rules
from tests.support.rule_facts import NOW, OURS, SN38, SPACED, aged, chain, facts


def test_whether_shapes_were_compared_is_reported() -> None:
    notes = {
        known: rules.gradients(facts(files={"params": 3, "shapes_known": known}), SN38).sentence
        for known in (True, False, None)
    }
    assert notes[True].endswith("with the model's shapes")
    assert "shapes not checked" in notes[False]
    assert notes[None].endswith("all finite")


def test_the_inner_step_is_read_as_validators_read_it() -> None:
    """We must not accept a state that validators reset: they put it into a revision and parse it
    back."""
    written = [84, 84.0, 84.5, "84", " 84 ", "", None, True, "0", -1]
    read = [read_inner_step({"inner_step": value}) for value in written]
    assert read == [84, 0, 5, 84, 84, None, None, None, 0, -1]
    assert read_inner_step({}) is None


def test_the_drawn_block_alone_has_to_be_a_whole_number() -> None:
    """Validators draw one block by the miner's uid; the others are only compared."""
    mixed = [950.5, 990, 960.0]
    drawn = {uid: random.Random(uid).sample(mixed, 1)[0] for uid in range(9)}
    for uid, block in drawn.items():
        verdict = rules.block_list(
            facts(config={"block_list": mixed}, network=chain(block=1000, uid=uid)), SN38
        )
        assert verdict.outcome == ("pass" if block == 990 else "block")


def test_blocks_per_allreduce_of_the_master_change_the_epoch_and_the_age_limit() -> None:
    known = in_force(SN38, chain(blocks_per_allreduce=750))
    ages = {
        age: facts(config={"block_list": [1000 - age]}, network=chain(block=1000))
        for age in (201, 375, 376)
    }
    assert [rules.block_list(ages[age], known).outcome for age in ages] == ["pass", "warn", "block"]
    assert [rules.block_list(ages[age], SN38).outcome for age in ages] == [
        "block",
        "block",
        "block",
    ]
    scored = [epoch_scored(None, 56, since, known) for since in (374, 375)]
    assert [epoch.outer_step for epoch in scored if epoch is not None] == [55, 56]


def test_a_block_says_when_asking_again_can_help() -> None:
    assert rules.min_inner_step(facts(inner_step=15), SN38).retry_after_steps == 35
    assert rules.repo_age(facts(published=aged(100)), SPACED).retry_after_s == 200


def test_the_operators_minimum_is_shown_with_the_validators_own() -> None:
    """If 50 steps pass without a score after each AllReduce, the gate must say why."""
    blocked = rules.min_inner_step(facts(inner_step=15), SN38)
    assert blocked.note == "validators accept from inner step 1; your minimum is 50"
    archive = aged(60, inner_step=0)
    waiting = rules.min_inner_step(facts(inner_step=15, published=archive), SN38)
    assert waiting.sentence == blocked.sentence
    assert str(waiting.note).endswith("([gate] min_inner_step_after_allreduce)")
    chosen = replace(SN38, min_inner_step_after_allreduce=5)
    judged = [
        rules.min_inner_step(facts(inner_step=inner, published=published), chosen).outcome
        for inner, published in ((4, archive), (5, archive), (5, aged(60, inner_step=60)))
    ]
    assert judged == ["block", "pass", "block"]
    assert rules.min_inner_step(facts(inner_step=15), Limits()).note is None


def test_the_block_grows_between_two_readings_of_the_chain() -> None:
    read_long_ago = chain(block=1000, seen_at=NOW - 1201)
    assert (
        rules.block_list(facts(config={"block_list": [900]}, network=read_long_ago), SN38).seen
        == 200
    )
    old = chain(block=1000, seen_at=NOW - 1213)
    assert (
        rules.block_list(facts(config={"block_list": [900]}, network=old), SN38).outcome == "block"
    )


def test_the_commitment_itself_is_in_no_fingerprint() -> None:
    secret = "0123456789abcdef" * 8
    assert secret[:8] not in str(fingerprint(secret))
    assert fingerprint(None) is None


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
documents = st.dictionaries(
    st.sampled_from(["block_list", "outer_step", "inner_step", "run", "peer_id"]), anything
)
reports = st.dictionaries(
    st.sampled_from(["problems", "warnings"]), st.lists(st.text(max_size=9), max_size=3)
)


@given(
    documents,
    documents,
    reports,
    st.text(max_size=20),
    st.integers(-1, 10**9) | st.none(),
    st.floats(-1e9, 1e9),
)
def test_whatever_is_handed_in_every_rule_answers_and_none_raises(
    config: dict[str, Any],
    meta: dict[str, Any],
    report: dict[str, Any],
    name: str,
    block: int | None,
    age: float,
) -> None:
    given_facts = facts(
        published=aged(age),
        network=chain(block=block, commitment=OURS),
        name=name,
        config=config,
        metadata=meta,
        files=report,
        revision=name,
        loss=age,
    )
    for limits in (SN38, Limits()):
        for applied in (gate_rules, audit_rules):
            for rule, judge in applied(given_facts, limits):
                verdict = judge(given_facts, limits)
                assert verdict.rule == rule
                assert verdict.outcome in OUTCOMES
                json.dumps(verdict.as_dict())


def test_a_storage_whose_clock_is_ahead_does_not_block() -> None:
    """An age below zero was "too soon" for every minimum interval."""
    judged = rules.repo_age(facts(published=aged(-3)), SN38)
    assert (judged.outcome, judged.seen) == ("pass", 0.0), judged.sentence
