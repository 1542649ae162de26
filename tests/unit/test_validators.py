"""Every rule passes, warns, blocks and is unknown where it should; a second subnet is data and one
rule."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import validators
from miner_guard.config import GateSettings, loading
from uploads.gate import decide
from uploads.inputs import GateInputs
from validators import (
    base_age,
    block_list,
    bucket,
    commitment,
    gradients,
    loss,
    metadata,
    min_inner_step,
    repo_age,
    revision,
    window,
)
from validators.audit import epoch_scored
from validators.facts import Candidate, Facts, Network, Published
from validators.limits import Limits, in_force
from validators.profiles import load_profile
from validators.rules import audit_rules, gate_rules
from validators.verdict import OUTCOMES, Verdict

NOW = 10_000.0
SN38_NUMBERS = load_profile("sn38").limits
SN38 = Limits.of(GateSettings(), SN38_NUMBERS)
SN3 = Limits.of(GateSettings(), load_profile("sn3").limits)
OURS = commitment.fingerprint("a" * 128)
META = {"run": "5", "outer_step": 56, "inner_step": 84, "peer_id": "12D3"}
RISING = tuple(2.0 + 0.1 * n for n in range(10))


def facts(
    *,
    published: Published | None = None,
    network: Network | None = None,
    credentials: str | None = None,
    name: str | None = None,
    **candidate: object,
) -> Facts:
    given = {"kind": "gradient", "outer_step": 56, "inner_step": 84, **candidate}
    return Facts(
        Candidate(**given),  # type: ignore[arg-type]
        published or Published(),
        network or Network(),
        NOW,
        credentials,
        name,
    )


def chain(**known: object) -> Network:
    return Network(**{"reason": None, "seen_at": NOW, **known})  # type: ignore[arg-type]


def aged(age_s: float, **known: object) -> Published:
    return Published(age_s=age_s, reason=None, seen_at=NOW, **known)  # type: ignore[arg-type]


def step(inner: int) -> Facts:
    return facts(published=aged(1, inner_step=inner))


def named(outer: int, checksum: str, size: int = 9) -> Facts:
    """Published gradients of an outer step, beside metadata that goes with others or with these."""
    files = {"gradients.pt": {"size_bytes": 9, "checksum": "a" * 32}}
    published = aged(1, outer_step=outer, checksum=checksum, size_bytes=size)
    return facts(published=published, metadata={**META, "files": files})


Judge = Callable[[Facts, Limits], Verdict]
SPACED = replace(SN38, min_upload_interval_s=300.0)
CASES: list[tuple[str, Judge, Facts, Limits, str]] = [
    ("enough inner steps", min_inner_step.judge, facts(inner_step=50), SN38, "pass"),
    ("too few inner steps", min_inner_step.judge, facts(inner_step=49), SN38, "block"),
    ("published inner step 60", min_inner_step.judge_published, step(60), SN38, "pass"),
    ("published inner step 20", min_inner_step.judge_published, step(20), SN38, "warn"),
    ("published inner step 0", min_inner_step.judge_published, step(0), SN38, "block"),
    ("published inner step unread", min_inner_step.judge_published, facts(), SN38, "unknown"),
    ("fresh repo", repo_age.judge, facts(published=aged(400)), SPACED, "pass"),
    (
        "stale repo is cured by an upload",
        repo_age.judge,
        facts(published=aged(2100)),
        SPACED,
        "warn",
    ),
    ("too soon", repo_age.judge, facts(published=aged(299)), SPACED, "block"),
    ("unread repo", repo_age.judge, facts(), SPACED, "unknown"),
    ("published 600 s ago", repo_age.judge_published, facts(published=aged(600)), SN38, "pass"),
    ("published 2100 s ago", repo_age.judge_published, facts(published=aged(2100)), SN38, "warn"),
    ("published 4799 s ago", repo_age.judge_published, facts(published=aged(4799)), SN38, "warn"),
    ("published 4800 s ago", repo_age.judge_published, facts(published=aged(4800)), SN38, "block"),
    ("published 4801 s ago", repo_age.judge_published, facts(published=aged(4801)), SN38, "block"),
    (
        "nothing published",
        repo_age.judge_published,
        facts(published=Published(empty=True)),
        SN38,
        "block",
    ),
    ("publication unread", repo_age.judge_published, facts(), SN38, "unknown"),
    (
        "current base",
        base_age.judge,
        facts(base_outer_step=56, network=chain(outer_step=56)),
        SN38,
        "pass",
    ),
    (
        "old base",
        base_age.judge,
        facts(base_outer_step=55, network=chain(outer_step=56)),
        SN38,
        "block",
    ),
    (
        "base beyond the network",
        base_age.judge,
        facts(base_outer_step=58, network=chain(outer_step=56)),
        SN38,
        "warn",
    ),
    (
        "just after an AllReduce",
        base_age.judge,
        facts(base_outer_step=57, network=chain(outer_step=56)),
        SN38,
        "pass",
    ),
    ("network unread", base_age.judge, facts(base_outer_step=55), SN38, "unknown"),
    ("base not handed in", base_age.judge, facts(network=chain(outer_step=56)), SN38, "unknown"),
    (
        "recent block",
        block_list.judge,
        facts(config={"block_list": [900]}, network=chain(block=1000)),
        SN38,
        "pass",
    ),
    (
        "ageing block",
        block_list.judge,
        facts(config={"block_list": [840]}, network=chain(block=1000)),
        SN38,
        "warn",
    ),
    (
        "old block",
        block_list.judge,
        facts(config={"block_list": [799]}, network=chain(block=1000)),
        SN38,
        "block",
    ),
    (
        "empty block list",
        block_list.judge,
        facts(config={"block_list": []}, network=chain(block=9)),
        SN38,
        "block",
    ),
    ("no block list", block_list.judge, facts(config={}, network=chain(block=9)), SN38, "block"),
    (
        "words as blocks",
        block_list.judge,
        facts(config={"block_list": ["7"]}, network=chain(block=9)),
        SN38,
        "block",
    ),
    ("block unread", block_list.judge, facts(config={"block_list": [1]}), SN38, "unknown"),
    ("config not handed in", block_list.judge, facts(network=chain(block=9)), SN38, "unknown"),
    ("revision", revision.judge, facts(revision="5.56.84"), SN38, "pass"),
    ("revision of a later inner step", revision.judge, facts(revision="5.56.86"), SN38, "warn"),
    ("revision of another epoch", revision.judge, facts(revision="5.55.84"), SN38, "block"),
    ("malformed revision", revision.judge, facts(revision="56-84"), SN38, "block"),
    ("revision not handed in", revision.judge, facts(), SN38, "unknown"),
    ("revision without a profile", revision.judge, facts(revision="5.56.84"), Limits(), "unknown"),
    ("metadata", metadata.judge, facts(metadata=META), SN38, "pass"),
    (
        "metadata lacks peer_id",
        metadata.judge,
        facts(metadata={"outer_step": 56, "inner_step": 84}),
        SN38,
        "block",
    ),
    (
        "metadata with an empty peer_id",
        metadata.judge,
        facts(metadata={**META, "peer_id": None}),
        SN38,
        "pass",
    ),
    (
        "metadata with a number in quotes",
        metadata.judge,
        facts(metadata={**META, "inner_step": "84"}),
        SN38,
        "pass",
    ),
    (
        "metadata with a word as step",
        metadata.judge,
        facts(metadata={**META, "inner_step": "x"}),
        SN38,
        "block",
    ),
    (
        "metadata of a later inner step",
        metadata.judge,
        facts(metadata={**META, "inner_step": 86}),
        SN38,
        "warn",
    ),
    (
        "metadata of another epoch",
        metadata.judge,
        facts(metadata={**META, "outer_step": 55}),
        SN38,
        "warn",
    ),
    ("metadata not handed in", metadata.judge, facts(), SN38, "unknown"),
    ("published metadata", metadata.judge_published, named(56, "a" * 32), SN38, "pass"),
    ("gradients of another revision", metadata.judge_published, named(56, "b" * 32), SN38, "warn"),
    ("gradients of another size", metadata.judge_published, named(56, "a" * 32, 8), SN38, "warn"),
    (
        "gradients with another digest",
        metadata.judge_published,
        named(56, "a" * 32 + "-1"),
        SN38,
        "pass",
    ),
    ("gradients of the epoch before", metadata.judge_published, named(55, "b" * 32), SN38, "pass"),
    (
        "published metadata lacks peer_id",
        metadata.judge_published,
        facts(metadata={"run": "5"}),
        SN38,
        "block",
    ),
    (
        "good file",
        gradients.judge,
        facts(files={"size_bytes": 9, "params": 3, "problems": []}),
        SN38,
        "pass",
    ),
    (
        "missing parameters",
        gradients.judge,
        facts(files={"params": 3, "warnings": ["1 missing"]}),
        SN38,
        "warn",
    ),
    (
        "poisoned file",
        gradients.judge,
        facts(files={"params": 3, "problems": ["NaN"]}),
        SN38,
        "block",
    ),
    (
        "file of no parameters",
        gradients.judge,
        facts(files={"params": 0, "problems": []}),
        SN38,
        "block",
    ),
    (
        "implausibly large",
        gradients.judge,
        facts(files={"size_bytes": 9e9, "params": 3}),
        SN38,
        "block",
    ),
    ("file not inspected", gradients.judge, facts(), SN38, "unknown"),
    (
        "inspection late",
        gradients.judge,
        facts(files={"reason": "no answer within 9 s"}),
        SN38,
        "unknown",
    ),
    (
        "same keys",
        commitment.judge,
        facts(network=chain(commitment=OURS), credentials=OURS),
        SN38,
        "pass",
    ),
    (
        "other keys",
        commitment.judge,
        facts(network=chain(commitment=OURS), credentials="128:ff"),
        SN38,
        "warn",
    ),
    (
        "short commitment",
        commitment.judge,
        facts(network=chain(commitment="127:ff"), credentials=OURS),
        SN38,
        "block",
    ),
    (
        "nothing committed",
        commitment.judge,
        facts(network=chain(commitment="0:e3b0"), credentials=OURS),
        SN38,
        "block",
    ),
    (
        "commitment not told",
        commitment.judge,
        facts(network=chain(), credentials=OURS),
        SN38,
        "unknown",
    ),
    ("read keys unknown", commitment.judge, facts(network=chain(commitment=OURS)), SN38, "unknown"),
    ("commitment unread", commitment.judge, facts(credentials=OURS), SN38, "unknown"),
    ("bucket", bucket.judge, facts(name="llama-4b-ws-4-007", network=chain(uid=7)), SN38, "pass"),
    (
        "bucket of another uid",
        bucket.judge,
        facts(name="llama-4b-ws-4-007", network=chain(uid=8)),
        SN38,
        "block",
    ),
    (
        "bucket with a fourth digit",
        bucket.judge,
        facts(name="llama-4b-ws-4-0007", network=chain(uid=7)),
        SN38,
        "block",
    ),
    (
        "bucket of another model",
        bucket.judge,
        facts(name="llama-1b-007", network=chain(uid=7)),
        SN38,
        "block",
    ),
    (
        "bucket of another form",
        bucket.judge,
        facts(name="my-bucket", network=chain(uid=8)),
        SN38,
        "block",
    ),
    ("bucket, uid unread", bucket.judge, facts(name="llama-4b-ws-4-007"), SN38, "unknown"),
    ("bucket not known", bucket.judge, facts(network=chain(uid=8)), SN38, "unknown"),
    ("finite loss", loss.judge, facts(loss=3.4), SN38, "pass"),
    ("rising loss", loss.judge, facts(loss=2.9, recent_losses=RISING), SN38, "warn"),
    ("NaN", loss.judge, facts(loss=float("nan")), SN38, "block"),
    ("loss not handed in", loss.judge, facts(), SN38, "unknown"),
    ("in the window", window.judge, facts(network=chain(block=115 * 9)), SN3, "pass"),
    ("late in the window", window.judge, facts(network=chain(block=115 * 9 + 5)), SN3, "warn"),
    ("past the window", window.judge, facts(network=chain(block=115 * 9 + 6)), SN3, "block"),
    ("block unread", window.judge, facts(), SN3, "unknown"),
    ("no windows", window.judge, facts(network=chain(block=9)), SN38, "unknown"),
]


@pytest.mark.parametrize(
    ("judge", "given", "limits", "outcome"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_rule(judge: Judge, given: Facts, limits: Limits, outcome: str) -> None:
    verdict = judge(given, limits)
    assert verdict.outcome == outcome, verdict.sentence
    assert verdict.sentence
    assert (
        verdict.outcome != "block"
        or verdict.limit is not None
        or verdict.rule in ("gradients", "block_list")
    )


def test_every_rule_was_seen_to_pass_to_warn_to_block_and_to_be_unknown() -> None:
    seen: dict[str, set[str]] = {}
    for _, judge, facts_, limits, outcome in CASES:
        seen.setdefault(judge(facts_, limits).rule, set()).add(outcome)
    # These two know no half measures; for the upload after an AllReduce every block is a warning.
    known = GateInputs(
        network=chain(uid=8, commitment=OURS),
        bucket="x-007",
        credentials="128:ff",
        limits=SN38_NUMBERS,
    )
    archive = decide(Candidate("archive", 56, 0), known, GateSettings(), now=NOW, wall=0.0)
    for verdict in archive.verdicts:
        if verdict.rule in ("bucket", "commitment"):
            seen[verdict.rule].add(verdict.outcome)
    assert seen == {rule: set(OUTCOMES) for rule in seen}
    files = Path(validators.__file__).parent.glob("*.py")
    assert seen.keys() == {path.stem for path in files if "\nRULE = " in path.read_text()}


def test_whether_shapes_were_compared_is_reported() -> None:
    notes = {
        known: gradients.judge(facts(files={"params": 3, "shapes_known": known}), SN38).sentence
        for known in (True, False, None)
    }
    assert notes[True].endswith("with the model's shapes")
    assert "shapes unknown" in notes[False]
    assert notes[None].endswith("all finite")


def test_the_inner_step_is_read_as_validators_read_it() -> None:
    """Guards against a state that we accept and they reset: they put it into a revision, and take
    it out again."""
    written = [84, 84.0, 84.5, "84", " 84 ", "", None, True, "0", -1]
    read = [metadata.read_inner_step({"inner_step": value}) for value in written]
    assert read == [84, 0, 5, 84, 84, None, None, None, 0, -1]
    assert metadata.read_inner_step({}) is None


def test_the_drawn_block_alone_has_to_be_a_whole_number() -> None:
    """Validators draw one block by the miner's uid; the others are only compared."""
    mixed = [950.5, 990, 960.0]
    drawn = {uid: random.Random(uid).sample(mixed, 1)[0] for uid in range(9)}
    for uid, block in drawn.items():
        verdict = block_list.judge(
            facts(config={"block_list": mixed}, network=chain(block=1000, uid=uid)), SN38
        )
        assert verdict.outcome == ("pass" if block == 990 else "block")


