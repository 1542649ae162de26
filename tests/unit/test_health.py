"""Health: samplers that fail, hang and recover; a container's limits; a summary that fits one
line."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from miner_guard.checks import health
from miner_guard.checks.health import (
    HOST_FIGURES,
    HostSampler,
    Samplers,
    assemble,
    host_figures,
    read_cgroup_memory,
    summary,
)
from miner_guard.config import HealthSettings
from miner_guard.record.events import Event, event
from miner_guard.system.clock import FakeClock
from miner_guard.watch.host import HostLimits

GIB = 1024**3


def _events(events: list[Event]) -> list[tuple[str, str]]:
    return [(event.level, str(event.fields["sampler"])) for event in events]


def test_a_sampler_that_hangs_is_unknown_and_the_others_report_it() -> None:
    clock = FakeClock()
    begun, release = threading.Event(), threading.Event()

    def hanging() -> Mapping[str, Any]:
        begun.set()
        release.wait(60)
        return {"value": 1}

    samplers = Samplers(clock, 15.0, {"hanging": hanging, "other": dict})
    clock.advance(100)
    assert samplers.sample("other") == [], "what was never asked does not hang"
    ends: list[Event] = []
    job = threading.Thread(target=lambda: ends.extend(samplers.sample("hanging")))
    job.start()
    assert begun.wait(60)
    for seconds, reported in ((10, []), (10, [("warning", "hanging")]), (10, [])):
        clock.advance(seconds)
        assert _events(samplers.sample("other")) == reported
    assert samplers.unknown() == {"hanging": "no answer within 15 s"}
    assert samplers.value("hanging") is None
    release.set()
    job.join()
    assert _events(ends) == [("info", "hanging")]


def _tree(root: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    ("own", "files", "memory"),
    [
        (
            "0::/pod/box",
            {
                "pod/memory.max": f"{8 * GIB}\n",
                "pod/box/memory.max": "max\n",
                "pod/box/memory.current": f"{5 * GIB}\n",
                "pod/box/memory.stat": f"anon 1\ninactive_file {2 * GIB}\n",
                "pod/box/memory.events": "low 0\noom 4\noom_kill 3\n",
            },
            (8 * GIB, 3 * GIB, 3),
        ),
        (
            "0::/docker/abcdef",
            {
                "memory.max": f"{4 * GIB}\n",
                "memory.current": f"{GIB}\n",
                "memory.stat": "inactive_file 0\n",
            },
            (4 * GIB, GIB, None),
        ),
        (
            "5:cpu:/x\n4:memory:/box",
            {
                "memory/box/memory.limit_in_bytes": "9223372036854771712\n",
                "memory/box/memory.usage_in_bytes": f"{GIB}\n",
                "memory/box/memory.stat": "inactive_file 7\ntotal_inactive_file 0\n",
                "memory/box/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
            },
            (None, GIB, 2),
        ),
    ],
    ids=["the tightest limit above us", "inside a container", "version 1 without a limit"],
)
def test_the_memory_of_a_cgroup_without_its_cache(
    tmp_path: Path, own: str, files: Mapping[str, str], memory: Any
) -> None:
    tree = {f"cg/{name}": text for name, text in files.items()}
    _tree(tmp_path, {"proc/self/cgroup": f"{own}\n", **tree})
    assert read_cgroup_memory(tmp_path / "proc", tmp_path / "cg") == memory


def test_what_a_container_uses_is_unknown_where_its_cache_cannot_be_distinguished_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container full of page cache must not cause an out-of-memory warning."""
    _tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/\n",
            "cg/memory.max": f"{GIB}\n",
            "cg/memory.current": f"{GIB - 1}\n",
        },
    )
    memory = read_cgroup_memory(tmp_path / "proc", tmp_path / "cg")
    assert memory == (GIB, None, None)
    monkeypatch.setattr(health, "read_cgroup_memory", lambda: memory)
    figures = HostSampler({}).reads["memory"]()
    assert (figures["memory_limit_bytes"], figures["memory_used_bytes"]) == (GIB, None)


