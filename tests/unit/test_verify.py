"""Whether the repo shows a reported push: verified, refuted, or unknown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miner_guard.record.redaction import MASK
from miner_guard.uploads.pushes import Reported, verify
from miner_guard.validators.facts import Published

OLD = Published(age_s=900.0, reason=None, outer_step=56, inner_step=50, checksum="a" * 40)


@pytest.mark.parametrize(
    ("after", "verified", "words"),
    [
        (Published(empty=True), False, "the repo is empty"),
        (Published(age_s=3, reason=None, size_bytes=0), False, "is empty"),
        (
            Published(age_s=3, reason=None, outer_step=57, revision="5.57.0"),
            None,
            "followed by 5.57.0",
        ),
        # An earlier run left a higher step: pushes that never arrive were all "followed" by it, and
        # none was a failure.
        (
            Published(age_s=9000, reason=None, outer_step=200, revision="4.200.7"),
            False,
            "did not change",
        ),
        (
            Published(age_s=3, reason=None, outer_step=55),
            False,
            "says outer step 55, not 56 as the miner reported",
        ),
        (
            Published(age_s=3, reason=None, outer_step=56, inner_step=50),
            False,
            "says inner step 50, not 51 as the miner reported",
        ),
        (
            Published(age_s=3, reason=None, outer_step=56, inner_step=51, checksum="a" * 40),
            False,
            "did not change",
        ),
        (Published(age_s=3, reason=None, outer_step=56, inner_step=53), True, "3s old"),
    ],
)
def test_a_push_is_verified_by_what_the_repo_shows(
    after: Published, verified: bool | None, words: str
) -> None:
    result = verify(OLD, after, Reported(56, 51, 20.0))
    assert result.verified is verified
    assert words in result.detail


def test_other_content_than_the_publisher_read_back_is_refuted() -> None:
    after = Published(age_s=3, reason=None, outer_step=56, inner_step=51, checksum="b" * 40)
    assert verify(None, after, Reported(56, 51, 20.0, checksum="b" * 40)).verified is True
    assert verify(None, after, Reported(56, 51, 20.0, checksum="b" * 32)).verified is True
    # Redaction may mistake a whole sha256 for a key; a mask is not a checksum.
    assert verify(None, after, Reported(56, 51, 20.0, checksum=MASK)).verified is True
    result = verify(None, after, Reported(56, 51, 20.0, checksum="c" * 32))
    assert result.verified is False
    assert "checksum bbbbbbbbbbbb, but the miner read cccccccccccc" in result.detail
    later = Published(age_s=3, reason=None, outer_step=56, inner_step=60, checksum="b" * 40)
    assert verify(None, later, Reported(56, 51, 20.0, checksum="c" * 40)).verified is True


LATER = {"reason": None, "outer_step": 56, "seen_at": 60.0}


@pytest.mark.parametrize(
    ("after", "verified"),
    [
        (Published(age_s=960.0, inner_step=50, **LATER), False),
        (Published(age_s=10.0, inner_step=51, **LATER), True),
        # The earlier probe already saw the files; the log line came later.
        (Published(age_s=960.0, inner_step=51, **LATER), True),
    ],
)
def test_a_push_of_which_only_the_end_is_known_is_judged_by_the_previous_probe(
    after: Published, verified: bool
) -> None:
    before = Published(
        age_s=900.0, reason=None, outer_step=56, inner_step=after.inner_step, seen_at=0.0
    )
    assert verify(before, after, Reported(56, 51, None)).verified is verified


STEPS = st.none() | st.integers(0, 3)
LOOKS = st.builds(
    Published,
    age_s=st.none() | st.floats(0, 60),
    reason=st.none(),
    empty=st.booleans(),
    seen_at=st.just(100.0),
    outer_step=STEPS,
    inner_step=STEPS,
    size_bytes=st.none() | st.integers(0, 2),
    checksum=st.none() | st.sampled_from(["a" * 32, "b" * 32]),
)


@given(before=st.none() | LOOKS, after=LOOKS, outer=STEPS, inner=STEPS, since=st.floats(0, 60))
def test_nothing_is_verified_and_nothing_followed_that_is_older_than_the_push(
    before: Published | None, after: Published, outer: int | None, inner: int | None, since: float
) -> None:
    result = verify(before, after, Reported(outer, inner, since))
    if result.verified or result.superseded:
        assert not after.empty
        assert after.age_s is not None
        assert after.age_s <= since + 5.0
        assert after.size_bytes != 0
    if result.verified:
        assert outer is None or after.outer_step in (None, outer)
        assert None in (inner, after.inner_step) or after.inner_step >= inner  # type: ignore[operator]
    if after.age_s is not None and after.age_s > since + 5.0:
        assert result.verified is False
