"""examples/: each runs under the guard as its first lines say, and the guard sees its steps."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from miner_guard.eventlog.query import Query, search
from miner_guard.exits import CRASH_LOOP
from tests.support import requires

EXAMPLES = sorted((requires.REPO / "examples").glob("*.py"))
ENDS_UNSAID = {"hf_trainer"}
"""They do not say that they finished, so their end counts as a failure: one start is enough."""


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_it_runs_as_its_first_lines_say(example: Path, tmp_path: Path) -> None:
    requires.module("torch")
    if example.stem == "hf_trainer":
        requires.module("transformers")
    (line,) = re.findall(r"^.*(miner-guard run .*examples/.*\.py)$", example.read_text(), re.M)
    words = line.split()
    here = ["--no-preflight", "--max-restarts", "0", "--state-dir", str(tmp_path / "state")]
    done = subprocess.run(
        [str(Path(sys.executable).with_name(words[0])), words[1], *here, *words[2:]],
        cwd=requires.REPO,
        env={
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "STEPS": "60",
            "OUT": str(tmp_path / "out"),
        },
        capture_output=True,
        text=True,
        timeout=170,
    )
    expected = {0, CRASH_LOOP} if example.stem in ENDS_UNSAID else {0}
    assert done.returncode in expected, done.stdout[-3000:]
    events = [hit.event for hit in search(tmp_path / "state" / "guard.jsonl", Query())]
    assert "inner_step" in events
    assert "incident" not in events
    if example.stem == "diloco":
        assert {"upload_blocked", "upload_allowed"} <= set(events)


def test_each_is_short_and_in_the_list() -> None:
    listed = (requires.REPO / "examples" / "README.md").read_text()
    assert len(EXAMPLES) >= 4
    for example in EXAMPLES:
        assert len(example.read_text().splitlines()) < 60
        assert f"| `{example.name}` |" in listed
