"""The states of a run that people must be able to tell apart, each brought about by a real guard
over a small miner without torch; and what every surface shows of one at a moment."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from miner_guard.cli.main import run
from miner_guard.config import GateSettings
from miner_guard.record.status_document import RunState, StatusDocument, read_document
from miner_guard.record.store import RunReader
from miner_guard.record.words import number
from miner_guard.show.page import render
from miner_guard.state_dir import StateDir
from miner_guard.watch.state_words import (
    advice,
    earning_words,
    headline,
    read_state,
    state_since,
    time_of_reading,
)
from tests.faults.guarded import Guarded
from tests.servers.webhook import Webhook
from tests.support.http_port import ask

MINER = """
import math, os, sys, time
import miner_guard

fault, repo = sys.argv[1:3]
rank = 0
if fault == "slow rank":
    for rank in (3, 2, 1, 0):
        if rank and not os.fork():
            break
world = "4" if fault == "slow rank" else "1"
os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=world)
guard = miner_guard.init()
if fault == "first minute":
    time.sleep(600)
for step in range(1, 10**6):
    busy = 0.35 if rank == 3 or fault != "slow rank" else 0.05
    with guard.phase("forward"):
        time.sleep(busy)
    with guard.phase("collective"):
        time.sleep(0.4 - busy)
    loss = float("nan") if fault == "nan" and step > 5 else 3.0 + 1 / step
    guard.step(outer_step=7, inner_step=step, loss=loss, lr=1e-4)
    if fault in ("healthy", "blocked", "stale"):
        decision = guard.may_upload(outer_step=7, inner_step=step)
        if fault == "healthy" and step % 10 == 5:
            with guard.upload(decision) as upload:
                upload.tag = f"1.7.{step}"
                with open(f"{repo}/metadata.json", "w") as file:
                    file.write('{"run": "1", "outer_step": 7, "inner_step": %d}' % step)
                os.makedirs(f"{repo}/epoch-7", exist_ok=True)
                with open(f"{repo}/epoch-7/gradients.pt", "w") as file:
                    file.write(str(step) * 100)
    if step == (60 if fault == "slow rank" else 25):
        # From here on the figures stand still, and every surface can be read at one moment.
        with guard.phase("val_loss"):
            time.sleep(600)
    if step < 8:
        continue
    if fault == "hang":
        with guard.phase("data"):
            time.sleep(600)
    if fault in ("crash", "crash loop"):
        raise RuntimeError("the dataset has no row 12")
    if fault == "oom":
        sys.exit("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")
    if fault == "finished":
        guard.close(finished=True)
        break
