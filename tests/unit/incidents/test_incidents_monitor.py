"""The live monitor: one line per incident, which names the root and not its consequences; silent
while the guard stops the miner."""

from __future__ import annotations

import json
import math
import random
from itertools import repeat
from pathlib import Path

import pytest

from miner_guard.config import Config, MinerSettings, read_toml
from miner_guard.rank.journal import TrainingEntry
from miner_guard.rank.layout import Identity, StepRecord
from miner_guard.record.events import Event, event
from miner_guard.watch.output import CAUSELESS_S, COOLDOWN_S, SETTLE_S
from tests.unit.incidents.helpers import root
from tests.unit.incidents.live import BUG, KILLED, OOM, WATCHDOG, Act, Live
from tests.unit.test_public_lines import FORMS, pieces_of_secrets

ROWS = read_toml(Path(__file__).with_name("excerpts.toml"))["excerpt"]
EXCERPTS = [row["text"] for row in ROWS]


def test_one_line_names_the_root_with_its_first_fix(tmp_path: Path) -> None:
    live = Live(tmp_path, Config(miner=MinerSettings(batch_size=4)))
    live.prints(OOM)
    live.prints(WATCHDOG)
    live.after(SETTLE_S)
    assert live.labels == ["cuda_oom"]
    line = live.events[0].text
    assert line.startswith("INCIDENT cuda_oom: ")
    assert "from 4 to 2" in line
    assert live.events[0].rank == 2
    assert live.events[0].fields["restart"] == "once"


def test_on_a_second_node_torchruns_local_rank_is_not_taken_for_a_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0, on the other node, was said to have died."""
    live = Live(tmp_path)
    here = {2 + n: Identity(1, 2 + n, n, 4, 1, local_world_size=2) for n in range(2)}
    monkeypatch.setattr(live.monitor.context.records, "identities", lambda: here)
    live.prints(KILLED)
    live.after(SETTLE_S)
    assert [event.rank for event in live.events] == [3]


def test_a_fix_uses_the_batch_of_the_settings_and_the_hooks_number_of_ranks(tmp_path: Path) -> None:
    settings = MinerSettings(batch_size=2, effective_batch_size=512)
    live = Live(tmp_path, Config(miner=settings))
    live.monitor.on_entry(0, TrainingEntry(world_size=4))
    live.prints(OOM)
    live.after(SETTLE_S)
    line = live.events[0].text
    assert "from 2 to 1" in line
    assert "from 64 to 128" in line


def nan(rank: int | None = None) -> Event:
    text = "Loss is NaN or Inf at step 512"
    return event("loss_nan", "critical", text, rank=rank, step=512, loss=math.nan)


def step(loss: float) -> StepRecord:
    return StepRecord(inner_step=513, end=1.0, wall=1e9, loss=loss)


STOPPING = event(
    "miner_stopping", "info", "MINER STOPPING: SIGTERM", reason="SIGTERM", grace_s=45.0
)
GONE = event(
    "rank_gone", "error", "RANK GONE: rank 1 ended", rank=1, detail="rank 1 ended", ranks=[1]
)
ENDS = {"code": 1}
NAN_LINE = b"step 512 | loss: nan\n"
FULL = b"OSError: [Errno 28] No space left on device: '/ckpt/step_99.pt'\n"
FAILED = b"ERROR | Training Loop Failed with error: [gloo] Read error: Connection reset by peer.\n"
PEER = b"RuntimeError: [gloo/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:1\n"
DEATH = b"W1 torch/distributed/elastic/agent/server/api.py:752] Received 15 death signal\n"
REMAPPED = b"NVRM: Xid (PCI:0000:10:1c): 63, pid=1896, Row Remapper: New row remapped.\n"
RETRY = b"Failed to fetch data, retrying. Attempt 1/100\n"


@pytest.mark.parametrize(
    ("acts", "labels"),
    [
        # On a busy host, torchrun took 7 s to say how the lost rank had ended.
        ([FAILED, 7.0], []),
        ([FAILED, 7.0, KILLED, SETTLE_S], ["host_oom_kill"]),
        ([WATCHDOG, CAUSELESS_S], ["nccl_timeout"]),
        # Ranks that time out ten minutes later belong to the same incident.
        ([BUG, SETTLE_S, 600.0, WATCHDOG, SETTLE_S, ENDS], ["code_bug"]),
        # The same label again only after the cooldown.
        ([OOM, SETTLE_S, COOLDOWN_S / 6] * 5, ["cuda_oom"]),
        ([OOM, SETTLE_S, COOLDOWN_S, OOM, SETTLE_S], ["cuda_oom"] * 2),
        # One retry is no incident.
        ([RETRY, SETTLE_S] * 2, []),
        ([RETRY, SETTLE_S] * 3, ["dataset_fetch_failed"]),
        # The guard stops the miner, or has killed it.
        ([STOPPING, DEATH, SETTLE_S, b"KeyboardInterrupt\n", {"asked": True}], []),
        ([{"code": 137, "signal": 9, "asked": True}], []),
        # A loss that the guard itself has called NaN.
        ([nan(), NAN_LINE, SETTLE_S], []),
        # NaN weights fail in ways that no pattern knows; a restart would meet them again.
        ([nan(1), SETTLE_S, 3600.0, step(math.nan), BUG, ENDS], ["loss_nan"]),
        ([nan(1), SETTLE_S, 3600.0, step(math.nan), ENDS], ["loss_nan"]),
        ([nan(1), SETTLE_S, 3600.0, step(2.5), BUG, ENDS], ["code_bug"]),
        ([nan(1), SETTLE_S, 3600.0, step(math.nan), FULL, ENDS], ["disk_full"]),
        # A lost rank causes the others' network errors; an exception says more than an end.
        ([PEER, GONE, ENDS], ["rank_lost"]),
        ([BUG, GONE, ENDS], ["code_bug"]),
        # A driver's notice raises no alert.
        ([REMAPPED, CAUSELESS_S, ENDS], []),
    ],
)
def test_what_happens_is_reported_as_these_incidents(
    tmp_path: Path, acts: list[Act], labels: list[str]
) -> None:
    assert Live(tmp_path).plays(*acts) == labels


@pytest.mark.parametrize("acts", [[KILLED, SETTLE_S], [{"code": 137, "signal": 9}]])
def test_a_sigkill_without_an_out_of_memory_kill_is_not_called_one(
    tmp_path: Path, acts: list[Act]
) -> None:
    """Otherwise the guard would advise buying memory after somebody's kill -9."""
    live = Live(tmp_path)
    live.oom_kills = repeat(7)
    live.launch()
    assert live.plays(*acts) == ["process_killed"]


