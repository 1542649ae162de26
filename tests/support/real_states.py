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
from collections.abc import Mapping, Sequence
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


@dataclass(frozen=True)
class RealState:
    """One state: how it is brought about, and the words, the colour and the axes it must reach."""

    name: str
    words: str
    colour: str
    cause: str
    life: str = "training"
    earning: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    flags: Sequence[str] = ()
    alert: str = ""
    """In the title of the alert that tells of it; empty: no alert does."""

    published_s: float | None = None
    """Age of what the repo holds at the start; None: nothing is published."""

    @property
    def ended(self) -> bool:
        return self.life in ENDED


ENDED = ("stopped", "refused", "finished", "guard gone")

_UPLOADS = {"repo.kind": "local"}
_BLOCKED = {**_UPLOADS, "gate.min_inner_step": 10_000, "gate.repo_age_target_s": 1000}
_LOOPING = {"restart.backoff_s": 0.2, "restart.max_restarts": 1}
_REFUSED = {"gpu.preflight": True, "gpu.preflight_wait_s": 0}
STATES = (
    RealState(
        "healthy", "TRAINING", "green", "inner step", earning="not proven", settings=_UPLOADS
    ),
    RealState("first minute", "STARTING", "grey", "no step yet", "starting"),
    RealState(
        "slow rank",
        "TRAINING, degraded",
        "yellow",
        "rank 3 is busy longer than the others",
        settings={"alerts.events": "straggler"},
        alert="STRAGGLER: rank 3",
    ),
    RealState("hang", "HUNG", "red", "rank 0 in data; no", "hung", alert="HANG DETECTED"),
    RealState(
        "nan",
        "TRAINING, failing",
        "red",
        "loss has been NaN since step 6 of outer step 7",
        alert="Loss is NaN",
    ),
    RealState(
        "crash",
        "RESTARTING",
        "yellow",
        "restarting, attempt 1 of 5",
        "restarting",
        alert="INCIDENT",
    ),
    RealState(
        "crash loop",
        "STOPPED",
        "red",
        "crash loop",
        "stopped",
        settings=_LOOPING,
        alert="CRASH LOOP",
    ),
    RealState("oom", "RESTARTING", "yellow", "cuda_oom", "restarting", alert="INCIDENT cuda_oom"),
    RealState(
        "blocked",
        "TRAINING, degraded",
        "yellow",
        "the gate is blocking an upload that is due: inner_step",
        earning="not proven",
        settings=_BLOCKED,
        published_s=1100.0,
    ),
    RealState(
        "stale",
        "NOT EARNING",
        "red",
        "the published files are 21",
        earning="no",
        settings=_UPLOADS,
        alert="REPO STALE",
        published_s=2100.0,
    ),
    RealState(
        "disk full",
        "TRAINING, degraded",
        "yellow",
        "the disk of the state directory is full",
        alert="DISK FULL",
    ),
    RealState(
        "refused",
        "REFUSED",
        "red",
        "preflight: ",
        "refused",
        settings=_REFUSED,
        flags=("--expect-gpus", "64"),
        alert="PREFLIGHT",
    ),
    RealState("finished", "FINISHED", "grey", "the miner finished its work", "finished"),
    RealState("guard killed", "GUARD GONE", "red", "its last state was TRAINING", "guard gone"),
    RealState("plain trainer", "TRAINING", "green", "inner step"),
)


class Running:
    """A real guard on its way into a state."""

    def __init__(self, state: RealState, folder: Path, webhook: Webhook, small: Path) -> None:
        """`small`: a folder on a small disk."""
        self.state, self.guard = state, Guarded(folder)
        self.small, self.acted = small, False
        self.name, self._webhook = state.name.replace(" ", "-"), webhook
        repo = folder / "repo"
        repo.mkdir()
        if state.published_s is not None:
            (repo / "epoch-7").mkdir()
            (repo / "epoch-7" / "gradients.pt").write_text("x")
            (repo / "metadata.json").write_text('{"run": "1", "outer_step": 7, "inner_step": 1}')
            then = time.time() - state.published_s
            os.utime(repo / "epoch-7" / "gradients.pt", (then, then))
        if state.name == "disk full":
            self.guard.state = StateDir(small / "state")
        settings = {
            **SETTINGS,
            "alerts.urls": f"json://{webhook.address}/{self.name}",
            "repo.path": repo,
            **state.settings,
        }
        script = folder / "miner.py"
        script.write_text(MINER)
        command = [sys.executable, str(script), state.name, str(repo)]
        self.guard.start(command, "--name", self.name, *state.flags, settings=settings)

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
        with contextlib.suppress(OSError):
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


_NUMBER = re.compile(r"\d[\d,.]*")
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
