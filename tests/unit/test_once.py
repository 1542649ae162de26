"""Reports that must not repeat, either until cleared or for a while; and reports of a full disk."""

from __future__ import annotations

import errno

import pytest

from miner_guard.record.events import WriteOutage, not_stored
from miner_guard.system.clock import Once, OncePer

_FULL = OSError(errno.ENOSPC, "No space left on device")
_DENIED = OSError(errno.EACCES, "Permission denied")


def test_a_subject_is_reported_once_until_it_clears() -> None:
    once = Once()
    assert [once.first("disk"), once.first("disk"), once.first("memory")] == [True, False, True]
    assert once.clear("disk")
    assert not once.clear("disk")
    assert once.first("disk")
    assert sorted(map(str, once)) == ["disk", "memory"]


def test_a_bounded_once_reports_no_further_subjects() -> None:
    """Memory must not grow with names that a miner makes up."""
    once = Once(max_subjects=2)
    assert [once.first(name) for name in "abca"] == [True, True, False, False]


def test_a_report_repeats_after_its_interval_or_when_its_content_changes() -> None:
    per = OncePer(60.0)
    assert [per.ask(0.0, "a"), per.ask(59.9, "a"), per.ask(59.9, "b")] == [True, False, True]
    assert [per.ask(100.0, "b"), per.ask(119.9, "b")] == [False, True]
    assert (per.take_left_out(), per.take_left_out()) == (2, 0)
    per.clear()
    assert per.ask(120.0, "b")


@pytest.mark.parametrize(("error", "event"), [(_FULL, "disk_full"), (_DENIED, "guard_degraded")])
def test_an_outage_of_a_file_is_two_events(error: OSError, event: str) -> None:
    """There must be neither a line per failed write nor a recovery without a warning."""
    outage = WriteOutage("host.json")
    assert outage.succeeded() is None
    first = outage.failed(error)
    assert first is not None
    assert first.name == event
    assert outage.failed(error) is None
    back = outage.succeeded(2)
    assert back is not None
    assert (back.name, back.fields["lost"]) == (event, 2)
    assert outage.succeeded() is None


def test_a_single_lost_write_names_the_full_disk_in_a_field() -> None:
    assert not_stored("host.json", _FULL).fields["disk_full"] is True
    assert not_stored("host.json", _DENIED).fields["disk_full"] is False
