"""Layout of a repo: the keys under which a miner publishes and a validator reads, as a profile's
`[limits]` names them. Pure."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from miner_guard.validators.limits import Limits


@dataclass(frozen=True)
class Layout:
    """Keys with fields such as `{outer_step}`; None for a document that the network does not
    have."""

    gradients: str
    config: str | None = None
    metadata: str | None = None

    @classmethod
    def of(cls, limits: Limits) -> Layout:
        """The profile's layout. If it names no key for the gradients, its other keys replace those
        of `USUAL`; if it does, any document that it names no key for does not exist on that
        network."""
        if limits.gradients_key is None:
            config, metadata = limits.config_key, limits.metadata_key
            return cls(USUAL.gradients, config or USUAL.config, metadata or USUAL.metadata)
        return cls(limits.gradients_key, limits.config_key, limits.metadata_key)

    @property
    def file(self) -> str:
        """The name of the gradients file, for messages."""
        return self.gradients.rpartition("/")[2]

    @property
    def prefix(self) -> str:
        """The prefix shared by the keys of all gradients files."""
        return self.gradients.partition("{")[0]

    def outer_step_of(self, key: str) -> int | None:
        """The outer step in a gradients file's key; None for another file's key, or one without a
        step."""
        match = re.fullmatch(_expression(self.gradients), key)
        step = None if match is None else match.groupdict().get("outer_step")
        return int(step) if step is not None and step.isdecimal() else None

    def gradients_of(self, outer_step: int) -> str | None:
        """Key of `outer_step`'s gradients; None if the key has fields besides the step."""
        return _of_step(self.gradients, outer_step)

    def config_of(self, outer_step: int) -> str | None:
        """Key of `outer_step`'s config; None if the layout has no config, or if its key has
        fields besides the step."""
        return None if self.config is None else _of_step(self.config, outer_step)


USUAL = Layout("epoch-{outer_step}/gradients.pt", "epoch-{outer_step}/config.json", "metadata.json")
"""The layout of subnet 38, which the demo writes and which probes expect unless a profile says
otherwise."""


def filled(key: str | None, names: Mapping[str, Any]) -> str | None:
    """The key with its fields replaced. Raises KeyError for a field that `names` lacks."""
    return None if key is None else key.format(**names)


def _of_step(key: str, outer_step: int) -> str | None:
    try:
        return key.format(outer_step=outer_step)
    except KeyError:
        return None


def _expression(key: str) -> str:
    parts = string.Formatter().parse(key)
    return "".join(
        re.escape(text) + ("" if name is None else f"(?P<{name}>[^/]+?)")
        for text, name, _, _ in parts
    )