def test_blocks_per_allreduce_of_the_master_change_the_epoch_and_the_age_limit() -> None:
    known = in_force(SN38, chain(blocks_per_allreduce=750))
    ages = {
        age: facts(config={"block_list": [1000 - age]}, network=chain(block=1000))
        for age in (201, 375, 376)
    }
    assert [block_list.judge(ages[age], known).outcome for age in ages] == ["pass", "warn", "block"]
    assert [block_list.judge(ages[age], SN38).outcome for age in ages] == [
        "block",
        "block",
        "block",
    ]
    scored = [epoch_scored(None, 56, since, known) for since in (374, 375)]
    assert [epoch.outer_step for epoch in scored if epoch is not None] == [55, 56]


def test_a_block_says_when_asking_again_can_help() -> None:
    assert min_inner_step.judge(facts(inner_step=15), SN38).retry_after_steps == 35
    assert repo_age.judge(facts(published=aged(100)), SPACED).retry_after_s == 200
    late = window.judge(facts(network=chain(block=115 * 9 + 10)), SN3)
    assert late.retry_after_s == (115 - 10) * 12
    assert "TOO_LATE" in late.sentence


def test_the_operators_minimum_stands_beside_what_validators_accept() -> None:
    """Guards against 50 steps without a score after each AllReduce, and no word of why."""
    blocked = min_inner_step.judge(facts(inner_step=15), SN38)
    assert (
        blocked.note
        == "this version of the validators accepts inner step 1 and above; your minimum is 50"
    )
    archive = aged(60, inner_step=0)
    waiting = min_inner_step.judge(facts(inner_step=15, published=archive), SN38)
    assert waiting.sentence == blocked.sentence
    assert str(waiting.note).endswith("([gate] min_inner_step_after_allreduce)")
    chosen = replace(SN38, min_inner_step_after_allreduce=5)
    judged = [
        min_inner_step.judge(facts(inner_step=inner, published=published), chosen).outcome
        for inner, published in ((4, archive), (5, archive), (5, aged(60, inner_step=60)))
    ]
    assert judged == ["block", "pass", "block"]
    assert min_inner_step.judge(facts(inner_step=15), Limits()).note is None


