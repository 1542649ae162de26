"""Loads the settings from defaults, profile, guard.toml, environment and flags; later sources win.

`load` checks all values before the guard uses any. An error names the file (or variable), the key,
the value seen and what is allowed.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from miner_guard.config import Config, Range

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PREFIX = "MINER_GUARD_"
_NOT_SETTINGS = {"MINER_GUARD_STATE_DIR"}
_MAX_CHARS, _MAX_DOTS = 1_000_000, 100

SECRET = frozenset({"alerts.urls", "alerts.heartbeat_url", "http.token"})
"""Settings whose values are always secret."""


class BadConfig(Exception):
    """The configuration can't be used; the message is human-readable. `run` exits with 78."""


class BadFlag(BadConfig):
    """A flag has an invalid value. The exit code is 64, because the error is on the command line,
    not in the configuration."""


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


def sections() -> dict[str, type]:
    """Each section's dataclass by name, in `Config`'s order."""
    hints = typing.get_type_hints(Config)
    return {f.name: hints[f.name] for f in dataclasses.fields(Config)}


def read_toml(path: Path) -> dict[str, Any]:
    """Read the document at `path`. Raises BadConfig if it can't be read or parsed, or is made to
    keep the parser busy: its time grows with the square of a key's parts."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(_MAX_CHARS + 1)
        if len(text) > _MAX_CHARS or any(line.count(".") > _MAX_DOTS for line in text.split("\n")):
            raise BadConfig(
                f"{path}: longer than {_MAX_CHARS:,} characters, or a line has more than "
                f"{_MAX_DOTS} dots; this is no settings file"
            )
        return tomllib.loads(text)
    except OSError as error:
        raise BadConfig(f"{path}: cannot be read: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadConfig(f"{path}: not valid TOML: {error}") from error
    except RecursionError as error:
        raise BadConfig(f"{path}: not valid TOML: values are nested too deeply") from error


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
    merged: dict[str, dict[str, Any]] = {name: {} for name in sections()}
    origins: dict[str, str] = {}
    if profile:
        _add_document(merged, origins, profile, profile_origin)
    path = file if file is not None else Path("guard.toml")
    if file is not None or path.is_file():
        _add_document(merged, origins, read_toml(path), str(path))
    if dotenv is not None:
        _add_environment(merged, origins, dotenv[1], dotenv[0])
    _add_environment(merged, origins, os.environ if env is None else env, "environment")
    for dotted, value in (flags or {}).items():
        section, key = dotted.split(".", 1)
        try:
            merged[section][key] = _checked(section, key, value, "flag", strict=False)
        except BadConfig as error:
            raise BadFlag(str(error)) from error
        origins[dotted] = "flag"
    config = Config(**{name: cls(**merged[name]) for name, cls in sections().items()})
    names = [f"{s}.{f.name}" for s, cls in sections().items() for f in dataclasses.fields(cls)]
    return Settings(config, {name: origins.get(name, "default") for name in names})


def _add_document(
    merged: dict[str, dict[str, Any]],
    origins: dict[str, str],
    document: Mapping[str, Any],
    where: str,
) -> None:
    for section, table in document.items():
        if section not in merged:
            raise BadConfig(
                f"{where}: unknown section [{section}]; {_meant(section, merged)}"
                f"allowed: {', '.join(merged)}"
            )
        if not isinstance(table, Mapping):
            raise BadConfig(
                f"{where}: {section} is not a section; write it as [{section}] with keys below it"
            )
        for key, value in table.items():
            merged[section][key] = _checked(section, key, value, where, strict=True)
            origins[f"{section}.{key}"] = where


def _add_environment(
    merged: dict[str, dict[str, Any]], origins: dict[str, str], env: Mapping[str, str], where: str
) -> None:
    for name, text in env.items():
        if not name.startswith(PREFIX) or name in _NOT_SETTINGS:
            continue
        section, _, key = name[len(PREFIX) :].lower().partition("__")
        if section not in merged or not key:
            raise BadConfig(
                f"{where}: {name} is not a setting; {_meant(section, merged)}use the form "
                f"{PREFIX}SECTION__KEY; sections: {', '.join(merged)}"
            )
        merged[section][key] = _checked(section, key, text, f"{where}, {name}", strict=False)
        origins[f"{section}.{key}"] = f"{where} {name}"


def _checked(section: str, key: str, value: Any, where: str, *, strict: bool) -> Any:
    cls = sections()[section]
    every = typing.get_type_hints(cls, include_extras=True)
    hints = {field.name: every[field.name] for field in dataclasses.fields(cls)}
    if key not in hints:
        raise BadConfig(
            f"{where}: unknown key {section}.{key}; {_meant(key, hints)}"
            f"allowed in [{section}]: {', '.join(hints)}"
        )
    hint = hints[key]
    if isinstance(value, str) and not strict:
        value = _from_text(hint, value)
    if isinstance(value, list):
        value = tuple(value)
    if strict and isinstance(value, int) and not isinstance(value, bool) and not _takes_int(hint):
        value = float(value)
    plain = plain_value(hint, value, strict=strict)
    if plain is not UNSURE:
        return plain
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(hint).validate_python(value, strict=strict)
    except ValidationError as error:
        raise BadConfig(
            f"{where}: {section}.{key} = {value!r} is not allowed; allowed: {describe(hint)}"
        ) from error


def _meant(word: str, allowed: Iterable[str]) -> str:
    """`did you mean expect? `, or an empty string if no allowed name is similar."""
    import difflib

    near = difflib.get_close_matches(word, list(allowed), n=2, cutoff=0.7)
    return f"did you mean {' or '.join(near)}? " if near else ""


def _from_text(hint: Any, text: str) -> Any:
    """Convert the text of an environment variable or a flag: empty text means None, and commas
    separate the items of a list or the `name=number` pairs of a table."""
    outer = typing.get_origin(_bare(hint))
    if text == "" and type(None) in _alternatives(hint):
        return None
    if outer is tuple:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if outer is dict:
        parts = [part.partition("=") for part in text.split(",") if part.strip()]
        # Keep text that is not a table, so that the error quotes it unchanged.
        return (
            {name.strip(): value.strip() for name, _, value in parts}
            if all(sign for _, sign, _ in parts)
            else text
        )
    return text


UNSURE: Any = object()
_PLAIN_NUMBER = re.compile(r"[0-9]{1,15}(\.[0-9]{1,15})?")


def plain_value(hint: Any, value: Any, *, strict: bool) -> Any:
    """Return the setting's value if it is clearly valid, otherwise `UNSURE`.

    pydantic decides the unsure cases. Most commands never import pydantic, because importing it
    takes longer than the rest of a short command. `strict`: do not convert text to other types."""
    if value is None or isinstance(value, tuple):
        fits = type(None) in _alternatives(hint) if value is None else _is_texts(hint, value)
        return value if fits else UNSURE
    alternatives = typing.get_args(hint) if _is_union(hint) else (hint,)
    answers = [_plain_in(each, value, strict=strict) for each in alternatives]
    fitting = [answer for answer in answers if answer is not UNSURE]
    return fitting[0] if len(fitting) == 1 else UNSURE


def _is_texts(hint: Any, value: tuple[Any, ...]) -> bool:
    return hint == tuple[str, ...] and all(type(each) is str for each in value)


def _plain_in(hint: Any, value: Any, *, strict: bool) -> Any:
    """`plain_value` for one alternative of a union."""
    kind = _bare(hint)
    if typing.get_origin(kind) is typing.Literal:
        return value if type(value) is str and value in typing.get_args(kind) else UNSURE
    if type(value) is str and kind is not str and not strict:
        value = _number_or_bool(kind, value)
    if kind not in (bool, int, float, str) or type(value) is not kind:
        return UNSURE
    limits = hint.__metadata__ if kind is not hint else ()
    return value if all(_within(each, value) for each in limits) else UNSURE


def _number_or_bool(kind: Any, text: str) -> Any:
    if kind is bool:
        return {"true": True, "false": False}.get(text, UNSURE)
    whole = kind is int and text.isascii() and text.isdecimal()
    return kind(text) if whole or (kind is float and _PLAIN_NUMBER.fullmatch(text)) else UNSURE


def _within(limits: Range, value: float) -> bool:
    return (
        value - value == 0
        and (limits.gt is None or value > limits.gt)
        and (limits.ge is None or value >= limits.ge)
        and (limits.le is None or value <= limits.le)
    )


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def _bare(hint: Any) -> Any:
    return typing.get_args(hint)[0] if typing.get_origin(hint) is typing.Annotated else hint


def _alternatives(hint: Any) -> tuple[Any, ...]:
    if _is_union(hint):
        return tuple(_bare(a) for a in typing.get_args(hint))
    return (_bare(hint),)


def _takes_int(hint: Any) -> bool:
    return any(a is int for a in _alternatives(hint))


def describe(hint: Any) -> str:
    """Describe which values a setting accepts: `a number > 0`, `one of enforce, shadow`."""
    names = {
        str: "text",
        bool: "true or false",
        type(None): "nothing",
        int: "a whole number",
        float: "a number",
    }
    if typing.get_origin(hint) is typing.Annotated:
        kind, *extra = typing.get_args(hint)
        limits = [
            f"{sign} {value:g}"
            for r in extra
            for sign, value in ((">", r.gt), (">=", r.ge), ("<=", r.le))
            if value is not None
        ]
        return " ".join([describe(kind), " and ".join(limits)])
    outer = typing.get_origin(hint)
    if outer is typing.Literal:
        return "one of " + ", ".join(map(str, typing.get_args(hint)))
    if _is_union(hint):
        return " or ".join(describe(a) for a in typing.get_args(hint))
    if outer is tuple:
        return "a list of " + describe(typing.get_args(hint)[0])
    if outer is dict:
        return "a table of numbers by name (in the environment: NAME=NUMBER,NAME=NUMBER)"
    return names.get(hint, str(hint))
