"""The table of states: a run can end from every state, and never leaves the final one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miner_guard.guard.states import TRANSITIONS, IllegalTransition, RunEvent, State, after


def test_every_state_but_the_last_can_end() -> None:
    """A stop must lead somewhere from every state."""
    assert all(
        after(state, RunEvent.FINISHED) is State.DONE for state in State if state is not State.DONE
    )


def test_no_transition_leaves_the_final_state() -> None:
    assert not [state for state, _ in TRANSITIONS if state is State.DONE]


def test_every_state_is_reached_from_the_first() -> None:
    reached = {State.STARTING}
    for _ in State:
        reached |= {to for (state, _), to in TRANSITIONS.items() if state in reached}
    assert reached == set(State)


@given(st.lists(st.sampled_from(RunEvent), max_size=30))
def test_a_refused_event_changes_nothing(events: list[RunEvent]) -> None:
    state = State.STARTING
    for event in events:
        if (state, event) in TRANSITIONS:
            state = after(state, event)
        else:
            with pytest.raises(IllegalTransition):
                after(state, event)
        assert state in State
