"""`miner-guard config`: the effective settings and where each came from."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from miner_guard.cli import command
from miner_guard.cli.options import (
    DEFAULT_NAME,
    CommandContext,
    Config,
    Json,
    Name,
    State,
    open_context,
    settings_of_profile,
)
from miner_guard.cli.output import echo
from miner_guard.exits import CONFIG, Refused
from miner_guard.record.words import counted

_COLUMN = 44


@command("Understand", "miner-guard config --changed", "miner-guard config --validate guard.toml")
def config(
    changed: Annotated[
        bool, typer.Option("--changed", help="Show only settings that differ from their defaults.")
    ] = False,
    validate: Annotated[
        Optional[Path],
        typer.Option(metavar="FILE", help="Check FILE and exit; exit code 78 if it is invalid."),
    ] = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON Schema of guard.toml, for editors.")
    ] = False,
    config: Config = None,
    name: Name = DEFAULT_NAME,
    state_dir: State = None,
    as_json: Json = False,
) -> None:
    """Show the effective settings and where each came from; secrets are masked."""
    from miner_guard.record.redaction import Redactor
    from miner_guard.uploads.repos import credentials

    if schema:
        from miner_guard.config import loading

        echo(json.dumps(loading.schema(), indent=1))
        return
    if validate is not None:
        _validate(validate)
        return
    place = open_context(config, name, state_dir)
    redactor = Redactor.for_guard(os.environ, place.settings.config)
    rows = [
        (dotted, redactor.value(value, dotted), origin)
        for dotted, value, origin in place.settings.rows()
        if not changed or origin != "default"
    ]
    if as_json:
        echo(json.dumps(_document(place, rows), indent=1, ensure_ascii=False))
        return
    echo(f"# state directory: {place.state.root}")
    echo(f"# profile: {place.profile or 'none'}")
    if unread := credentials.problem(place.settings.config.repo):
        echo(f"# could not read the credentials: {unread}")
    section = ""
    for dotted, value, origin in rows:
        head, key = dotted.split(".", 1)
        if head != section:
            section = head
            echo(f"\n[{section}]")
        setting = f"{key} = {_toml(value)}" if value is not None else f"# {key} is not set"
        echo(f"{setting:<{_COLUMN}}  # {origin}")


def _validate(file: Path) -> None:
    """Check `file`, its patterns and the profile that it names. Raises Refused (78) with the file,
    the key and the allowed values."""
    from miner_guard.config import BadConfig, loading
    from miner_guard.validators.profiles import chosen
    from miner_guard.validators.profiles.checks import defects

    try:
        loaded = loading.load(file, env={})
        for pattern in loaded.config.miner.log_patterns:
            for why in defects("step", pattern):
                raise Refused(f"{file}: miner.log_patterns: {pattern!r} {why}", CONFIG)
        origins = loaded.origins
        if (profile := chosen(loaded.config.miner)) is not None:
            document = settings_of_profile(profile, checked=True)
            loading.load(file, profile=document, profile_origin=f"profile {profile}", env={})
    except BadConfig as error:
        raise Refused(str(error), CONFIG) from error
    configured = sum(origin != "default" for origin in origins.values())
    echo(f"{file}: {counted(configured, 'setting')}, all valid")


def _document(place: CommandContext, rows: list[tuple[str, Any, str]]) -> Mapping[str, Any]:
    settings: dict[str, dict[str, Any]] = {}
    for dotted, value, origin in rows:
        section, key = dotted.split(".", 1)
        settings.setdefault(section, {})[key] = {"value": value, "origin": origin}
    return {"state_dir": str(place.state.root), "profile": place.profile, "settings": settings}


def _toml(value: Any) -> str:
    """Format a value as TOML, whose notation differs from JSON's only for tables."""
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{json.dumps(k)} = {_toml(v)}' for k, v in value.items())} }}"
    return json.dumps(value, ensure_ascii=False)
