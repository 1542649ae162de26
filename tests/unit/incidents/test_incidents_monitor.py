"""The live part: one line per incident, the root and not its consequences; silent while the guard
stops the miner."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from itertools import count, repeat
from pathlib import Path

import pytest

from miner_guard.config import Config, LogSettings, MinerSettings
from miner_guard.eventlog import catalog
from miner_guard.eventlog.catalog import Finding, make_finding
from miner_guard.flight_recorder.records import StepRecord
from miner_guard.monitors.base import Exit, Launch
from miner_guard.monitors.incidents import CAUSELESS_S, COOLDOWN_S, SETTLE_S, IncidentsMonitor
from miner_guard.state_dir import StateDir
from miner_guard.system.clock import FakeClock
from tests.support.contexts import JobsAtOnce, context
from tests.unit.incidents.helpers import root

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

OOM = (
    b"[rank2]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 2 has "
    b"a total capacity of "
    b"24.00 GiB of which 1.00 GiB is free.\n"
)
WATCHDOG = (
    b"[rank0]:[E] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, "
    b"OpType=ALLREDUCE)\n"
)
BUG = (
    b'Traceback (most recent call last):\n  File "/srv/miner/train.py", line 3, in '
    b"<module>\nKeyError: 'loss'\n"
)


KILLED = (
    b"torch/distributed/elastic/multiprocessing/api.py: failed (exitcode: -9) local_rank: 1 "
    b"(pid: 7416)\n"
)


class Live:
    """The part under a clock that the test moves."""

    def __init__(self, tmp_path: Path, config: Config | None = None) -> None:
        self.oom_kills: Iterator[int] = count()
        """By the kernel, each time it is asked: it has killed one more."""

        self.clock = FakeClock()
        self.findings: list[Finding] = []
        self.state = StateDir(tmp_path)
        self.monitor = IncidentsMonitor(
            context(
                tmp_path,
                config=config or Config(),
                clock=self.clock,
                emit=self.findings.append,
                jobs=JobsAtOnce(),
                status=lambda: {"steps": 1},
            ),
            lambda: next(self.oom_kills),
        )
        self.launch()

    def launch(self, attempt: int = 0) -> None:
        self.findings += self.monitor.on_launch(
            Launch(["miner"], 1, attempt, self.clock.monotonic())
        )

    def prints(self, text: bytes) -> None:
        self.findings += self.monitor.on_output(text)

    def after(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.findings += self.monitor.on_tick(self.clock.monotonic(), {})

    def steps(self, rank: int, number: int, loss: float) -> None:
        step = StepRecord(
            number=number,
            outer_step=1,
            inner_step=number,
            total_steps=number,
            end=1.0,
            wall=1e9,
            loss=loss,
        )
        self.findings += self.monitor.on_steps(rank, [step])

    def ends(self, *, code: int = 1, signal: int | None = None, asked: bool = False) -> None:
        self.findings += self.monitor.on_exit(Exit(code, signal, asked, False, 10.0))

    @property
    def labels(self) -> list[str]:
        return [str(f.fields["label"]) for f in self.findings if f.event == "incident"]


def test_one_line_names_the_root_with_its_first_fix(tmp_path: Path) -> None:
    live = Live(tmp_path, Config(miner=MinerSettings(batch_size=4)))
    live.prints(OOM)
    live.prints(WATCHDOG)
    live.after(SETTLE_S)
    assert live.labels == ["cuda_oom"]
    line = catalog.message(live.findings[0])
    assert line.startswith("INCIDENT cuda_oom: ")
    assert "from 4 to 2" in line
    assert live.findings[0].rank == 2
    assert live.findings[0].fields["restart"] == "once"


def test_a_consequence_that_is_printed_first_does_not_take_the_roots_place(tmp_path: Path) -> None:
    live = Live(tmp_path)
    live.prints(WATCHDOG)
    live.after(SETTLE_S / 2)
    live.prints(OOM)
    live.after(SETTLE_S)
    assert live.labels == ["cuda_oom"]


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


def test_the_exit_does_not_wait_for_the_cascade_to_settle(tmp_path: Path) -> None:
    live = Live(tmp_path)
    live.prints(OOM.rstrip(b"\n"))
    live.ends()
    assert live.labels == ["cuda_oom"]


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
    assert live.findings[0].severity == "warning"


def test_what_a_stop_by_the_guard_prints_is_not_an_incident(tmp_path: Path) -> None:
    live = Live(tmp_path)
    live.findings += live.monitor.on_finding(
        make_finding("miner_stopping", reason="SIGTERM", grace_s=45.0)
    )
    live.prints(
        b"W1 torch/distributed/elastic/agent/server/api.py:752] Received 15 death "
        b"signal, shutting down workers\n"
    )
    live.after(SETTLE_S)
    live.prints(b"KeyboardInterrupt\n")
    live.ends(asked=True)
    assert live.labels == []


def test_a_loss_that_the_guard_has_called_nan_itself_is_not_reported_twice(tmp_path: Path) -> None:
    live = Live(tmp_path)
    live.findings += live.monitor.on_finding(make_finding("loss_nan", step=512, loss=float("nan")))
    live.prints(b"step 512 | loss: nan\n")
    live.after(SETTLE_S)
    assert live.labels == []


@pytest.mark.parametrize("printed", [b"", b"step 512 | loss: nan\n"])
def test_a_crash_after_nan_is_one_incident_and_the_root_that_the_whole_log_has(
    tmp_path: Path, printed: bytes
) -> None:
    """Once, the exit had no incident if the miner printed the NaN, and only the exception if it did
    not."""
    live, nan = Live(tmp_path), make_finding("loss_nan", step=512, loss=float("nan"))
    live.findings += live.monitor.on_finding(nan)
    live.prints(printed)
    live.after(SETTLE_S)
    live.prints(BUG)
    live.after(SETTLE_S)
    live.ends()
    whole = (
        printed
        + b"2026-01-02T03:04:05.678Z | CRITICAL ERROR | Rank 0 | \xe2\x9d\x8c "
        + catalog.message(nan).encode()
    )
    assert live.labels == [root(whole + b"\n" + BUG)] == ["nan_loss"]
    assert "NaN" in live.findings[0].fields["excerpt"] or printed


@pytest.mark.parametrize(
    ("losses", "labels"), [((float("nan"), 2.5), ["code_bug"]), ((2.5, float("nan")), ["nan_loss"])]
)
def test_a_nan_that_training_survived_is_not_the_cause_of_a_crash(
    tmp_path: Path, losses: tuple[float, ...], labels: list[str]
) -> None:
    """The second crash after such a NaN once ended the guard: a restart does not fix a NaN."""
    live = Live(tmp_path)
    live.findings += live.monitor.on_finding(
        make_finding("loss_nan", rank=1, step=3, loss=float("nan"))
    )
    for number, loss in enumerate(losses):
        live.steps(1, number, loss)
    live.prints(BUG)
    live.ends()
    assert live.labels == labels


def test_an_old_nan_is_not_the_cause_of_the_exit(tmp_path: Path) -> None:
    live = Live(tmp_path)
    live.findings += live.monitor.on_finding(make_finding("loss_nan", step=512, loss=float("nan")))
    live.after(3600)
    live.ends()
    assert live.labels == []


FULL = b"OSError: [Errno 28] No space left on device: '/ckpt/step_99.pt'\n"


@pytest.mark.parametrize(
    ("last", "printed", "labels"),
    [
        (float("nan"), BUG, ["nan_loss"]),
        (float("nan"), b"", ["nan_loss"]),
        (2.5, BUG, ["code_bug"]),
        (float("nan"), FULL, ["disk_full"]),
    ],
    ids=["an exception", "no word", "training got over it", "a separate cause"],
)
def test_a_persistent_nan_is_the_cause_if_no_other_is_known(
    tmp_path: Path, last: float, printed: bytes, labels: list[str]
) -> None:
    """The exception looked transient, so the guard would restart from the same state again and
    again."""
    live = Live(tmp_path)
    live.findings += live.monitor.on_finding(
        make_finding("loss_nan", rank=1, step=3, loss=float("nan"))
    )
    live.after(SETTLE_S)
    live.after(3600)
    live.steps(1, 4, last)
    live.prints(printed)
    live.ends()
    assert live.labels == labels


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


def test_ordinary_output_is_not_an_incident_and_the_snapshot_shows_none(tmp_path: Path) -> None:
    live = Live(tmp_path)
    for step in range(500):
        live.prints(f"Rank 0 | Inner Step: {step} | Average Loss: 3.{step} | 0 errors\n".encode())
        live.after(0.1)
    live.ends(code=0)
    assert live.findings == []
    assert live.monitor.snapshot() == {
        "classify": True,
        "root_cause": None,
        "latest": None,
        "counts": {},
    }


def test_it_can_be_switched_off(tmp_path: Path) -> None:
    live = Live(tmp_path, Config(logs=LogSettings(classify=False)))
    live.prints(OOM)
    live.ends()
    assert live.labels == []


def test_an_incident_that_training_survived_is_retracted(tmp_path: Path) -> None:
    """`miner ended: version_mismatch, exit code 0` named an import error that the miner had caught
    hours before."""
    live = Live(tmp_path)
    live.prints(b"ModuleNotFoundError: No module named 'flash_attn'\n")
    live.after(SETTLE_S)
    assert live.labels == ["version_mismatch"]
    for n in range(12):
        live.prints(b"Outer Step: 3 | Inner Step: %d | Loss: 3.40\n" % n)
    assert [f.fields["label"] for f in live.findings if f.event == "incident_overcome"] == [
        "version_mismatch"
    ]
    live.ends(code=1)
    assert live.labels == ["version_mismatch"], "why it ended is another matter"


def test_a_sigkill_without_an_out_of_memory_kill_is_not_called_one(tmp_path: Path) -> None:
    """Otherwise the guard would advise buying memory after somebody's kill -9."""
    live = Live(tmp_path)
    live.oom_kills = repeat(7)
    live.launch()
    live.prints(KILLED)
    live.after(SETTLE_S)
    assert live.labels == ["process_killed"]


