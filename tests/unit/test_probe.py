"""Probes of a child with a deadline: how long to wait for a late child."""

from __future__ import annotations

from pathlib import Path

import pytest

from miner_guard.system import probe

_ANSWER = (
    "import json, os; json.dump({'value': 7}, open(int(os.environ['_MINER_GUARD_PROBE_FD']), 'w'))"
)
_BUSY = "import time; end = time.process_time() + 2.5\nwhile time.process_time() < end: pass\n"
_ASLEEP = "import time; time.sleep(600)\n"


def script(folder: Path, text: str) -> Path:
    path = folder / "child.py"
    path.write_text(text + _ANSWER)
    return path


def test_a_child_that_makes_progress_after_its_deadline_is_waited_for(tmp_path: Path) -> None:
    answer = probe.ask(script(tmp_path, _BUSY), {}, 0.2, patience_s=120)
    assert (answer.value, answer.answered) == (7, True)


@pytest.mark.parametrize(("child", "patience_s"), [(_ASLEEP, 120), (_BUSY * 50, 1)])
def test_a_child_without_progress_or_beyond_its_patience_did_not_answer(
    tmp_path: Path, child: str, patience_s: float
) -> None:
    answer = probe.ask(script(tmp_path, child), {}, 0.2, patience_s=patience_s)
    assert (answer.value, answer.answered) == (None, False)
    assert answer.seconds < 60
    assert "no answer within" in str(answer.reason)


def test_a_child_that_ends_without_an_answer_has_answered(tmp_path: Path) -> None:
    answer = probe.ask(script(tmp_path, "raise SystemExit(3)\n"), {}, 60)
    assert answer.answered
    assert "exited with 3" in str(answer.reason)