"""

SETTINGS: Mapping[str, Any] = {
    "http.port": 0,
    "hang.min_s": 4,
    "hang.action": "warn",
    "restart.backoff_s": 300,
    "health.snapshot_every_s": 2,
    "repo.refresh_every_s": 1,
    "gate.min_inner_step": 3,
}


ENDED = ("stopped", "refused", "finished", "guard gone")


@dataclass(frozen=True)
class RealState:
    """One state: the words, the colour and the axes that it must reach."""

    name: str
    words: str
    colour: str
    life: str
    earning: str
    """Empty where nothing is published."""

    cause: str
    """A part of it."""

    alert: str
    """In the title of the alert that tells of it; empty: no alert does."""

    @property
    def ended(self) -> bool:
        return self.life in ENDED


_TABLE = """\
healthy      |TRAINING          |green |training  |not proven|inner step         |
first minute |STARTING          |grey  |starting  |          |no step yet        |
slow rank    |TRAINING, degraded|yellow|training  |          |rank 3 is busy     |STRAGGLER: rank 3
hang         |HUNG              |red   |hung      |          |rank 0 in data; no |HANG DETECTED
nan          |TRAINING, failing |red   |training  |          |NaN since step 6   |Loss is NaN
crash        |RESTARTING        |yellow|restarting|          |attempt 1 of 5     |INCIDENT
crash loop   |STOPPED           |red   |stopped   |          |crash loop         |CRASH LOOP
oom          |RESTARTING        |yellow|restarting|          |cuda_oom           |INCIDENT cuda_oom
blocked      |TRAINING, degraded|yellow|training  |not proven|upload that is due:|
stale        |NOT EARNING       |red   |training  |no        |published files are|REPO STALE
disk full    |TRAINING, degraded|yellow|training  |          |directory is full  |DISK FULL
refused      |REFUSED           |red   |refused   |          |preflight:         |PREFLIGHT
finished     |FINISHED          |grey  |finished  |          |finished its work  |
guard killed |GUARD GONE        |red   |guard gone|          |state was TRAINING |
plain trainer|TRAINING          |green |training  |          |inner step         |"""
STATES = [RealState(*map(str.strip, row.split("|"))) for row in _TABLE.splitlines()]

_UPLOADS = {"repo.kind": "local"}
_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "healthy": _UPLOADS,
    "slow rank": {"alerts.events": "straggler"},
    "crash loop": {"restart.backoff_s": 0.2, "restart.max_restarts": 1},
    "blocked": {**_UPLOADS, "gate.min_inner_step": 10_000, "gate.repo_age_target_s": 1000},
    "stale": _UPLOADS,
    "refused": {"gpu.preflight": True, "gpu.preflight_wait_s": 0, "gpu.expect": 64},
}
"""Beside `SETTINGS`."""

_PUBLISHED_S = {"blocked": 1100.0, "stale": 2100.0}
"""Age of what the repo holds at the start; otherwise nothing is published."""


class Running:
    """A real guard on its way into a state."""

    def __init__(self, state: RealState, folder: Path, webhook: Webhook, small: Path) -> None:
        """`small`: a folder on a small disk."""
        self.state, self.guard = state, Guarded(folder)
        self.small, self.acted = small, False
        self.name, self._webhook = state.name.replace(" ", "-"), webhook
        repo = folder / "repo"
        repo.mkdir()
        if (age_s := _PUBLISHED_S.get(state.name)) is not None:
            (repo / "epoch-7").mkdir()
            (repo / "epoch-7" / "gradients.pt").write_text("x")
            (repo / "metadata.json").write_text('{"run": "1", "outer_step": 7, "inner_step": 1}')
            then = time.time() - age_s
            os.utime(repo / "epoch-7" / "gradients.pt", (then, then))
        if state.name == "disk full":
            self.guard.state = StateDir(small / "state")
        settings = {
            **SETTINGS,
            "alerts.urls": f"json://{webhook.address}/{self.name}",
            "repo.path": repo,
            **_SETTINGS.get(state.name, {}),
        }
        script = folder / "miner.py"
        script.write_text(MINER)
        command = [sys.executable, str(script), state.name, str(repo)]
        self.guard.start(command, "--name", self.name, settings=settings)

    def act(self) -> None:
        """Do once what the miner cannot do by itself."""
        steps = RunReader(self.guard.state.db).now().get("steps") or {}
        if self.acted or not (steps.get("steps") or 0) > 5:
            return
        if self.state.name == "guard killed":
            for pid in (self.guard.guard_pid, self.guard.processes[-1].pid):
                os.kill(pid, signal.SIGKILL)
        if self.state.name == "disk full":
            ballast = (self.small / "ballast").open("wb", 0)
            with ballast as file, contextlib.suppress(OSError):
                while True:
                    file.write(b"\0" * 512)
        self.acted = True

    @property
    def console(self) -> str:
        return self.guard.output.read_text(errors="replace")

    @property
    def alerts(self) -> list[dict[str, Any]]:
        """The messages that this guard has sent."""
        return [body for path, body in self._webhook.posted if path == f"/{self.name}"]


# --- what the surfaces show ---

_COLOURS = {"\x1b[1;31m": "red", "\x1b[33m": "yellow", "\x1b[32m": "green", "\x1b[2m": "grey"}
_KINDS = {"good": "green", "warn": "yellow", "bad": "red", "idle": "grey"}
_LEVELS = {0.0: "green", 1.0: "grey", 2.0: "yellow", 3.0: "red"}


@dataclass(frozen=True)
class Shown:
    """What one surface says; an empty value if it does not show this."""

    sentence: str = ""
    earns: str = ""
    next: str = ""
    colour: str = ""
    life: str = ""
    age: str = ""
    earning: str | None = None
    red: bool = False
    """Whether anything on it is red."""

    numbers: Mapping[str, str] = field(default_factory=dict)


def command(*words: str) -> tuple[int, str]:
    """Exit code and stdout of a command, run in this process, on a wide terminal with colours."""
    out, before = io.TextIOWrapper(io.BytesIO(), "utf-8"), (sys.stdout, dict(os.environ))
    os.environ |= {"COLUMNS": "900", "FORCE_COLOR": "1", "TERM": "xterm"}
    sys.stdout = out
    try:
        code = run(list(words))
    finally:
        sys.stdout = before[0]
        os.environ.clear()
        os.environ.update(before[1])
    out.flush()
    return code, out.buffer.getvalue().decode()  # type: ignore[attr-defined]


def _terminal(text: str) -> Shown:
    """What a screen of `status` or `top` says."""
    colour = next((name for code, name in _COLOURS.items() if text.startswith(code)), "")
    rows = re.sub(r"\x1b\[[\d;]*m", "", text).splitlines()
    assert [row[:7] for row in rows[1:3]] == ["earns  ", "next   "]
    now = next(row for row in rows if row.startswith("now "))
    life = re.search(r"(?:miner |  (?=guard))([a-z ]+?)(,|  )", now)
    loss = next((row for row in rows if row.startswith("loss ")), "")
    steps = next((row for row in rows if row.startswith("steps ")), "")
    inner, restarts = re.search(r"inner (\S+)", steps), re.search(r"restarts (\S+)", now)
    return Shown(
        rows[0],
        rows[1].removeprefix("earns  "),
        rows[2].removeprefix("next   "),
        colour,
        "" if life is None else life[1],
        found[1] if (found := re.search(r"UTC \((.*?)\)  ", now)) else "",
        red="\x1b[1;31m" in text,
        numbers={
            "loss": loss.split()[1] if loss else "",
            "inner step": "" if inner is None else inner[1],
            "restarts": "" if restarts is None else restarts[1],
        },
    )


def _page(page: Mapping[str, Any]) -> Shown:
    state = page["state"]
    tiles = {tile["name"]: tile["value"] for tile in page["tiles"]}
    return Shown(
        f"{state['line']}: {state['cause']}",
        state["earning"],
        state["next"],
        _KINDS[state["kind"]],
        "",
        state["age"],
        red=any(tile["kind"] == "bad" for tile in page["tiles"]),
        numbers={name: tiles[name] for name in ("loss", "restarts") if name in tiles},
    )


def _loss(value: Any) -> str:
    return number(value, ".2f")


def _json(state: Mapping[str, Any]) -> Shown:
    steps, verdict = state.get("steps") or {}, RunState.from_json(state["verdict"])
    numbers = {"loss": _loss(steps.get("loss")), "inner step": number(steps.get("inner_step"))}
    return Shown(
        headline(verdict, time_of_reading(StatusDocument.from_json(state))),
        earning_words(verdict),
        advice(verdict),
        str(verdict.colour),
        state["life"],
        earning=state["earning"],
        numbers={**numbers, "restarts": number(state["restarts"])},
    )


def _metrics(text: str) -> Shown:
    samples = [each for family in text_string_to_metric_families(text) for each in family.samples]
    values = {each.name.removeprefix("minerguard_"): each.value for each in samples}
    life = next(s.labels["life"] for s in samples if s.name.endswith("_life") and s.value)
    numbers = {
        "loss": _loss(values.get("loss")),
        "inner step": number(values.get("inner_step"), ".0f"),
        "restarts": f"{values['restarts_total']:.0f}",
    }
    return Shown("", "", "", _LEVELS[values["verdict_level"]], life, numbers=numbers)


def surfaces(state: StateDir) -> tuple[dict[str, Shown], bool] | None:
    """What each surface shows at one moment, and whether the guard wrote nothing meanwhile; None if
    the state changed, or there is none yet."""
    where = ("--state-dir", str(state.root))
    before = read_document(state)
    if not before.get("verdict"):
        return None
    code, status = command("status", *where)
    _, top = command("top", "--once", *where)
    _, text = command("status", "--json", *where)
    file = render(state, gate=GateSettings())
    embedded = file.partition('<script type="application/json" id="data">')[2]
    page = json.loads(embedded.partition("</script>")[0])
    shown = {"status": _terminal(status), "top": _terminal(top), "json": _json(json.loads(text))}
    shown["report"] = _page(page)
    url = (before.get("metrics") or {}).get("url")
    if url and code == 0:
        # A guard that ends meanwhile answers with an error, or not at all.
        with contextlib.suppress(OSError, ValueError):
            shown["page"] = _page(json.loads(ask(f"{url}data?curves=0")[1]))
            shown["/status"] = _json(json.loads(ask(f"{url}status")[1]))
            shown["metrics"] = _metrics(ask(f"{url}metrics")[1])
            shown["healthz"] = Shown(ask(f"{url}healthz")[1].splitlines()[0])
    after = read_document(state)
    if _place(before) != _place(after):
        return None
    assert page["live"] == (code == 0), "one answer to whether a guard runs"
    return shown, before.get("updated") == after.get("updated")


def _place(document: Mapping[str, Any]) -> tuple[Any, ...]:
    status = StatusDocument.from_json(document)
    state = read_state(status)
    words = rounded(f"{state.cause} {state.next_step}")
    return (
        state_since(state, time_of_reading(status)),
        state.key,
        words,
        document.get("state"),
        document.get("attempt"),
    )


_NUMBER = re.compile(r"\d[\d,.]*(?: (?:s|min|h)\b)?")
_MORE = re.compile(r" \(more: .*")
"""The page has the runbook's row itself."""


