"""The live monitor: one line per incident, which names the root and not its consequences; silent
while the guard stops the miner."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest

from miner_guard.config import Config, MinerSettings
from miner_guard.rank.journal import TrainingEntry
from miner_guard.record.events import event
from miner_guard.watch.output import CAUSELESS_S, COOLDOWN_S, SETTLE_S
from tests.unit.incidents.helpers import root
from tests.unit.incidents.live import BUG, KILLED, OOM, WATCHDOG, Live
from tests.unit.test_public_lines import FORMS, pieces_of_secrets

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

EXCERPTS = [
    row["text"]
    for row in tomllib.loads(Path(__file__).with_name("excerpts.toml").read_text(encoding="utf-8"))[
        "excerpt"
    ]
]


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


def test_a_fix_uses_the_batch_of_the_settings_and_the_hooks_number_of_ranks(tmp_path: Path) -> None:
    settings = MinerSettings(batch_size=2, effective_batch_size=512)
    live = Live(tmp_path, Config(miner=settings))
    live.monitor.on_entry(0, TrainingEntry(world_size=4))
    live.prints(OOM)
    live.after(SETTLE_S)
    line = live.events[0].text
    assert "from 2 to 1" in line
    assert "from 64 to 128" in line


def test_a_symptom_waits_for_the_launcher_to_say_how_the_lost_rank_ended(tmp_path: Path) -> None:
    """A killed rank was once reported as `training_loop_failed`: on a busy host torchrun took 7 s
    to say how it had ended."""
    live = Live(tmp_path)
    live.prints(
        b"ERROR | Rank 0 | Training Loop Failed with error: [gloo] Read error: "
        b"Connection reset by peer.\n"
    )
    live.after(7)
    assert live.labels == []
    live.prints(KILLED)
    live.after(SETTLE_S)
    assert live.labels == ["host_oom_kill"]
    alone = Live(tmp_path / "alone")
    alone.prints(WATCHDOG)
    alone.after(CAUSELESS_S)
    assert alone.labels == ["nccl_timeout"]


def test_ranks_that_time_out_ten_minutes_later_are_the_same_incident(tmp_path: Path) -> None:
    live = Live(tmp_path)
    live.prints(BUG)
    live.after(SETTLE_S)
    live.after(600)
    live.prints(WATCHDOG)
    live.after(SETTLE_S)
    live.ends()
    assert live.labels == ["code_bug"]
    assert live.monitor.snapshot()["root_cause"] == "code_bug"


def test_the_same_label_again_is_reported_after_the_cooldown_only_and_in_each_launch(
    tmp_path: Path,
) -> None:
    live = Live(tmp_path)
    for _ in range(5):
        live.prints(OOM)
        live.after(SETTLE_S)
        live.after(COOLDOWN_S / 6)
    assert live.labels == ["cuda_oom"]
    live.after(COOLDOWN_S)
    live.prints(OOM)
    live.after(SETTLE_S)
    assert live.labels == ["cuda_oom"] * 2
    live.launch(attempt=1)
    live.prints(OOM)
    live.ends()
    assert live.labels == ["cuda_oom"] * 3


def test_one_retry_is_not_an_incident_but_many_are_a_warning(tmp_path: Path) -> None:
    live = Live(tmp_path)
    for attempt in range(1, 3):
        live.prints(b"Failed to fetch data, retrying. Attempt %d/100\n" % attempt)
        live.after(SETTLE_S)
    assert live.labels == []
    live.prints(b"Failed to fetch data, retrying. Attempt 3/100\n")
    live.after(SETTLE_S)
    assert live.labels == ["dataset_fetch_failed"]
    assert live.events[0].level == "warning"


def test_output_during_a_stop_by_the_guard_is_not_an_incident(tmp_path: Path) -> None:
    live = Live(tmp_path)
    live.events += live.monitor.on_event(
        event(
            "miner_stopping",
            "info",
            "MINER STOPPING: SIGTERM, 45s to stop",
            reason="SIGTERM",
            grace_s=45.0,
        )
    )
    live.prints(
        b"W1 torch/distributed/elastic/agent/server/api.py:752] Received 15 death "
        b"signal, shutting down workers\n"
    )
    live.after(SETTLE_S)
    live.prints(b"KeyboardInterrupt\n")
    live.ends(asked=True)
    assert live.labels == []


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
    assert [f.fields["label"] for f in live.events if f.name == "incident_overcome"] == [
        "version_mismatch"
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
