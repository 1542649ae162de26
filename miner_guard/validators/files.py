"""The files of a repo as validators read them: their keys in subnet 38, which the demo writes too,
and metadata.json, the root document that validators start from. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

METADATA = "metadata.json"
"""The root copy is the pointer that validators start from; each epoch's folder has a copy too."""

GRADIENTS = "gradients.pt"


def gradients_key(outer_step: int) -> str:
    """Key of the gradients of `outer_step`."""
    return f"epoch-{outer_step}/{GRADIENTS}"


def config_key(outer_step: int) -> str:
    """Key of the config of `outer_step`."""
    return f"epoch-{outer_step}/config.json"


def whole(document: Mapping[str, Any] | None, name: str) -> int | None:
    """The field if it is a whole number. The rules do not use this: they parse the document as
    validators do (`read_inner_step`)."""
    value = (document or {}).get(name)
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
