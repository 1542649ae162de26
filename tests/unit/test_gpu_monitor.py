"""The GPU-use monitor: when it checks, what it reports, and when it relaunches."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from miner_guard.checks.gpu import Faults
from miner_guard.config import Config, GpuSettings
from miner_guard.rank.journal import DiagnosisEntry
from miner_guard.record.events import Event, event
from miner_guard.system.clock import FakeClock
from miner_guard.watch.base import Launch
from miner_guard.watch.gpu import GpuMonitor, latest_sample
from tests.support.contexts import context
from tests.support.output import show


class Control:
    def __init__(self) -> None:
        self.commands: list[tuple[str, ...]] = []
        self.relaunches: list[str] = []

    def use_command(self, command: Any) -> None:
        self.commands.append(tuple(command))

    def relaunch(self, cause: str) -> None:
        self.relaunches.append(cause)


class Bench:
    """The monitor with a fake clock, a fake health monitor, and a control that records the requests
    it receives."""

    def __init__(self, tmp_path: Path, **gpu: Any) -> None:
        self.clock, self.control = FakeClock(), Control()
        self.health: dict[str, Any] = {"gpus": None}
        self.monitor = GpuMonitor(
            context(
                tmp_path,
                config=Config(gpu=GpuSettings(**gpu)),
                clock=self.clock,
                control=self.control,
                status=lambda: {"health": self.health},
            )
        )

    def launch(self, *command: str) -> None:
        self.monitor.on_launch(Launch(command or ("m.py",), 1, 0, self.clock.monotonic()))

    def sample(self, used_gb: float, total_gb: float = 24.0, gpus: int = 1) -> None:
        rows = [
            {
                "index": i,
                "uuid": f"GPU-{i}",
                "state": "ok",
                "memory_used_bytes": int(used_gb * 1024**3),
                "memory_total_bytes": int(total_gb * 1024**3),
                "unread": {},
                "xids": [],
            }
            for i in range(gpus)
        ]
        self.health = {"gpus": {"taken": self.clock.monotonic(), "gpus": rows}}

    def tick(self, seconds: float, ranks: Any = None) -> list[Event]:
        self.clock.advance(seconds)
        return list(self.monitor.on_tick(self.clock.monotonic(), ranks or {}))


def test_first_after_60_s_then_every_150_s(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.launch()
    bench.sample(18.3)
    assert not bench.tick(59)
    assert [f.name for f in bench.tick(2)] == ["gpu_usage"]
    assert not bench.tick(140)
    assert [f.name for f in bench.tick(15)] == ["gpu_usage"]


def test_no_reading_at_60_s_is_an_event_where_a_gpu_is_expected(tmp_path: Path) -> None:
    bench = Bench(tmp_path, expect=1)
    bench.launch()
    (event,) = bench.tick(61)
    assert event.level == "warning"
    assert "no GPU memory reading" in event.text
    on_cpu = Bench(tmp_path)
    on_cpu.launch()
    assert not on_cpu.tick(61)
    asked_for_cpu = Bench(tmp_path, expect=0)
    asked_for_cpu.launch()
    asked_for_cpu.sample(0.01)
    assert not asked_for_cpu.tick(61)


def test_the_miners_lines_count_before_nvml_and_the_hook_before_both(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.launch()
    bench.sample(23.0)
    show(bench.monitor, b"Model: EfficientNet-B4\nEpoch 3: Loss=0.542, GPU=18", b".1GB (75.4%)\n")
    (usage,) = bench.tick(61)
    assert usage.fields["source"] == "printed"
    assert usage.fields["share_pct"] == pytest.approx(75.4, abs=0.1)
    assert "large model (EfficientNet-B4)" in usage.fields["verdict"]
    ranks = {0: SimpleNamespace(allocated_bytes=12.0 * 1024**3, inner_step=84)}
    (usage,) = [f for f in bench.tick(151, ranks) if f.name == "gpu_usage"]
    assert (usage.fields["source"], usage.fields["step"]) == ("hook", 84)
    assert usage.fields["share_pct"] == pytest.approx(50.0)


def test_a_model_that_may_be_on_the_cpu_gets_no_larger_batch(tmp_path: Path) -> None:
    bench = Bench(tmp_path, on_underuse="relaunch", batch_argument="--batch")
    bench.launch("m.py", "--batch=2")
    bench.sample(0.5)
    (usage,) = bench.tick(61)
    assert (usage.level, usage.fields["factor"]) == ("warning", 1.0)
    assert "the model may be on the CPU. Check its device; a larger batch would not" in usage.text
    assert bench.control.relaunches == []
    report = {"rank": 0, "model_device": "cuda:0", "total_bytes": 24 << 30}
    bench.monitor.on_entry(0, DiagnosisEntry(reports=[report]))
    (usage,) = bench.tick(151)
    assert "increase the batch 2x" in usage.text, "a small model that is known to be on its GPU"


@pytest.mark.parametrize("named", [True, False])
def test_idle_gpus_beside_the_miners_are_not_taken_for_its_own(tmp_path: Path, named: bool) -> None:
    """On a recorded machine two of eight GPUs train at 97 %, and the other six are idle."""
    bench = Bench(tmp_path)
    bench.launch()
    bench.sample(21.0, gpus=8)
    for row in bench.health["gpus"]["gpus"]:
        busy = row["index"] in (1, 4)
        row["utilization_ratio"] = 0.97 if busy else 0.0
        if not busy:
            row["memory_used_bytes"] = (1 << 30) if named else (2 << 20)
    if named:
        reports = [{"rank": rank, "uuid": uuid} for rank, uuid in ((0, "GPU-1"), (1, "GPU-4"))]
        bench.monitor.on_entry(0, DiagnosisEntry(reports=reports))
    (usage,) = bench.tick(61)
    assert usage.fields["share_pct"] == pytest.approx(87.5)
    assert "Utilization 97%." in usage.text


def test_gpus_that_the_mask_hides_are_somebody_elses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    bench = Bench(tmp_path)
    bench.sample(23.0, gpus=4)
    assert [row["index"] for row in latest_sample(bench.monitor.context).gpus] == [2]
    lost = {**bench.health["gpus"]["gpus"][3], "state": "lost", "error": "GPU is lost"}
    assert [e.level for e in Faults({"CUDA_VISIBLE_DEVICES": "2"}).observe([lost], 0.0)] == [
        "warning"
    ]
    assert [e.level for e in Faults().observe([lost], 0.0)] == ["critical"]


def test_one_drop_on_all_gpus_is_one_line_that_names_them(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.launch()
    bench.sample(18.2, gpus=4)
    bench.tick(61)
    bench.sample(10.8, gpus=4)
    drops = [f.text for f in bench.tick(300) if f.name == "gpu_drop"]
    assert drops == ["GPU DROP: 76% -> 45% at step None (GPU 0, GPU 1, GPU 2, GPU 3)"]


def test_relaunch_rewrites_the_argument_and_goes_back_after_an_out_of_memory(
    tmp_path: Path,
) -> None:
    bench = Bench(
        tmp_path, on_underuse="relaunch", batch_argument="--batch", model_name="EfficientNet-B4"
    )
    bench.launch("m.py", "--batch=128")
    bench.sample(8.2)
    found_now = bench.tick(61)
    assert [f.name for f in found_now] == ["gpu_usage", "gpu_usage"]
    assert (
        found_now[1].text == "GPU RELAUNCH: --batch 128 -> 256: GPU memory at 34% (relaunch 1 of 3)"
    )
    assert bench.control.commands == [("m.py", "--batch=256")]
    assert bench.control.relaunches == ["a larger batch: 128 -> 256"]
    bench.launch("m.py", "--batch=256")
    oom = event(
        "incident",
        "error",
        "INCIDENT cuda_oom: x Fix: y",
        label="cuda_oom",
        cause="x",
        fix="y",
        excerpt="z",
    )
    (back,) = bench.monitor.on_event(oom)
    assert (back.fields["old"], back.fields["new"]) == (256, 128)
    assert bench.control.commands[-1] == ("m.py", "--batch=128")
    bench.launch("m.py", "--batch=128")
    assert [f.name for f in bench.tick(61)] == ["gpu_usage"]


def test_the_batch_grows_by_three_relaunches_at_most(tmp_path: Path) -> None:
    bench = Bench(
        tmp_path, on_underuse="relaunch", batch_argument="--batch", model_name="EfficientNet-B4"
    )
    for batch in (128, 256, 512, 1024):
        bench.launch("m.py", f"--batch={batch}")
        bench.sample(8.2)
        bench.tick(61)
    assert bench.control.commands == [("m.py", f"--batch={n}") for n in (256, 512, 1024)]


def test_by_default_nothing_is_relaunched(tmp_path: Path) -> None:
    bench = Bench(tmp_path, batch_argument="--batch")
    bench.launch("m.py", "--batch=128")
    bench.sample(8.2)
    assert [f.name for f in bench.tick(61)] == ["gpu_usage"]
    assert not bench.control.commands


@pytest.mark.parametrize("words", [(), ("--batch",), ("--batch", "auto"), ("--batch2", "3")])
def test_an_argument_without_an_integer_is_reported_once(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    bench = Bench(tmp_path, on_underuse="relaunch", batch_argument="--batch")
    for expected in (["gpu_usage", "guard_degraded"], ["gpu_usage"]):
        bench.launch("m.py", *words)
        bench.sample(8.2)
        assert [f.name for f in bench.tick(61)] == expected
