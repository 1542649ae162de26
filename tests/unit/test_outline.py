"""Reports on gradients before they are written, without reading any tensor."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miner_guard.config import GateSettings
from miner_guard.validators.decoding import contents
from miner_guard.validators.limits import Limits
from miner_guard.validators.outline import fits, outline
from miner_guard.validators.profiles import load_profile
from miner_guard.validators.shapes import Shapes

torch = pytest.importorskip("torch", reason="gradients are torch's tensors")

SN38 = Limits.of(GateSettings(), load_profile("sn38").limits)
SHAPES = Shapes({"w": (128, 192), "b": (128,)})


def good() -> dict[str, Any]:
    return {
        "widxs": torch.zeros(2, 64, 32, dtype=torch.int16),
        "wvals": torch.ones(2, 64, 32),
        "bidxs": torch.zeros(2, 32, dtype=torch.int16),
        "bvals": torch.ones(2, 32),
        "metadata": {},
    }


def test_good_gradients_have_no_problem() -> None:
    report = outline(good(), SN38, SHAPES)
    assert (report["problems"], report["params"], report["values_read"]) == ([], 2, False)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"wvals": torch.ones(2, 64, 32).half()}, "w: values are float16; validators add them"),
        ({"wvals": [1.0]}, "w: values are a list, not a tensor"),
        ({"wvals": torch.ones(2, 64, 31)}, "w: indices of shape [2, 64, 32] and values of"),
        ({"widxs": torch.zeros(3, 64, 32), "wvals": torch.ones(3, 64, 32)}, "as [2, 64, 192]"),
        (
            {"bidxs": torch.zeros(4, 16), "bvals": torch.ones(4, 16)},
            "do not fit a parameter decoded as [2, 64]",
        ),
        ({"bquant_params": (0.0, 1.0, 128, torch.ones(4), torch.float16)}, "b: values are float16"),
    ],
)
def test_what_validators_would_raise_on_is_reported(change: dict[str, Any], words: str) -> None:
    problems = outline({**good(), **change}, SN38, SHAPES)["problems"]
    assert len(problems) == 1
    assert words in problems[0]


def test_documents_of_another_form_or_model_are_reported() -> None:
    assert "contains a list" in outline([], SN38, SHAPES)["problems"][0]
    assert "lacks the key 'metadata'" in outline({}, SN38, SHAPES)["problems"][0]
    wrapped = {f"_orig_mod.{k}": v for k, v in good().items()} | {"metadata": {}}
    for shapes in (SHAPES, None):
        assert "validators know _orig_mod.w as w" in outline(wrapped, SN38, shapes)["problems"][0]
    other = Shapes({"x": (2,)})
    assert "a different model" in outline(good(), SN38, other)["problems"][0]


dims = st.lists(st.integers(0, 4), min_size=0, max_size=4).map(tuple)


@settings(max_examples=300, deadline=None)
@given(dims, dims, dims.filter(lambda d: len(d) >= 1 and 0 not in d))
def test_shapes_fit_where_torch_scatters_them(
    index: tuple[int, ...], values: tuple[int, ...], target: tuple[int, ...]
) -> None:
    """Otherwise an upload that validators would accept is blocked, or the other way round."""
    zeros = torch.zeros(target)
    try:
        zeros.scatter_reduce(-1, torch.zeros(index, dtype=torch.int64), torch.ones(values), "mean")
        taken = True
    except (RuntimeError, IndexError):
        taken = False
    assert fits(index, values, target) == taken


def test_a_model_of_a_billion_parameters_takes_a_few_milliseconds_and_no_tensor_is_read() -> None:
    names = [f"model.layers.{n // 9}.part{n % 9}.weight" for n in range(300)]
    shapes = Shapes(dict.fromkeys(names, (2048, 2048)))
    document: dict[str, Any] = {"metadata": {}}
    for name in names:
        # On the meta device there is nothing to read.
        document[f"{name}idxs"] = torch.empty(32, 64, 32, dtype=torch.int16, device="meta")
        document[f"{name}vals"] = torch.empty(32, 64, 32, device="meta")
    outline(document, SN38, shapes)
    start = time.perf_counter()
    report = outline(document, SN38, shapes)
    assert report["problems"] == []
    assert time.perf_counter() - start < 0.25


@pytest.mark.parametrize("where", ["wvals", "quantisation"])
def test_values_on_a_gpu_are_left_to_the_audit(where: str) -> None:
    """Reading a tensor on the GPU synchronises it, so the rank would wait."""

    class OnGpu(torch.Tensor):
        device = SimpleNamespace(type="cuda")

    tensor = torch.full((2, 64, 32), torch.nan).as_subclass(OnGpu)
    change = {"wvals": tensor} if where == "wvals" else {"wquant_params": (0.0, 1.0, 8, tensor)}
    report = contents(torch, {**good(), **change}, SN38, SHAPES)
    assert (report["problems"], report["reason"]) == ([], "the values are on cuda")


def test_more_bytes_than_are_worth_reading_are_left_to_the_audit() -> None:
    """A view of a few bytes may claim terabytes."""
    endless = torch.ones(1).expand(1 << 40)
    report = contents(torch, {**good(), "wvals": endless}, SN38, SHAPES)
    assert report["problems"] == []
    assert "is over the limit for pre-upload checks" in report["reason"]
