"""Other evidence that the incidents monitor has when a miner exits: its losses, its signal, its
ranks."""

from __future__ import annotations

from itertools import repeat
from pathlib import Path

import pytest

from miner_guard.record.events import event
from miner_guard.watch.output import CAUSELESS_S, SETTLE_S
from tests.unit.incidents.helpers import root
from tests.unit.incidents.live import BUG, KILLED, Live


def test_a_loss_that_the_guard_has_called_nan_itself_is_not_reported_twice(tmp_path: Path) -> None:
    live = Live(tmp_path)
    live.events += live.monitor.on_event(
        event("loss_nan", "critical", "Loss is NaN or Inf at step 512", step=512, loss=float("nan"))
    )
    live.prints(b"step 512 | loss: nan\n")
    live.after(SETTLE_S)
    assert live.labels == []


@pytest.mark.parametrize("printed", [b"", b"step 512 | loss: nan\n"])
def test_a_crash_after_nan_is_one_incident_with_the_whole_logs_root(
    tmp_path: Path, printed: bytes
) -> None:
    """When the miner printed the NaN, its exit once had no incident; otherwise the incident named
    only the exception."""
    live, nan = (
        Live(tmp_path),
        event(
            "loss_nan", "critical", "Loss is NaN or Inf at step 512", step=512, loss=float("nan")
        ),
    )
    live.events += live.monitor.on_event(nan)
    live.prints(printed)
    live.after(SETTLE_S)
    live.prints(BUG)
    live.after(SETTLE_S)
    live.ends()
    whole = (
        printed
        + b"2026-01-02T03:04:05.678Z | CRITICAL ERROR | Rank 0 | \xe2\x9d\x8c "
        + nan.text.encode()
    )
    assert live.labels == [root(whole + b"\n" + BUG)] == ["loss_nan"]
    assert "NaN" in live.events[0].fields["excerpt"] or printed


FULL = b"OSError: [Errno 28] No space left on device: '/ckpt/step_99.pt'\n"


@pytest.mark.parametrize(
    ("last", "printed", "labels"),
    [
        (float("nan"), BUG, ["loss_nan"]),
        (float("nan"), b"", ["loss_nan"]),
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
    live.events += live.monitor.on_event(
        event(
            "loss_nan",
            "critical",
            "Loss is NaN or Inf at step 3",
            rank=1,
            step=3,
            loss=float("nan"),
        )
    )
    live.after(SETTLE_S)
    live.after(3600)
    live.steps(1, 4, last)
    live.prints(printed)
    live.ends()
    assert live.labels == labels


def test_a_sigkill_without_an_out_of_memory_kill_is_not_called_one(tmp_path: Path) -> None:
    """Otherwise the guard would advise buying memory after somebody's kill -9."""
    live = Live(tmp_path)
    live.oom_kills = repeat(7)
    live.launch()
    live.prints(KILLED)
    live.after(SETTLE_S)
    assert live.labels == ["process_killed"]


def test_a_rank_that_left_is_the_cause_of_the_others_network_errors(tmp_path: Path) -> None:
    live = Live(tmp_path)
    live.prints(b"RuntimeError: [gloo/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:1\n")
    gone = event(
        "rank_gone",
        "error",
        "RANK GONE: rank 1 ended with code 0",
        rank=1,
        detail="rank 1 ended with code 0",
        ranks=[1],
    )
    live.events += live.monitor.on_event(gone)
    live.ends()
    assert live.labels == ["rank_lost"]
    crashed = Live(tmp_path / "crashed")
    crashed.prints(BUG)
    crashed.events += crashed.monitor.on_event(gone)
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
