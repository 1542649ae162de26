"""Judging all ranks' reports together, and fitting them into the journal, even from a thousand
ranks."""

from __future__ import annotations

from typing import Any

import pytest

from miner_guard.checks import check, ranks
from miner_guard.config import Config, GpuSettings
from miner_guard.rank.journal import DiagnosisEntry
from miner_guard.state_dir import StateDir, write_json
from miner_guard.watch.gpu import DiagnosisMonitor
from tests.support.contexts import context
from tests.support.rank_reports import GIB, report


def reports_of_four(change: dict[str, Any] | None = None, of: int = 2) -> list[dict[str, Any]]:
    return [report(r, **(change or {} if r == of else {})) for r in range(4)]


def messages(reports: list[dict[str, Any]], expect: int | None = None) -> list[str]:
    found = ranks.events(reports, expect)
    return [str(f.fields.get("check", f.name)) for f in found]


ALIKE: dict[str, Any] = {"model_device": "cuda:0", "uuid": None}
OFFLOADED = {
    "model_device": "cpu",
    "shards": {"cpu": [1, 4]},
    "shard_devices": "cpu",
    "offload": True,
    "shard_bytes": GIB,
}


@pytest.mark.parametrize(
    "reports",
    {
        "healthy": reports_of_four(),
        "pipeline stages": [report(r, params=(3 + 5 * (r < 2)) * 10**9) for r in range(4)],
        "no LOCAL_RANK": [report(r, local_rank=None) for r in range(4)],
        "equally common dtypes": [
            report(r, dtype="bfloat16, float32" if r % 2 else "float32, bfloat16") for r in range(4)
        ],
        "a mask for each": [
            report(r, gpu_count=1, visible_devices=str(r), **ALIKE) for r in range(4)
        ],
        "a machine for each": [report(r, boot=f"boot-{r}", **ALIKE) for r in range(4)],
        # CUDA may give both ranks the GPU's UUID.
        "slices of one GPU": [
            report(r, **{**ALIKE, "uuid": "GPU-0"}, visible_devices=f"MIG-{r}") for r in range(4)
        ],
        "offload under a CUDA mesh": [report(r, **OFFLOADED) for r in range(4)],
    }.values(),
)
def test_legitimate_ranks_give_the_block_and_nothing_else(reports: list[dict[str, Any]]) -> None:
    assert messages(reports) == ["gpu_diagnostics"]


@pytest.mark.parametrize(
    "alike", [{"boot": "boot-0"}, {"uuid": "GPU-0", "visible_devices": "MIG-0"}]
)
def test_ranks_that_share_a_gpu_are_named(alike: dict[str, Any]) -> None:
    assert "shared_gpu" in messages([report(r, **{**ALIKE, **alike}) for r in range(4)])


@pytest.mark.parametrize(
    ("change", "event"),
    [
        ({**OFFLOADED, "mesh_device": "cpu"}, "model_on_cpu"),
        ({"model_device": "cpu", "shards": {"cpu": [1, 4]}, "mesh_device": "cpu"}, "mixed_devices"),
        ({"model_device": "cpu", "shards": {"cpu": [1, 4]}}, "shard_on_cpu"),
        ({"meta_params": 5}, "meta_parameters"),
        ({"uuid": "GPU-1"}, "shared_gpu"),
        ({"device_name": "NVIDIA A100-PCIE-40GB"}, "different_device_name"),
        ({"driver_version": "535.1"}, "different_driver_version"),
        ({"torch_version": "2.4.0"}, "different_torch_version"),
        ({"dtype": "float32"}, "different_dtype"),
        ({"batch_size": 4}, "different_batch_size"),
        ({"world_size": 8}, "different_world_size"),
        ({"unread": {"cuda": "RuntimeError: no"}}, "unread_cuda"),
    ],
)
def test_each_oddity_is_named(change: dict[str, Any], event: str) -> None:
    assert event in messages(reports_of_four(change), 4)


def test_parameters_kept_on_the_cpu_of_a_model_without_a_mesh_are_a_remark() -> None:
    kept = {"shards": {"cpu": [10, 40], "cuda:2": [10**9, 2 * GIB]}}
    for mesh, level in (("cuda", "critical"), (None, "warning")):
        found = ranks.events(reports_of_four({**kept, "mesh_device": mesh}), 4)
        assert [f.level for f in found if f.fields.get("check") == "shard_on_cpu"] == [level]


