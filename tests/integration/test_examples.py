"""examples/: each one runs under the guard with the command in its first lines, and the guard sees
its steps."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from miner_guard.record.store import RunReader
from tests.faults.guarded import guarding
from tests.support import requires
from tests.support.present_state import status_of

EXAMPLES = sorted((requires.REPO / "examples").glob("*.py"))
NEEDS = {
    "hf_trainer": "transformers",
    "lightning_trainer": "lightning",
    "accelerate_loop": "accelerate",
}
LONG = {"hf_trainer", "lightning_trainer", "accelerate_loop", "fsdp2", "checkpoints"}
"""In `make test` test_attach_auto runs the same frameworks and test_demo FSDP2; each takes seconds
of CPU to import."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "example",
    [
        pytest.param(e, id=e.stem, marks=[pytest.mark.long] if e.stem in LONG else [])
        for e in EXAMPLES
    ],
)
def test_it_runs_as_its_first_lines_say(example: Path, tmp_path: Path) -> None:
    requires.module("torch")
    requires.module(NEEDS.get(example.stem, "torch"))
    (line,) = re.findall(r"^.*(miner-guard run .*examples/.*\.py)$", example.read_text(), re.M)
    flags, _, command = line.partition("miner-guard run ")[2].partition("-- ")
    steps = 60 if example.stem == "diloco" else 20
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {"PATH": path, "OMP_NUM_THREADS": "1", "STEPS": str(steps), "OUT": str(tmp_path / "out")}
    with guarding(tmp_path) as guard:
        once = ["--max-restarts", "0", *flags.split()]
        running = guard.start(command.split(), *once, env=env, cwd=requires.REPO)
        assert running.wait(170) == 0, guard.tail()
    events = [hit.name for hit in RunReader(guard.state.db).events()]
    assert "inner_step" in events
    assert "incident" not in events
    assert status_of(guard.state.root)["steps"]["inner_step"] == steps
    if example.stem == "diloco":
        assert {"upload_blocked", "upload_allowed"} <= set(events)


def test_each_is_short_and_in_the_list() -> None:
    listed = (requires.REPO / "examples" / "README.md").read_text()
    assert len(EXAMPLES) == 8
    for example in EXAMPLES:
        assert len(example.read_text().splitlines()) < 60
        assert f"| `{example.name}` |" in listed