def test_the_block_grows_between_two_readings_of_the_chain() -> None:
    read_long_ago = chain(block=1000, seen_at=NOW - 1201)
    assert (
        block_list.judge(facts(config={"block_list": [900]}, network=read_long_ago), SN38).seen
        == 200
    )
    old = chain(block=1000, seen_at=NOW - 1213)
    assert (
        block_list.judge(facts(config={"block_list": [900]}, network=old), SN38).outcome == "block"
    )


def test_the_commitment_itself_is_in_no_fingerprint() -> None:
    secret = "0123456789abcdef" * 8
    assert secret[:8] not in str(commitment.fingerprint(secret))
    assert commitment.fingerprint(None) is None


def test_a_second_subnet_is_data_and_one_rule() -> None:
    known = GateInputs(
        network=chain(block=115 * 9 + 60), limits=load_profile("sn3").limits, written_monotonic=NOW
    )
    gate = loading.load(profile=load_profile("sn3").settings, env={}).config.gate
    decision = decide(Candidate("gradient", 9, 30), known, gate, now=NOW, wall=0.0)
    assert not decision.allowed
    assert "TOO_LATE" in decision.reason
    assert {name for name, _ in gate_rules(facts(), SN38)}.isdisjoint({"window"})


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
    for limits in (SN38, SN3, Limits()):
        for rules in (gate_rules, audit_rules):
            for rule, judge in rules(given_facts, limits):
                verdict = judge(given_facts, limits)
                assert verdict.rule == rule
                assert verdict.outcome in OUTCOMES
                json.dumps(verdict.as_dict())
