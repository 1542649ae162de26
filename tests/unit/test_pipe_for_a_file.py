"""The guard, ranks and commands never wait for a writer when they find a pipe where they expect a
file."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from miner_guard.guard.lock import killed_guard
from miner_guard.state_dir import StateDir, read_json, read_regular
from miner_guard.uploads import gate

READS: dict[str, Callable[[StateDir], object]] = {
    "any file": lambda state: _refused(lambda: read_regular(state.host_facts)),
    "host.json": lambda state: read_json(state.host_facts),
    "the last guard": lambda state: list(killed_guard(state, None)),
    "a rank's gate-inputs.json": lambda state: gate.read(state.gate_inputs),
}


def _refused(work: Callable[[], object]) -> str:
    try:
        work()
    except OSError as error:
        return str(error)
    return pytest.fail("a pipe was read")


@pytest.mark.parametrize("name", READS)
def test_a_pipe_in_place_of_a_file_holds_up_no_reader(name: str, tmp_path: Path) -> None:
    """The main thread once blocked while opening a pipe, so a dead miner stayed dead. A random
    sequence found this."""
    state = StateDir(tmp_path / "state")
    state.root.mkdir()
    for path in (state.host_facts, state.gate_inputs):
        os.mkfifo(path)
    answers: list[object] = []
    thread = threading.Thread(target=lambda: answers.append(READS[name](state)), daemon=True)
    thread.start()
    thread.join(10.0)
    assert answers, "it waits"
