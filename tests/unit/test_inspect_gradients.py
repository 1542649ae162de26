"""Gradients, as a file from an untrusted miner and as the dictionary that rank 0 is about to write:
what validators would reject is refused, no code runs, memory is bounded."""

from __future__ import annotations

import os
import pickle
import re
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from miner_guard.config import GateSettings
from miner_guard.validators.decoding import contents
from miner_guard.validators.inspection import inspect_file
from miner_guard.validators.limits import Limits
from miner_guard.validators.profiles import load_profile
from miner_guard.validators.shapes import Shapes
from tests.support.gradient_files import FLAT, SHAPES, good, inspect_here, saved

torch = pytest.importorskip("torch", reason="gradients.pt is torch's format")


def test_a_good_file_is_counted(tmp_path: Path) -> None:
    report = inspect_file(saved(tmp_path, good()), FLAT, shapes=SHAPES)
    assert (report["problems"], report["params"], report["shapes_known"]) == ([], 2, True)


NAN, INF, FLOAT = float("nan"), float("inf"), torch.float32


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"wvals": torch.tensor([0.5, INF, 2.0], dtype=torch.bfloat16)}, "w: NaN or Inf"),
        ({"wvals": torch.tensor([0.5, NAN, 2.0]).to(torch.float8_e4m3fn)}, "w: NaN or Inf"),
        ({"wquant_params": (0.0, 1.0, 128, torch.full((4,), INF), FLOAT)}, "w: NaN or Inf"),
        (
            {"widxs": torch.tensor([5, 5, 5]), "wvals": torch.full((3,), 3e38)},
            "when validators add up the values for one index",
        ),
        ({"widxs": torch.zeros(1, dtype=torch.int64).expand(10**10)}, "claims 10000000000 indices"),
        ({"wvals": torch.ones(1).expand(10**10)}, "claims 10000000000 values"),
        (
            {"wvals": torch.ones(3).to_sparse()},
            "w: values are torch.sparse_coo on cpu, not a plain",
        ),
    ],
)
def test_contents_that_validators_reject(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    """Beyond what tests/truth holds."""
    report = inspect_here(saved(tmp_path, {**good(), **change}), shapes=SHAPES)
    assert any(re.search(words, p) for p in report["problems"]), report


VALUES = torch.tensor([0.5, -1.0, 2.0])


@pytest.mark.parametrize("place", range(5))
def test_lists_of_lists_are_not_walked_through(tmp_path: Path, place: int) -> None:
    """A file of 2 KB must not keep the child busy until its deadline and then be reported only as
    unknown."""
    nested: Any = (1.0,)
    for _ in range(64):
        nested = (nested, nested)
    parameters = [0.0, 1.0, 128, torch.ones(4), FLOAT]
    parameters[place] = nested
    change = {"wvals": torch.tensor([3, 0, 1], dtype=torch.uint8), "wquant_params": parameters}
    # Scale and offset are unpacked and never used.
    expected = 0 if place in (1, 2) else 1
    report = inspect_here(saved(tmp_path, {**good(), **change}), shapes=SHAPES)
    assert len(report["problems"]) == expected


def test_names_of_any_length_and_of_no_characters_never_make_an_answer_unreadable(
    tmp_path: Path,
) -> None:
    names = [letter * 10**6 for letter in ("p", "q", "\ud800")]
    document = {
        **good(),
        **{f"{name}{what}": torch.ones(1) for name in names for what in ("idxs", "vals")},
    }
    assert len(str(inspect_here(saved(tmp_path, document), shapes=SHAPES)).encode()) < 10_000


def test_tied_or_frozen_parameters_may_be_missing(tmp_path: Path) -> None:
    known = Shapes({"w": (8, 16), "b": (10,), "head": (8, 16)}, frozenset({"head"}))
    report = inspect_here(saved(tmp_path, good()), shapes=known)
    assert (report["problems"], report["warnings"], report["shapes_known"]) == ([], [], True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"wvals": None}, "w: values are missing; validators skip the parameter"),
        ({"xidxs": torch.tensor([0]), "xvals": torch.tensor([NAN])}, "skip parameters whose names"),
    ],
)
def test_what_validators_skip_is_warned_of_and_blocks_nothing(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    report = inspect_here(saved(tmp_path, {**good(), **change}), shapes=SHAPES)
    assert report["problems"] == []
    assert any(words in warning for warning in report["warnings"]), report


SN38 = Limits.of(GateSettings(), load_profile("sn38").limits)


def rows(width: int = 192, kind: Any = torch.float32) -> dict[str, Any]:
    """128 x 192, split into rows like the output of subnet 38's compressor without the DCT."""
    return {
        "widxs": torch.randint(0, width, (2, 64, 32), dtype=torch.int16),
        "wvals": torch.randn(2, 64, 32).to(kind),
        "metadata": {},
    }


class Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return os.system, (f"touch {self.marker}",)


def test_a_pickle_bomb_is_refused_and_nothing_runs(tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    archive, plain = saved(tmp_path, {**good(), "x": Bomb(marker)}), tmp_path / "plain.pt"
    plain.write_bytes(pickle.dumps({"x": Bomb(marker)}))
    for report in (inspect_file(archive, FLAT), inspect_here(plain)):
        assert "does not load with weights_only=True" in report["problems"][0]
        assert not marker.exists()
    pickle.loads(plain.read_bytes())
    assert marker.exists(), "the attack works"


@pytest.mark.parametrize("kept", [0, 1, 100, 0.5, 0.95, -1])
def test_a_truncated_file_is_refused(tmp_path: Path, kept: float) -> None:
    path = saved(tmp_path, good())
    whole = path.read_bytes()
    path.write_bytes(whole[: int(kept * len(whole)) if 0 < kept < 1 else int(kept)])
    report = inspect_here(path)
    assert len(report["problems"]) == 1
    assert report["params"] == 0


def test_10_gb_claimed_by_the_archive_are_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "gradients.pt"
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("archive/data/0", "w", force_zip64=True) as entry,
    ):
        for _ in range(64):
            entry.write(bytes(1024 * 1024))
    assert path.stat().st_size < 10**6
    with zipfile.ZipFile(path) as archive:
        assert len(archive.read("archive/data/0")) == 64 * 1024 * 1024, "the attack works"
    report = inspect_file(path, FLAT)
    assert "claims 67108864 bytes of contents, but the file has only" in report["problems"][0]


def test_10_gb_claimed_by_the_pickle_meet_the_memory_limit(tmp_path: Path) -> None:
    # torch's older format states each storage's size in the pickle and allocates before it reads.
    path = tmp_path / "gradients.pt"
    torch.save({"wvals": torch.ones(4)}, path, _use_new_zipfile_serialization=False)
    data = path.read_bytes()

    def inspected(claim: bytes, memory_bytes: int) -> Any:
        more = data.replace(b"K\x04Nt", claim + b"Nt").replace(b"K\x04", claim, 1)
        path.write_bytes(more)
        return inspect_file(path, FLAT, memory_bytes=memory_bytes)

    report = inspected(b"\x8a\x05\x00\x00\x00\x80\x02", 256 * 1024**2)
    assert "needs more memory than allowed" in report["problems"][0]
    assert report["params"] == 0
    half_a_gb = b"\x8a\x04\x00\x00\x00\x08"
    assert "more memory" in inspected(half_a_gb, 256 * 1024**2)["problems"][0]
    assert "more memory" not in inspected(half_a_gb, 2 * 1024**3)["problems"][0], "it works"


def test_a_file_that_cannot_be_inspected_is_unknown_and_not_healthy(tmp_path: Path) -> None:
    assert "No such file" in inspect_file(tmp_path / "absent.pt", FLAT)["reason"]
    assert (
        "no answer within 0.01 s"
        in inspect_file(saved(tmp_path, good()), FLAT, deadline_s=0.01)["reason"]
    )
    assert (
        "could not be started"
        in inspect_file(saved(tmp_path, good()), FLAT, python="/nonexistent")["reason"]
    )


# before the file is written


MODEL = Shapes({"w": (128, 192)})


def on_gpu(tensor: Any) -> Any:
    class OnGpu(torch.Tensor):
        device = SimpleNamespace(type="cuda")

    return tensor.as_subclass(OnGpu)


@pytest.mark.parametrize("where", ["wvals", "quantisation"])
def test_values_on_a_gpu_are_left_to_the_audit(where: str) -> None:
    """Reading a tensor on the GPU synchronises it, so the rank would wait."""
    tensor = on_gpu(torch.full((2, 64, 32), NAN))
    change = {"wvals": tensor} if where == "wvals" else {"wquant_params": (0.0, 1.0, 8, tensor)}
    report = contents(torch, {**rows(), **change}, SN38, MODEL)
    assert (report["problems"], report["reason"]) == ([], "the values are on cuda")


def test_more_bytes_than_are_worth_reading_are_left_to_the_audit() -> None:
    """A view of a few bytes may claim terabytes."""
    endless = torch.ones(1).expand(1 << 40).reshape(2, 64, -1)
    report = contents(torch, {**rows(), "wvals": endless}, SN38, MODEL)
    assert report["problems"] == []
    assert "is over the limit for pre-upload checks" in report["reason"]


def test_what_is_no_dictionary_is_refused() -> None:
    assert contents(torch, [], SN38, MODEL)["problems"] == ["contains a list, not a dictionary"]
