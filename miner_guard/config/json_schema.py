"""Builds the JSON Schema of guard.toml for editors: the types and limits that `loading` checks, and
the docstrings of the settings."""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any

from pydantic import TypeAdapter

from miner_guard.config import Config
from miner_guard.config.loading import sections


def document() -> dict[str, Any]:
    """The schema (draft 2020-12). Like the guard, it rejects unknown sections and keys."""
    schema = TypeAdapter(Config).json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "guard.toml"
    schema["description"] = "Settings of miner-guard."
    schema["additionalProperties"] = False
    for cls in sections().values():
        table = schema["$defs"][cls.__name__]
        table["additionalProperties"] = False
        for key, words in _docstrings(cls).items():
            if key in table["properties"]:
                table["properties"][key]["description"] = words
        for setting in table["properties"].values():
            setting.pop("title", None)
    return schema


def _docstrings(cls: type) -> dict[str, str]:
    """The docstring below each field of a dataclass, joined into one line."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(body, ast.ClassDef)
    found: dict[str, str] = {}
    for field, below in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
            and isinstance(below.value.value, str)
        ):
            found[field.target.id] = " ".join(below.value.value.split())
    return found