@pytest.mark.parametrize("printed", [b"", NAN_LINE])
def test_a_crash_after_nan_is_one_incident_with_the_whole_logs_root(
    tmp_path: Path, printed: bytes
) -> None:
    """When the miner printed the NaN, its exit once had no incident; otherwise the incident named
    only the exception."""
    live = Live(tmp_path)
    labels = live.plays(nan(), printed, SETTLE_S, BUG, SETTLE_S, ENDS)
    line = b"2026-01-02T03:04:05.678Z | CRITICAL ERROR | Rank 0 | " + nan().text.encode() + b"\n"
    assert labels == [root(printed + line + BUG)] == ["loss_nan"]
    assert "NaN" in live.events[0].fields["excerpt"] or printed


def test_each_launch_reports_anew_and_retries_are_a_warning(tmp_path: Path) -> None:
    live = Live(tmp_path)
    live.plays(OOM, SETTLE_S)
    live.launch(attempt=1)
    assert live.plays(OOM, ENDS) == ["cuda_oom"] * 2
    live.launch(attempt=2)
    live.plays(*[RETRY, SETTLE_S] * 3)
    assert live.events[-1].level == "warning"


@pytest.mark.parametrize("number", range(len(EXCERPTS)))
def test_live_and_offline_agree(number: int, tmp_path: Path) -> None:
    chance, text = random.Random(number), EXCERPTS[number].encode()
    live = Live(tmp_path)
    while text:
        size = chance.randint(1, 200)
        live.prints(text[:size])
        text = text[size:]
    live.ends()
    offline = root(EXCERPTS[number])
    assert live.labels == ([] if offline is None else [offline])


def test_the_evidence_is_stored_without_secrets(tmp_path: Path) -> None:
    live = Live(tmp_path)
    live.prints(b"token=hf_abcdefghijklmnopqrstuvwxyz012345\n" + OOM)
    live.after(SETTLE_S)
    [folder] = list(live.state.incidents.iterdir())
    assert folder.name.endswith("-cuda_oom")
    story = json.loads((folder / "incident.json").read_text())
    assert (story["label"], story["status"]) == ("cuda_oom", {"steps": 1})
    kept = (folder / "output.log").read_text()
    assert "Tried to allocate" in kept
    assert "hf_abc" not in kept


def test_an_incident_that_training_survived_is_retracted(tmp_path: Path) -> None:
    """`miner ended: version_mismatch, exit code 0` named an import error that the miner had caught
    hours before."""
    live = Live(tmp_path)
    live.prints(b"ModuleNotFoundError: No module named 'flash_attn'\n")
    live.after(SETTLE_S)
    assert live.labels == ["version_mismatch"]
    for n in range(12):
        live.prints(b"Outer Step: 3 | Inner Step: %d | Loss: 3.40\n" % n)
    assert [f.text for f in live.events if f.level == "info"] == [
        "OVERCOME version_mismatch: training continued after it"
    ]
    live.ends(code=1)
    assert live.labels == ["version_mismatch"], "why it ended is another matter"


@pytest.mark.parametrize("name", FORMS)
def test_an_incident_that_quotes_a_secret_does_not_spread_it(tmp_path: Path, name: str) -> None:
    """Incidents go into alerts, the report and the bundle."""
    live = Live(tmp_path)
    for error in FORMS[name].splitlines()[:1]:
        live.prints(
            b'Traceback (most recent call last):\n  File "train.py", line 7, in main\n    login()\n'
            b"RuntimeError: the hub refuses " + error.encode() + b" at login\n"
        )
    live.after(SETTLE_S)
    live.ends()
    (incident,) = (f for f in live.events if f.name == "incident")
    assert "RuntimeError" in incident.fields["excerpt"]
    shown = f"{incident.text} {dict(incident.fields)}"
    assert [part for part in pieces_of_secrets() if part in shown] == []
