"""How many GPUs must be there, and who says so. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Expectation:
    """GPUs that must be there."""

    count: int | None
    """None: nobody expects any and none is known to be there, so a CPU run is no error."""

    origin: str
    """Who expects it, for people."""

    @property
    def wanted(self) -> bool:
        """A run on the CPU would be an accident."""
        return bool(self.count)


def expected(
    setting: int | None, last_run: int | None, profile: int | None, present: int | None
) -> Expectation:
    """The first that is known of: the setting, this host's count at the last run, the profile's
    demand, what is there.

    A last run on a host without a GPU (0) expects nothing, so that adding one is no surprise.
    """
    if setting is not None:
        return Expectation(setting, "[gpu] expect")
    if last_run:
        return Expectation(last_run, "this host at the last run")
    if profile is not None:
        return Expectation(profile, "the profile")
    if present:
        return Expectation(present, "what is there")
    return Expectation(None, "nobody")
