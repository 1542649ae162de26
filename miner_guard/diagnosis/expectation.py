"""The number of GPUs that must be present, and its source. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Expectation:
    """The number of GPUs that must be present."""

    count: int | None
    """None if no source gives a count and no GPU is known to be present; a CPU run is then not an
    error."""

    origin: str
    """The source of the number, as shown in messages."""

    @property
    def expects_gpus(self) -> bool:
        """True if GPUs are expected, so that a CPU run would be an accident."""
        return bool(self.count)


def expected(
    setting: int | None, last_run: int | None, profile: int | None, present: int | None
) -> Expectation:
    """Return the first of these that is known: the setting, this host's count from the last run,
    the profile's minimum, the GPUs present.

    A count of 0 from the last run is ignored, so adding a GPU raises no finding.
    """
    if setting is not None:
        return Expectation(setting, "[gpu] expect")
    if last_run:
        return Expectation(last_run, "this host's last run")
    if profile is not None:
        return Expectation(profile, "the profile")
    if present:
        return Expectation(present, "the GPUs present")
    return Expectation(None, "no source")
