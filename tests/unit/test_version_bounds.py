"""The packages that `make test-lowest` and `make test-newest` install."""

from __future__ import annotations

from tests.support.version_bounds import constraints, promised


def test_the_lowest_end_pins_what_the_guard_and_each_extra_need() -> None:
    """Otherwise users could be promised a lower bound that no test has run with."""
    pinned = {line.partition("==")[0] for line in constraints("lowest")}
    assert pinned == {need.name for need in promised()}
    assert {"structlog", "starlette", "torch", "opentelemetry-sdk"} <= pinned
    assert "pytest" not in pinned


def test_every_bound_is_a_version_that_the_requirement_allows() -> None:
    lowest = dict(line.split("==") for line in constraints("lowest"))
    for need in promised():
        assert need.specifier.contains(lowest[need.name]), need


def test_the_newest_end_keeps_the_pins_and_lets_the_rest_float() -> None:
    pins = [line.partition("==")[0] for line in constraints("newest")]
    assert pins == ["torch"]
