"""The files of a repo as validators read them: their keys, which a profile's `[limits]` name, and
metadata.json, the root document that validators start from. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from miner_guard.validators.limits import Limits


@dataclass(frozen=True)
class Layout:
    """The keys of what validators read, with `{outer_step}` for the step. By default those of
    subnet 38, which the demo writes too."""

    gradients: str = "epoch-{outer_step}/gradients.pt"
    config: str = "epoch-{outer_step}/config.json"
    metadata: str = "metadata.json"

    @classmethod
    def of(cls, limits: Limits) -> Layout:
        """The profile's layout; a key that it does not name is the usual one."""
        named = (limits.gradients_key, limits.config_key, limits.metadata_key)
        usual = (cls.gradients, cls.config, cls.metadata)
        return cls(*(key or other for key, other in zip(named, usual, strict=True)))

    @property
    def file(self) -> str:
        """The name of the gradients file, for messages."""
        return self.gradients.rpartition("/")[2]

    def gradients_of(self, outer_step: int) -> str:
        """Key of `outer_step`'s gradients."""
        return self.gradients.format(outer_step=outer_step)

    def config_of(self, outer_step: int) -> str:
        """Key of `outer_step`'s config."""
        return self.config.format(outer_step=outer_step)


USUAL = Layout()


@dataclass(frozen=True)
class RootMetadata:
    """The fields of metadata.json that probes and audit read; None for one that is
    missing or has the wrong type. The rules do not use this: they parse the document as validators
    do (`read_inner_step`)."""

    outer_step: int | None = None
    inner_step: int | None = None
    run: str | int | None = None

    @classmethod
    def of(cls, document: Mapping[str, Any] | None) -> RootMetadata:
        """The document as read; never raises."""
        fields = document or {}
        run = fields.get("run")
        return cls(
            _whole(fields.get("outer_step")),
            _whole(fields.get("inner_step")),
            run if isinstance(run, (str, int)) else None,
        )


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def read_inner_step(metadata: Mapping[str, Any] | None) -> int | None:
    """The inner step as validators parse it: `int()` of the text after its last dot. None if that
    raises.

    They format it into a revision and parse it back (R:433), so they read 84.5 as 5, 84.0 as 0 and
    "84" as 84.
    """
    if metadata is None or "inner_step" not in metadata:
        return None
    try:
        return int(f"{metadata['inner_step']}".split(".")[-1])
    except ValueError:
        return None