def test_ranks_with_hardly_any_memory_on_no_gpu_are_one_line() -> None:
    nothing = {"allocated_bytes": GIB // 2, "model_device": None}
    reports = [report(r, **(nothing if r else {})) for r in range(4)]
    (low,) = (f for f in ranks.events(reports, 4) if f.name == "low_gpu_memory")
    assert low.text == "LOW GPU MEMORY: Model may be on CPU! (ranks 1-3)"
    assert (low.fields["ranks"], low.fields["gpu_mem_gb"]) == ([1, 2, 3], 0.5)
    assert "low_gpu_memory" not in messages(reports_of_four({"allocated_bytes": GIB // 2}), 4), (
        "a small model on its GPU is well"
    )


def test_a_driver_that_torch_cannot_use_is_an_accident_without_any_setting() -> None:
    blind = [
        report(r, cuda_available=False, gpu_count=0, model_device="cpu", shards={}, uuid=None)
        for r in range(2)
    ]
    assert {"cuda_unavailable", "model_on_cpu"} <= set(messages(blind))
    assert messages(blind, 0) == ["gpu_diagnostics"]
    assert messages([{**r, "driver_version": None} for r in blind]) == ["gpu_diagnostics"]


@pytest.mark.parametrize(
    ("known", "count", "origin"),
    [
        ((2, 8, 4, 1), 2, "[gpu] expect"),
        ((None, 8, 4, 1), 8, "this host's last run"),
        ((None, 0, 4, 1), 4, "the profile"),
        ((None, None, None, 1), 1, "the GPUs present"),
        ((0, 8, 4, 1), 0, "[gpu] expect"),
        ((None, None, None, 0), None, "no source"),
    ],
)
def test_the_expected_number_of_gpus_names_its_origin(
    known: tuple[int | None, ...], count: int | None, origin: str
) -> None:
    assert check.expected(*known) == check.Expectation(count, origin)


def monitor(tmp_path: Any, **gpu: Any) -> DiagnosisMonitor:
    return DiagnosisMonitor(context(tmp_path, config=Config(gpu=GpuSettings(**gpu))))


def test_the_last_runs_gpus_make_a_cpu_run_an_accident(tmp_path: Any) -> None:
    cpu = [
        report(
            r, cuda_available=False, gpu_count=0, model_device="cpu", driver_version=None, uuid=None
        )
        for r in (0, 1)
    ]
    entry = DiagnosisEntry(reports=cpu)
    assert [f.name for f in monitor(tmp_path).on_entry(0, entry)][1:2] != ["cuda_unavailable"]
    write_json(StateDir(tmp_path).host_facts, {"gpu_count": 4})
    assert "cuda_unavailable" in [f.name for f in monitor(tmp_path).on_entry(0, entry)]
    assert "cuda_unavailable" not in [
        f.name for f in monitor(tmp_path, expect=0).on_entry(0, entry)
    ]


@pytest.mark.parametrize("count", [8, 64, 1024])
def test_the_monitors_block_does_not_grow_with_ranks_that_are_alike(
    tmp_path: Any, count: int
) -> None:
    """A single startup once wrote 145 KB. Rows that differ only in the GPU number now share one
    row."""
    reports = [report(r, allocated_bytes=(18 + r % 3) * GIB) for r in range(count)]
    reports[5] = {"rank": 5, "error": "no answer within 30 s"}
    diagnosis = monitor(tmp_path)
    first, *_, last = diagnosis.on_entry(0, DiagnosisEntry(reports=reports))
    assert first.name == "gpu_diagnostics"
    assert "rank 5: unknown: no answer within 30 s" in first.text
    if count > 16:
        assert f"\nranks 0-4,6-{count - 1}: " in first.text
        assert "memory 18.00 to 20.00 of" in first.text
        assert len(first.text) < 2000
    assert last.text.startswith("RESOURCES: ")
    assert last.text.endswith("Mixed Precision=ON (bfloat16 weights)")
    assert "CPU cores, batch=" in last.text
    assert diagnosis.snapshot()["ranks"] == reports
