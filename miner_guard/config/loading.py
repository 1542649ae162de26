"""Loads the settings from defaults, profile, guard.toml, environment and flags; later sources win.

`load` checks all values before the guard uses any. An error names the file (or variable), the key,
the value seen and what is allowed.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, ValidationError, create_model

from miner_guard.config import BadConfig, BadFlag, Config, read_toml, sections

PREFIX = "MINER_GUARD_"
_NOT_SETTINGS = {"MINER_GUARD_STATE_DIR"}
_ADVICE = re.compile(r"^(Input should be|Value error,) ")

SECRET = frozenset({"alerts.urls", "alerts.heartbeat_url", "http.token"})
"""Settings whose values are always secret."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """The effective configuration and, for each `section.key`, where its value came from."""

    config: Config
    origins: Mapping[str, str]

    def rows(self) -> Iterator[tuple[str, Any, str]]:
        """`section.key`, value and origin of each setting, in `Config`'s order."""
        for section, table in dataclasses.asdict(self.config).items():
            for key, value in table.items():
                yield f"{section}.{key}", value, self.origins[f"{section}.{key}"]


_FIELDS: Any = {name: (cls, cls()) for name, cls in sections().items()}
_Sections: Any = create_model("guard.toml", __config__=ConfigDict(extra="forbid"), **_FIELDS)


def schema() -> dict[str, Any]:
    """The JSON Schema of guard.toml, for editors; descriptions are the docstrings of settings."""

    config = ConfigDict(extra="forbid", use_attribute_docstrings=True)
    model: Any = create_model("guard.toml", __config__=config, **_FIELDS)
    document: dict[str, Any] = model.model_json_schema()
    # Before 2.14 pydantic refuses a section's unknown key, but its schema allows it.
    for cls in sections().values():
        document["$defs"][cls.__name__]["additionalProperties"] = False
    return document


def load(
    file: Path | None = None,
    *,
    profile: Mapping[str, Any] | None = None,
    profile_origin: str = "profile",
    env: Mapping[str, str] | None = None,
    dotenv: tuple[str, Mapping[str, str]] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> Settings:
    """Merge all layers into checked settings.

    `profile` is a document with the structure of guard.toml. `dotenv` is the name of the miner's
    `.env` and its variables, which the environment overrides. `flags` maps `section.key` to a
    value. Without `file`, `./guard.toml` is read if it exists. Raises BadConfig, or BadFlag for a
    flag.
    """
    path = Path("guard.toml") if file is None else file
    has_file = file is not None or path.is_file()
    variables = {} if dotenv is None else {dotenv[0]: dotenv[1]}
    variables["environment"] = os.environ if env is None else env
    layers = [(profile_origin, profile or {}), (str(path), read_toml(path) if has_file else {})]
    layers += [(where, _variables(where, values)) for where, values in variables.items()]
    layers.append(
        ("flag", _nested((name.split("."), value) for name, value in (flags or {}).items()))
    )
    merged: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for where, document in layers:
        for section, table in document.items():
            origins[section] = where
            for key in table if isinstance(table, Mapping) else ():
                name = f" {PREFIX}{section}__{key}".upper() if where in variables else ""
                origins[f"{section}.{key}"] = where + name
        merged = _laid_over(merged, document)
    try:
        loaded = _Sections.model_validate(merged)
    except ValidationError as error:
        raise _refusal(error, origins) from error
    config = Config(**{name: getattr(loaded, name) for name in sections()})
    names = [f"{s}.{f.name}" for s, cls in sections().items() for f in dataclasses.fields(cls)]
    return Settings(config, {name: origins.get(name, "default") for name in names})


def _laid_over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Both documents in one; `above` wins, key by key."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            value = _laid_over(old, value)
        merged[key] = value
    return merged


def _nested(values: Iterable[tuple[Sequence[str], Any]]) -> dict[str, dict[str, Any]]:
    """A document of the values, each with its section and its key."""
    document: dict[str, dict[str, Any]] = {}
    for (section, key), value in values:
        document.setdefault(section, {})[key] = value
    return document


def _variables(where: str, variables: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """The settings in variables; an empty one is None. Raises BadConfig for a variable with our
    prefix that is not a setting."""
    values = []
    for name, value in variables.items():
        if not name.startswith(PREFIX) or name in _NOT_SETTINGS:
            continue
        section, _, key = name[len(PREFIX) :].lower().partition("__")
        if section not in sections() or not key:
            raise BadConfig(
                f"{where}: {name} is not a setting; {_meant(section, sections())}use the form "
                f"{PREFIX}SECTION__KEY; sections: {', '.join(sections())}"
            )
        values.append(((section, key), value or None))
    return _nested(values)


def _refusal(error: ValidationError, origins: Mapping[str, str]) -> BadConfig:
    """What is wrong with the first setting that is not allowed."""
    first, *others = error.errors(include_url=False)
    section, key = (str(part) for part in (*first["loc"], "")[:2])
    dotted, section_types = f"{section}.{key}", sections()
    where = origins.get(dotted) or origins[section]
    if section not in section_types:
        meant = _meant(section, section_types)
        words = f"unknown section [{section}]; {meant}allowed: {', '.join(section_types)}"
    elif not key:
        words = f"{section} is not a section; write it as [{section}] with keys below it"
    elif key not in (keys := [field.name for field in dataclasses.fields(section_types[section])]):
        meant = _meant(key, keys)
        words = f"unknown key {dotted}; {meant}allowed in [{section}]: {', '.join(keys)}"
    else:
        same = [first, *(each for each in others if each["loc"][:2] == first["loc"][:2])]
        allowed = " or ".join(dict.fromkeys(_ADVICE.sub("", each["msg"]) for each in same))
        words = f"{dotted} = {first['input']!r} is not allowed; allowed: {allowed}"
    return (BadFlag if where == "flag" else BadConfig)(f"{where}: {words}")


def _meant(word: str, allowed: Iterable[str]) -> str:
    """`did you mean expect? `, or an empty string if no allowed name is similar."""
    near = difflib.get_close_matches(word, list(allowed), n=2, cutoff=0.7)
    return f"did you mean {' or '.join(near)}? " if near else ""
