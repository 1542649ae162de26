"""A rank's facts about itself: reading them creates no CUDA context, and the counts are local
rather than global."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from miner_guard.checks.ranks import diagnostics_block
from miner_guard.rank.journal import TrainingEntry

torch = pytest.importorskip("torch")

from miner_guard.rank import diagnose  # noqa: E402  only where torch is
from miner_guard.validators import shapes  # noqa: E402
from miner_guard.validators.shapes import Shapes  # noqa: E402

ALONE: Any = SimpleNamespace(rank=0, local_rank=0, world_size=1)


def test_a_process_without_a_cuda_context_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any) -> Any:
        raise AssertionError("this call makes a CUDA context")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    for name in (
        "current_device",
        "get_device_properties",
        "memory_allocated",
        "mem_get_info",
        "init",
    ):
        monkeypatch.setattr(torch.cuda, name, forbidden)
    facts = diagnose.cuda_facts("cuda:0")
    assert facts == {"cuda_available": True, "gpu_count": 4, "cuda_context": False}


def test_counts_bytes_and_dtypes_by_device() -> None:
    model = torch.nn.Sequential(
        torch.nn.Linear(10, 10), torch.nn.Linear(10, 5, dtype=torch.bfloat16, device="meta")
    )
    seen = diagnose.placement(model)
    assert seen["shards"] == {"cpu": [110, 440], "meta": [55, 110]}
    assert (seen["shard_params"], seen["meta_params"], seen["model_device"]) == (165, 55, "cpu")
    assert set(seen["dtype"].split(", ")) == {"float32", "bfloat16"}
    assert seen["mesh_device"] is None
    assert seen["offload"] is False


def test_what_cannot_be_read_is_named_and_the_rest_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(_device: str | None) -> Any:
        raise RuntimeError("CUDA driver error: out of memory")

    monkeypatch.setattr(diagnose, "cuda_facts", broken)
    reported = TrainingEntry(batch_size=2, effective_batch_size=512)
    report = diagnose.report(ALONE, torch.nn.Linear(2, 2), reported)
    assert report["unread"] == {"cuda": "RuntimeError: CUDA driver error: out of memory"}
    assert report["accumulation_steps"] == 256
    assert report["shard_params"] == 6


def test_the_block_counts_micro_batches_of_a_rank_and_in_all() -> None:
    """Source 004 says 256 where four ranks have 64 each, so a bare 64 would need an explanation."""
    report = {"rank": 0, "world_size": 4, "batch_size": 2, "effective_batch_size": 512}
    said = {}
    for steps in (64, 256, None):
        block = diagnostics_block([{**report, "accumulation_steps": steps}])
        (said[steps],) = (row for row in block.splitlines() if "accumulation" in row)
    assert said[64].endswith("Gradient accumulation steps: 64 on each rank, 256 in all")
    assert said[256].endswith("Gradient accumulation steps: 256")
    assert said[None].endswith("unknown")


@pytest.mark.parametrize(("variable", "local_rank"), [("0", 0), (None, None)])
def test_a_local_rank_that_was_not_reported_is_unknown(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, local_rank: int | None
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if variable is not None:
        monkeypatch.setenv("LOCAL_RANK", variable)
    assert diagnose.report(ALONE, None, TrainingEntry())["local_rank"] == local_rank


def test_a_store_that_breaks_names_the_ranks_and_raises_nothing() -> None:
    class Broken:
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("connection reset")

    rows = diagnose.gather(Broken(), {"rank": 0}, 3, 1.0)  # type: ignore[arg-type]
    assert [r["rank"] for r in rows] == [0, 1, 2]
    assert all("connection reset" in r["error"] for r in rows[1:])


def test_the_drivers_version_is_read_without_its_library(tmp_path: Any) -> None:
    file = tmp_path / "version"
    file.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.133.20  Release "
        "Build\nGCC version: 12\n"
    )
    assert diagnose.driver_version(file) == "570.133.20"
    file.write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.163.01  Tue Apr  8 12:41:17 UTC 2025\n"
    )
    assert diagnose.driver_version(file) == "550.163.01"
    assert diagnose.driver_version(tmp_path / "none") is None


def test_shapes_are_the_whole_parameters_by_plain_name_with_those_that_may_be_missing(
    tmp_path: Path,
) -> None:
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(8, 4), "head": torch.nn.Linear(4, 8)})
    model["head"].weight = model["embed"].weight
    model["head"].bias.requires_grad_(False)
    seen = diagnose.model_shapes(torch.nn.ModuleDict({"_orig_mod": model}))
    assert seen is not None
    assert seen.of == {"embed.weight": [8, 4], "head.weight": [8, 4], "head.bias": [8]}
    assert seen.optional == {"head.weight", "head.bias"}
    shapes.write(tmp_path / "shapes.json", seen)
    assert shapes.read(tmp_path / "shapes.json") == seen
    (tmp_path / "shapes.json").write_text('{"shapes": {"w": "8x4"}}')
    assert shapes.read(tmp_path / "shapes.json") is None


def test_shapes_that_a_rank_cannot_know_are_unknown_and_older_ones_forgotten(
    tmp_path: Path,
) -> None:
    sharded = torch.nn.Linear(4, 8)
    sharded.weight.tensor_model_parallel = True
    emptied = torch.nn.Linear(4, 8)
    emptied.weight.data = torch.empty(0)
    assert diagnose.model_shapes(sharded) is None
    assert diagnose.model_shapes(emptied) is None
    file, host = tmp_path / "shapes.json", cast(Any, Alone())
    diagnose.diagnose(host, torch.nn.Linear(4, 8), TrainingEntry(), shapes_file=file)
    assert shapes.read(file) == Shapes({"weight": [8, 4], "bias": [8]})
    diagnose.diagnose(host, sharded, TrainingEntry(), shapes_file=file)
    assert not file.exists()


class Alone:
    """A rank without other ranks and without a supervisor."""

    place, supervised = ALONE, False

    def journal(self, document: Any, /) -> bool:
        return True

    def emit(self, event: Any, /) -> None:
        return