def _host(**figures: Any) -> dict[str, Any]:
    healthy = {
        "disk_free_by_folder_bytes": {"state": 100 * GIB},
        "memory_used_bytes": GIB,
        "memory_limit_bytes": 64 * GIB,
        "memory_limit_by": "cgroup",
        "oom_kills": 0,
    }
    return {**dict.fromkeys(HOST_FIGURES), **healthy, **figures}


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        (
            {"disk_free_by_folder_bytes": {"state": GIB}},
            "HOST WARNING: disk of state: 1.0 GB free (limit 5 GB)",
        ),
        (
            {"memory_used_bytes": 63 * GIB},
            "HOST WARNING: memory: 63.0 of 64.0 GB (limit 95% of the cgroup's memory)",
        ),
        ({"oom_kills": 2}, "HOST WARNING: out-of-memory kill: 2 since the last sample"),
    ],
)
def test_a_shortage_is_reported_once_until_it_clears(figures: dict[str, Any], words: str) -> None:
    limits = HostLimits(HealthSettings())
    assert list(limits.observe(_host())) == []
    reported = [*limits.observe(_host(**figures)), *limits.observe(_host(**figures))]
    assert len(reported) == 1
    assert reported[0].text.startswith(words)
    list(limits.observe(_host()))
    if "oom_kills" not in figures:
        assert len(list(limits.observe(_host(**figures)))) == 1


def test_unknown_figures_raise_no_warning() -> None:
    assert list(HostLimits(HealthSettings()).observe(dict.fromkeys(HOST_FIGURES))) == []


def _status() -> dict[str, Any]:
    return {
        "state": "running",
        "pid": 4711,
        "attempt": 1,
        "restarts": 1,
        "rank_processes": {"0": {}, "1": {}},
        "steps": {
            "steps": 900,
            "outer_step": 56,
            "inner_step": 84,
            "loss": 3.4012,
            "p50_s": 15.23,
            "p95_s": 18.0,
            "goodput": {"training": 0.934, "upload": 0.06},
        },
        "costs": {"share_pct": 0.12, "budget_pct": 5.0, "guard_blocking_pct": 0.001},
        "chain": {"block": 7_123_456},
        "uploads": {"repo": {"age_s": 612.3}},
    }


def _gpu(index: int, **figures: Any) -> dict[str, Any]:
    return {
        "index": index,
        "state": "ok",
        "memory_used_bytes": 18.4 * GIB,
        "utilization_ratio": 0.97,
        "temperature_c": 61,
        **figures,
    }


def test_the_summary_says_what_matters_in_200_columns() -> None:
    gpus = {"state": "ok", "gpus": [_gpu(0), _gpu(1, temperature_c=70, utilization_ratio=0.4)]}
    guard = {"cpu_pct": 0.31, "memory_bytes": 48 * 1024**2}
    snapshot = assemble(
        _status(),
        host=_host(cpu_pct=41.0, disk_free_bytes=100 * GIB),
        gpus=gpus,
        guard=guard,
        unknown={},
    )
    line = summary(snapshot)
    assert line == (
        "running step 56.84 loss 3.40 p50 15.2s goodput 93% 1 restart | gpu 2x 18.4G 40% 70C |"
        " cpu 41% mem 1/64G disk 100G | repo 612s | guard 0.3% 48M mon 0.1%"
    )


def test_a_repo_that_is_empty_is_not_unknown() -> None:
    status = {**_status(), "uploads": {"repo": {"age_s": None, "reason": None, "empty": True}}}
    assert "| repo empty |" in summary(
        assemble(
            status,
            host=_host(),
            gpus={"state": "ok", "gpus": []},
            guard={"cpu_pct": 0.3, "memory_bytes": 1},
            unknown={},
        )
    )


def test_the_line_fits_whatever_the_values_are() -> None:
    status = _status()
    status["steps"].update(loss=1e30, p50_s=123456.789, outer_step=10**12, inner_step=10**12)
    guard = {"cpu_pct": 1e9, "memory_bytes": 10**15}
    gpus = {
        "state": "ok",
        "gpus": [_gpu(i, memory_used_bytes=10**15, state="lost") for i in range(1000)],
    }
    line = summary(assemble(status, host=_host(cpu_pct=1e12), gpus=gpus, guard=guard, unknown={}))
    assert len(f"2026-01-02T03:04:05.678Z | INFO | guard | HEALTH {line}") <= 200


def test_a_line_without_any_known_value_shows_unknown() -> None:
    snapshot = assemble(
        {},
        host=host_figures([None, None]),
        gpus=None,
        guard={"cpu_pct": None, "memory_bytes": None},
        unknown={"host": "no answer within 5 s"},
    )
    assert summary(snapshot) == "unknown | gpu ? | host ? | guard ? ? mon ?"
    assert snapshot["unknown"] == {"host": "no answer within 5 s"}
    assert event("health_snapshot", "info", "HEALTH x", summary="x", snapshot=snapshot)
