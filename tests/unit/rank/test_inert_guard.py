"""`miner_guard.init` where the guard's own code cannot run: training continues, uploads are
blocked, and the guard reports it."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import miner_guard
from miner_guard.rank import guard as hook
from miner_guard.state_dir import StateDir
from miner_guard.watch.output import DegradedHooksMonitor
from tests.support.contexts import context
from tests.support.output import show

TRAINING = """
import miner_guard
guard = miner_guard.init()
assert miner_guard.init() is guard
assert guard.diagnose(None, batch_size=2) == ()
with guard.phase("forward"), guard.track("evaluation"):
    pass
guard.step(outer_step=56, inner_step=84, loss=3.4, lr=2.1e-5)
decision = guard.may_upload(outer_step=56, inner_step=84, kind="archive")
assert not decision and decision.allowed is False, decision
with guard.upload(decision) as record:
    record.size_bytes = 1
assert (guard.rank, guard.world_size) == (3, 4)
guard.close(finished=True)
print("trained", decision.reason)
"""

REFUSING = """
import sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "miner_guard.rank.recorder":
            raise {error}
sys.meta_path.insert(0, Finder())
"""


@pytest.mark.parametrize(
    ("error", "beside"),
    [
        ('SyntaxError("invalid syntax")', ""),
        ("MemoryError()", ""),
        ("SystemExit(3)", ""),
        ("", "raise RuntimeError('not the real one')"),
        ("", "import sys; sys.exit('usage: mmap FILE')"),
    ],
)
def test_an_import_that_fails_costs_only_the_guard(tmp_path: Path, error: str, beside: str) -> None:
    """Also for a hostile module `beside` the script."""
    if beside:
        (tmp_path / "mmap.py").write_text(beside)
    script = tmp_path / "train.py"
    script.write_text((REFUSING.format(error=error) if error else "") + TRAINING)
    env = {**os.environ, "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**env, "_MINER_GUARD_STATE_DIR": str(tmp_path / "state")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    reason = f"the guard's hook cannot run on rank 3: {error.partition('(')[0]}"
    assert done.stdout.startswith(f"trained {reason}"), done.stdout
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"GUARD DEGRADED: {reason}")
    assert line.endswith("; training continues without it, uploads are blocked")


def test_an_error_while_the_guard_begins_costs_only_the_guard(
    state: StateDir, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fails(**_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hook, "_current", None)
    monkeypatch.setattr(hook.environment, "find", fails)
    monkeypatch.setattr(miner_guard, "_inert", None)
    guard = miner_guard.init(state.root)
    assert isinstance(guard, miner_guard.InertGuard)
    assert miner_guard.init() is guard
    assert "No space left on device" in capfd.readouterr().err


def test_the_inert_guard_has_the_whole_api() -> None:
    inert = miner_guard.InertGuard(OSError("gone"))
    for name, member in inspect.getmembers(hook.Guard):
        if name.startswith("_"):
            continue
        assert hasattr(inert, name), name
        if not inspect.isfunction(member):
            continue
        parameters = list(inspect.signature(member).parameters.values())[1:]
        positional = [None for p in parameters if p.kind is not inspect.Parameter.KEYWORD_ONLY]
        named = {p.name: None for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
        inspect.signature(getattr(inert, name)).bind(*positional, **named)


def test_the_guard_reports_a_rank_without_a_hook_once(tmp_path: Path) -> None:
    monitor = DegradedHooksMonitor(context(tmp_path))
    line = b"GUARD DEGRADED: the guard's hook cannot run on rank 3: ImportError: no; training\n"
    events = show(monitor, b"loss 3.4\n", line, b"[rank1]: " + line, b"say GUARD DEGRADED: x\n")
    assert [event.text for event in events] == [line.decode().strip()]