def test_a_rank_that_left_is_the_cause_of_what_the_others_report_of_the_network(
    tmp_path: Path,
) -> None:
    live = Live(tmp_path)
    live.prints(b"RuntimeError: [gloo/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:1\n")
    gone = make_finding("rank_gone", rank=1, detail="rank 1 ended with code 0", ranks=[1])
    live.findings += live.monitor.on_finding(gone)
    live.ends()
    assert live.labels == ["rank_lost"]
    crashed = Live(tmp_path / "crashed")
    crashed.prints(BUG)
    crashed.findings += crashed.monitor.on_finding(gone)
    crashed.ends()
    assert crashed.labels == ["code_bug"], "its own exception says more than its end"


def test_a_miner_killed_without_a_word_is_an_incident(tmp_path: Path) -> None:
    """`explain` must not blame the OOM killer for a kill -9 when the kernel counted no such
    kill."""
    live = Live(tmp_path)
    live.oom_kills = repeat(7)
    live.launch()
    live.ends(code=137, signal=9)
    assert live.labels == ["process_killed"]


def test_a_miner_that_the_guard_killed_is_not_an_incident(tmp_path: Path) -> None:
    live = Live(tmp_path)
    live.ends(code=137, signal=9, asked=True)
    assert live.labels == []


def test_a_driver_notice_raises_no_alert(tmp_path: Path) -> None:
    live = Live(tmp_path)
    live.prints(b"NVRM: Xid (PCI:0000:10:1c): 63, pid=1896, Row Remapper: New row remapped.\n")
    live.after(CAUSELESS_S)
    assert live.monitor.objection() is None
    live.ends()
    assert live.labels == []
