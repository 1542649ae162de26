"""Snapshots in memory on a real device: exact, without synchronisation, and with almost no wait."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from miner_guard.state_dir import STATE_DIR, StateDir
from tests.gpu.conftest import Table
from tests.gpu.test_hook import no_synchronisation

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

PAIRS = 12
WIDTH, LAYERS, TOKENS = {False: 64, True: 4096}, 8, {False: 64, True: 16384}
"""Keyed by whether a GPU is present; with AdamW, 134 million parameters are 1.6 GB of state."""


class Training:
    def __init__(self, folder: Path, cuda: bool) -> None:
        import torch

        from miner_guard.checkpoints import Checkpointer

        torch.manual_seed(19)
        self._device = "cuda" if cuda else "cpu"
        layers = (torch.nn.Linear(WIDTH[cuda], WIDTH[cuda]) for _ in range(LAYERS))
        norm = torch.nn.BatchNorm1d(WIDTH[cuda])
        self.model = torch.nn.Sequential(*layers, norm).to(self._device)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self._input = torch.randn(TOKENS[cuda], WIDTH[cuda], device=self._device)
        self.checkpoints = Checkpointer(
            folder, every=10**6, memory_every=1, optimizers=[self.optimizer]
        )
        self.number = 0

    def step(self) -> None:
        self.number += 1
        self.model(self._input).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def copied(self) -> dict[str, Any]:
        from miner_guard.checkpoints.layout import parts

        return {name: part.local.clone() for name, part in parts(self.state())[0].items()}

    def written(self) -> None:
        assert self.checkpoints._memory is not None
        self.checkpoints._memory.wait()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv(STATE_DIR, str(tmp_path / "state"))
    yield tmp_path / "disk"
    shutil.rmtree(StateDir(tmp_path / "state").memory, ignore_errors=True)


def _seconds(work: Callable[[], None], cuda: bool) -> float:
    import torch

    if cuda:
        torch.cuda.synchronize()
    started = time.monotonic()
    work()
    if cuda:
        torch.cuda.synchronize()
    return time.monotonic() - started


def test_a_snapshot_of_the_gpu_is_exact_and_training_does_not_wait(
    folder: Path, cuda: bool, table: Table
) -> None:
    import torch

    training = Training(folder, cuda)
    training.step()
    # Reserves the memory, and pins it.
    training.checkpoints.snapshot(training.number, training.state)
    alone, beside = [], []
    for _ in range(PAIRS):
        training.step()
        training.written()
        alone.append(_seconds(training.step, cuda))
        expected, at = training.copied(), training.number

        def with_snapshot() -> None:
            with no_synchronisation(cuda):
                training.checkpoints.snapshot(training.number, training.state)
            training.step()

        beside.append(_seconds(with_snapshot, cuda))
    share = statistics.median(b / a for a, b in zip(alone, beside, strict=True)) - 1
    training.written()
    target = Training(folder, cuda)
    target.step()
    state = target.state()
    assert target.checkpoints.resume(state) == Path(f"/dev/shm/step-{at:08d}")
    from miner_guard.checkpoints.layout import parts

    found = parts(state)[0]
    assert all(torch.equal(found[name].local, value) for name, value in expected.items())
    size = sum(v.numel() * v.element_size() for v in expected.values())
    shown = f"{100 * share:.1f} % of {statistics.median(alone):.3f} s, {size / 1e9:.1f} GB"
    table.add("a step with a snapshot, longer by", shown if cuda else None, "<= 5 %")
    table.add("the snapshot resumes exactly", "yes", "yes")
    if cuda:
        assert share <= 0.05, shown