def first_part(sentence: str) -> str:
    """`NOT EARNING`, of `NOT EARNING since 12:03 UTC: …`."""
    return re.split(r" (?:since|at) \d\d:\d\d UTC", sentence)[0]


def rounded(text: str) -> str:
    """The text without the numbers that grow from one moment to the next."""
    return _NUMBER.sub("#", text.replace("\n", " "))


def disagreements(shown: Mapping[str, Shown], *, exact: bool) -> list[str]:
    """Where a surface says something else than `status`. If the guard wrote meanwhile, numbers may
    differ; ages grow in any case."""
    first, found = shown["status"], []
    exact &= first.life not in ENDED
    for name, other in shown.items():
        for what in ("sentence", "earns", "next", "colour", "life", "age"):
            texts = [getattr(first, what), getattr(other, what)]
            if what == "next":
                texts = [_MORE.sub("", text) for text in texts]
            if what == "age" or not exact:
                texts = [rounded(text) for text in texts]
            if texts[1] and texts[0] != texts[1]:
                found.append(f"{name}, {what}: {texts[1]!r}; status: {texts[0]!r}")
        for what, value in other.numbers.items() if exact or first.life in ENDED else ():
            if value not in ("", "?", first.numbers[what]):
                found.append(f"{name}, {what}: {value}; status: {first.numbers[what]}")
    return found
