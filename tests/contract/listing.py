"""The names that people grep, script and configure: events, settings, commands, codes and files.

`python -m tests.contract.listing` writes `public.json` from the code. A change of an existing row
breaks somebody's script: say so in CHANGELOG.md. New rows are welcome.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from miner_guard import exits
from miner_guard.cli.main import COMMANDS, build
from miner_guard.config import loading
from miner_guard.record.events import RESERVED
from miner_guard.record.status_document import Section, StatusDocument
from miner_guard.state_dir import StateDir
from tests.support.event_names import events

PUBLIC = Path(__file__).with_name("public.json")
_PROSE = ("title", "description")


def listing() -> dict[str, Any]:
    """Every public name with the properties that users rely on, as JSON."""
    return {
        "events": {
            name: sorted({place.level or "any" for place in places})
            for name, places in events().items()
        },
        "json_line": sorted(RESERVED),
        "settings": dict(sorted(_settings())),
        "commands": {name: _command(name) for name in sorted(COMMANDS)},
        "exit_codes": {
            name: code for name, code in sorted(vars(exits).items()) if isinstance(code, int)
        },
        "state_files": _state_files(),
        "status_json": sorted(_fields(StatusDocument)),
    }


def _fields(section: type[Section], above: str = "") -> Iterator[str]:
    """Dotted names of the document's fields; a table by rank or job reads `per_rank.*.loss`."""
    for name, hint in get_type_hints(section).items():
        yield f"{above}{name}"
        for part in (hint, *get_args(hint)):
            if isinstance(part, type) and issubclass(part, Section):
                between = ".*." if get_origin(hint) is Mapping else "."
                yield from _fields(part, f"{above}{name}{between}")


def _settings() -> list[tuple[str, Any]]:
    schema = loading.schema()
    rows = []
    for section, place in schema["properties"].items():
        table = schema["$defs"][place["$ref"].rpartition("/")[2]]
        for key, about in table["properties"].items():
            row = {name: value for name, value in about.items() if name not in _PROSE}
            rows.append((f"{section}.{key}", row))
    return rows


def _command(name: str) -> dict[str, Any]:
    parameters = build().commands[name].params
    return {"options": sorted(flag for p in parameters for flag in (*p.opts, *p.secondary_opts))}


def _state_files() -> list[str]:
    root = Path("/state")
    named = inspect.getmembers(StateDir, lambda member: isinstance(member, property))
    paths = [getattr(StateDir(root), name) for name, _ in named]
    return sorted(str(path.relative_to(root)) for path in paths if path.is_relative_to(root))


def text() -> str:
    """The listing in its committed form: one line a name."""
    sections = []
    for section, rows in sorted(listing().items()):
        if isinstance(rows, dict):
            lines = [f"{json.dumps(name)}: {_line(row)}" for name, row in sorted(rows.items())]
        else:
            lines = list(map(_line, rows))
        opening, closing = "{}" if isinstance(rows, dict) else "[]"
        names = ",\n  ".join(lines)
        sections.append(f"{json.dumps(section)}: {opening}\n  {names}\n {closing}")
    return "{\n " + ",\n ".join(sections) + "\n}\n"


def _line(row: Any) -> str:
    return json.dumps(row, sort_keys=True, ensure_ascii=False)


if __name__ == "__main__":
    PUBLIC.write_text(text(), encoding="utf-8")
