"""The matched line determines the first fix, and that fix mentions whatever the line names."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from miner_guard.incidents import knowledge
from miner_guard.incidents.explain import Explained, explain
from miner_guard.incidents.oom import Training

LIBRARY = 'File "/e/lib/python3.11/site-packages/trl/trainer.py", line 7, in f\n'


def found(log: str) -> Explained:
    root = explain(io.BytesIO(log.encode()), knowledge.load(), Training()).root
    assert root is not None
    return root


ROWS = Path(__file__).with_name("first_fixes.tsv").read_text(encoding="utf-8").splitlines()[1:]


@pytest.mark.parametrize("row", ROWS)
def test_the_first_fix_is_that_of_the_line(row: str) -> None:
    label, expected, line = row.split("\t")
    root = found(line.replace("\\n", "\n"))
    assert root.label == label
    assert expected in root.fixes[0]


def test_rebuilding_another_package_does_not_fix_a_cpu_only_torch() -> None:
    """`explain` once suggested `--force-reinstall PACKAGE` without naming a package."""
    root = found("OSError: libc10_cuda.so: cannot open shared object file: No such file")
    assert "CPU-only build" in root.cause
    assert "PACKAGE" not in " ".join(root.fixes)


def test_the_lowest_frame_of_the_miners_own_code_is_named_and_never_taken_for_a_damaged_file() -> (
    None
):
    """`explain` must not advise to delete the source file that a traceback passes through."""
    frames = 'Traceback (most recent call last):\n  File "/srv/neurons/miner.py", line 7, in f\n'
    assert "/srv/neurons/miner.py, line 7" in found(frames + LIBRARY + "KeyError: 'x'\n").fixes[0]
    torn = found(frames + "RuntimeError: PytorchStreamReader failed reading zip archive\n")
    assert torn.label == "checkpoint_corrupt"
    assert "miner.py" not in " ".join(torn.fixes)


def test_a_full_dev_shm_is_not_a_full_disk() -> None:
    frame = (
        'Traceback (most recent call last):\n  File "/l/multiprocessing/synchronize.py", line 57\n'
    )
    full = "OSError: [Errno 28] No space left on device\n"
    assert found(frame + full).label == "shm_exhausted"
    assert found(full).label == "disk_full"


def test_a_library_that_refuses_an_argument_is_not_the_miners_fault() -> None:
    refused = "TypeError: f() got an unexpected keyword argument 'of_ours'\n"
    start = "Traceback (most recent call last):\n  "
    assert found(start + LIBRARY + refused).label == "version_mismatch"
    assert found(start + 'File "neurons/miner.py", line 7\n' + refused).label == "code_bug"


def test_a_new_miner_that_has_no_state_yet_lost_nothing() -> None:
    """`explain` once reported lost work at the first start of every new miner."""
    root = found("WARNING Failed to load local state, loading global model instead\n")
    assert root.label == "state_load_failed"
    assert "normal for a new miner" in root.cause
    steps = "".join(f"Outer Step: 3 | Inner Step: {n} | Loss: 3.40\n" for n in range(12))
    log = f"Failed to load local state, loading global model instead\n{steps}".encode()
    assert explain(io.BytesIO(log), knowledge.load(), Training()).root is None


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-8"])
def test_a_log_in_any_encoding_is_read(encoding: str) -> None:
    """A UTF-16 log was once "nothing wrong"."""
    log = "step 1 loss 3.4 – fine\nOSError: [Errno 28] No space left on device\n" * 9000
    result = explain(io.BytesIO(log.encode(encoding)), knowledge.load(), Training())
    assert result.root is not None
    assert (result.root.label, result.root.line, result.lines) == ("disk_full", 2, 18000)
