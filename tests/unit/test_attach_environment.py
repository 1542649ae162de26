"""The variables that attaching adds to the miner's environment; attaching also works in a Python
without the guard's packages."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from miner_guard import attach
from miner_guard.attach.adapter import Adapter
from miner_guard.attach.sn38_uploads import Sn38Uploads
from miner_guard.rank import questions
from miner_guard.rank.guard import Guard
from miner_guard.state_dir import StateDir
from miner_guard.validators.facts import Decision
from tests.support.ranks import Ranks
from tests.unit.rank.helpers import place

BASE = """
class BaseMinerNeuron:
    def __init__(self, config=None):
        pass
"""

MINER = """
from types import SimpleNamespace
from template.base.miner import BaseMinerNeuron

class Miner(BaseMinerNeuron):
    def __init__(self):
        super().__init__()
        self.local_progress = SimpleNamespace(epoch=1, inner_step=0, loss=2.0)

    def inner_optimizer_step(self):
        self.local_progress.inner_step += 1

miner = Miner()
for _ in range(3):
    miner.inner_optimizer_step()
"""


def test_nothing_is_added_where_nothing_is_attached() -> None:
    env = {"PATH": "/bin", "PYTHONPATH": "/mine"}
    assert attach.environment(None, env) == env
    assert attach.environment("log", env) == env


def test_the_programs_own_path_follows_the_guards() -> None:
    env = attach.environment("auto", {"PYTHONPATH": "/mine:/yours", attach.ATTACHED: "7"})
    first, *others = env["PYTHONPATH"].split(":")
    assert (Path(first) / "sitecustomize.py").is_file()
    assert others == ["/mine", "/yours"]
    assert attach.ATTACHED not in env, "a restart attaches again"
    assert attach.environment("auto", env) == env, "twice is once"


def test_an_unknown_attach_mode_is_refused_with_the_valid_ones() -> None:
    with pytest.raises(attach.UnknownAttach, match="sn38, auto, log"):
        attach.environment("sn39", {})


def run(tmp_path: Path, base: str) -> tuple[Ranks, subprocess.CompletedProcess[str]]:
    """Run an older miner in a Python environment without the guard."""
    package = tmp_path / "template" / "base"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    (package / "miner.py").write_text(base)
    (tmp_path / "run.py").write_text(MINER)
    ranks = Ranks()
    env = attach.environment("sn38", ranks.env)
    # Not sys._base_executable: before 3.11 it is the virtual environment's, which has the guard.
    bare = Path(sys.base_prefix, "bin", "python{}.{}".format(*sys.version_info))
    done = subprocess.run(
        [str(bare), "run.py"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return ranks, done


def test_a_python_without_the_guard_finds_it(tmp_path: Path) -> None:
    ranks, _ = run(tmp_path, BASE)
    assert [s.inner_step for s in ranks.steps()] == [0, 1, 2]


def test_a_guard_that_cannot_be_imported_is_one_line_and_the_miner_runs(tmp_path: Path) -> None:
    # A package of the same name that is not ours, as PyPI's `validators` would be.
    (tmp_path / "miner_guard").mkdir()
    (tmp_path / "miner_guard" / "__init__.py").touch()
    _, done = run(tmp_path, BASE)
    assert (
        done.stderr.count("GUARD DEGRADED: attach sn38 at template.base.miner: ModuleNotFoundError")
        == 1
    )


def test_a_mismatch_is_reported_even_if_no_guard_ever_starts(tmp_path: Path) -> None:
    ranks, done = run(tmp_path, "class BaseMinerNeuron:\n    pass\n")
    assert done.stderr.count("GUARD DEGRADED: attach sn38") == 1
    assert "BaseMinerNeuron defines no method __init__" in done.stderr
    assert ranks.connected == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_read_its_miner_asks_with_the_others(tmp_path: Path, rank: int) -> None:
    """Otherwise one rank would upload ungated while the others wait for it in the gate's
    collective."""
    allowed = Decision(True, "gradient", 1, 60, "as rank 0 says")
    asked, uploaded = list[str](), list[int]()

    class Others:
        late = False

        def share(self, question: str, answer: Callable[[], bytes]) -> bytes:
            asked.append(question)
            return questions.pack(allowed) if rank else answer()

    class Miner:
        local_progress: object = SimpleNamespace(epoch=1, inner_step=60, loss=2.0)

        def start_background_upload(self, epoch: int, archive: bool = False) -> None:
            uploaded.append(epoch)

    adapter, ranks = Adapter("sn38"), Ranks()
    guard = adapter.guard = Guard(place(StateDir(tmp_path), ranks, rank=rank, world_size=2))
    guard._questions._agreement = Others()
    start, miner = Sn38Uploads(adapter).gated(Miner.start_background_upload), Miner()
    start(miner, 1)
    miner.local_progress = None
    start(miner, 2)
    miner.local_progress = Miner.local_progress
    start(miner, 3)
    guard.close()
    assert asked == ["upload 1", "upload 2", "upload 3"]
    assert uploaded == ([1, 3] if rank == 0 else [1, 2, 3])
    assert any("no attribute 'epoch'" in words for words in ranks.messages(rank))
