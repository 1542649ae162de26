"""Pages that mkdocs generates from the code at each build, so that they cannot disagree with it."""

from __future__ import annotations

import inspect
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))
_LINK = re.compile(r"\]\((?:\.\./)?docs/([^)]+)\)")


FIRST = (
    *("miner.profile", "miner.attach", "miner.finite", "miner.stop_timeout_s", "gpu.expect"),
    *("gate.mode", "gate.min_inner_step", "gate.repo_age_limit_s", "repo.kind", "repo.bucket"),
    *("repo.path", "chain.network", "chain.netuid", "hang.min_s", "hang.first_step_s"),
    *("hang.action", "restart.max_restarts", "restart.backoff_s", "alerts.urls", "alerts.preset"),
    *("http.port", "http.host", "http.token", "health.snapshot_every_s", "logs.step_lines_per_s"),
)
"""The settings that most miners look at. The documents list them first, all others as advanced."""


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages, the runbook and the page on fleets."""
    pages = {
        "reference/settings.md": settings(),
        "reference/events.md": events(),
        "reference/metrics.md": metrics(),
        "reference/exit-codes.md": exit_codes(),
        "reference/state-files.md": state_files(),
        "reference/commands.md": commands(),
        "reference/api.md": api(),
        "runbook.md": _with_anchors(_of_ops("runbook.md")),
        "fleet.md": _of_ops("fleet.md"),
    }
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def _of_ops(name: str) -> str:
    return _LINK.sub(r"](\1)", (REPO / "ops" / name).read_text(encoding="utf-8"))


def _with_anchors(text: str) -> str:
    """An anchor in each event's row, for alerts to link to."""
    return re.sub(r"^\| `(\w+)` \|", r'| <a id="\1"></a>`\1` |', text, flags=re.MULTILINE)


def settings() -> str:
    """Every setting of guard.toml with its type, default and meaning, the most used ones first."""
    from miner_guard.config import loading

    schema = loading.schema()
    tables = {
        section: schema["$defs"][place["$ref"].rpartition("/")[2]]
        for section, place in schema["properties"].items()
    }
    rows = ["# Settings", "", "Sections of guard.toml. `miner-guard config` shows those in force."]
    rows += ["", "Most miners need no others than these:", "", *_HEAD]
    rows += [_setting(name, tables[name.split(".")[0]]) for name in FIRST]
    rows += ["", "## Advanced"]
    for section, table in tables.items():
        more = [f"{section}.{key}" for key in table["properties"]]
        rows += ["", f"### [{section}]", "", str(table.get("description", "")), "", *_HEAD]
        rows += [_setting(name, table) for name in more if name not in FIRST]
    return "\n".join(rows)


_HEAD = ("| setting | type | default | meaning |", "|---|---|---|---|")


def _setting(name: str, table: dict[str, Any]) -> str:
    about = table["properties"][name.partition(".")[2]]
    meaning = _cell(str(about.get("description", "")))
    return f"| `{name}` | {_type(about)} | `{about.get('default')}` | {meaning} |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _type(about: dict[str, Any]) -> str:
    if "anyOf" in about:
        return " or ".join(_type(each) for each in about["anyOf"])
    if "enum" in about:
        return ", ".join(f"`{value}`" for value in about["enum"])
    return str(about.get("type", "any"))


def events() -> str:
    """Every event that the code logs, with its levels."""
    from tests.support.event_names import events as logged

    rows = [
        "# Events",
        "",
        "Each line of guard.jsonl is one of these. What to do: [Runbook](../runbook.md).",
        "",
        "| event | level |",
        "|---|---|",
    ]
    for name, places in logged().items():
        levels = sorted({place.level or "depends" for place in places})
        rows.append(f"| [`{name}`](../runbook.md#{name}) | {', '.join(levels)} |")
    return "\n".join(rows)


def metrics() -> str:
    """The names of /metrics with their help text, from the exposition itself."""
    from miner_guard.show.metrics import Families
    from tests.support.metric_sample import full_status

    rows = ["# Metrics", "", "| metric | type | meaning |", "|---|---|---|"]
    for family in Families(full_status(), "").collect():
        rows.append(f"| `{family.name}` | {family.type} | {_cell(family.documentation)} |")
    return "\n".join(rows)


def exit_codes() -> str:
    """The constants of `miner_guard.exits`."""
    source = (REPO / "miner_guard" / "exits.py").read_text(encoding="utf-8")
    found = re.findall(r'^([A-Z_]+) = (\d+)(?:\n"""(.*?)""")?', source, re.MULTILINE | re.DOTALL)
    rows = ["# Exit codes", "", "| code | name | meaning |", "|---|---|---|"]
    rows += [f"| {code} | `{name}` | {_cell(meaning)} |" for name, code, meaning in found]
    return "\n".join(rows)


def state_files() -> str:
    """The paths of `StateDir`."""
    from miner_guard.state_dir import StateDir

    state = StateDir(Path("STATE"))
    rows = ["# State files", "", "Below the state directory.", "", "| file | what |", "|---|---|"]
    for name, value in inspect.getmembers(StateDir, lambda member: isinstance(member, property)):
        path = getattr(state, name)
        if isinstance(path, Path):
            about = _cell(inspect.getdoc(value) or name.replace("_", " "))
            rows.append(f"| `{str(path).removeprefix('STATE/')}` | {about} |")
    return "\n".join(rows)


def commands() -> str:
    """Each command's summary and examples."""
    from miner_guard.cli.main import COMMANDS

    rows = ["# Commands", "", "`miner-guard COMMAND --help` lists the options."]
    for name, command in COMMANDS.items():
        rows += ["", f"## {name}", "", inspect.getdoc(command.function) or "", "", "```sh"]
        rows += [*command.examples, "```"]
        assert all(shlex.split(example, comments=True) for example in command.examples)
    return "\n".join(rows)


def api() -> str:
    """The public names of `miner_guard` and of the checkpoints, from their signatures."""
    import miner_guard
    from miner_guard import checkpoints

    rows = ["# Python API", "", "What a training loop may call. Everything else may change."]
    for module, names in (
        (miner_guard, miner_guard.__all__),
        (checkpoints, getattr(checkpoints, "__all__", [])),
    ):
        for name in names:
            if not name.startswith("_"):
                rows += ["", *_described(f"{module.__name__}.{name}", getattr(module, name))]
    return "\n".join(rows)


def _described(name: str, thing: Any) -> Iterator[str]:
    yield f"## `{name}`"
    yield ""
    yield from _documented(name.rpartition(".")[2], thing)
    if inspect.isclass(thing):
        for method, function in inspect.getmembers(thing, inspect.isfunction):
            if not method.startswith("_") and function.__doc__:
                yield f"### `{name.rpartition('.')[2]}.{method}`"
                yield ""
                yield from _documented(method, function)


def _documented(name: str, thing: Any) -> Iterator[str]:
    if inspect.isfunction(thing):
        yield f"```python\n{name}{inspect.signature(thing)}\n```"
        yield ""
    yield (inspect.getdoc(thing) or "").replace("<", "&lt;")
    yield ""
