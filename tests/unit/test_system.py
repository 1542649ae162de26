"""What the guard and its keeper share: processes, helpers, probes, descriptors, word search."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miner_guard.guard.lock import killed_guard
from miner_guard.keeper.teardown import Teardown
from miner_guard.state_dir import StateDir, read_json, read_regular
from miner_guard.system import probe, processes, word_search
from miner_guard.system.children import module_command
from miner_guard.system.clock import FakeClock
from miner_guard.system.descriptors import WakePipe, ready
from miner_guard.system.probe import HelperCpu, end_helpers
from miner_guard.system.processes import HELPER, Process, Stat, descendants
from miner_guard.system.word_search import WordSearch
from miner_guard.uploads import gate
from tests.faults.guarded import REPO


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"]) as process:
        yield process
        process.kill()


@pytest.fixture(params=[True, False], ids=["pidfd", "no pidfd"])
def pidfd(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if not request.param:
        monkeypatch.delattr(os, "pidfd_open")
    return bool(request.param)


@pytest.mark.usefixtures("pidfd")
def test_a_reused_pid_is_not_signalled(child: subprocess.Popen[bytes]) -> None:
    seen = processes.stat(child.pid)
    assert seen is not None
    assert not processes.send(Process(child.pid, seen.process.start - 1), signal.SIGKILL)
    assert child.poll() is None
    assert processes.send(seen.process, signal.SIGKILL)
    assert child.wait(10) == -signal.SIGKILL
    assert not processes.send(seen.process, signal.SIGKILL)


def test_descendants_are_found_through_zombies_and_loops_end() -> None:
    def row(pid: int, parent: int, state: str = "S") -> Stat:
        return Stat(Process(pid, 1), "x", state, parent)

    table = {
        s.process.pid: s
        for s in (row(2, 1), row(3, 2, "Z"), row(4, 3), row(5, 1), row(6, 7), row(7, 6))
    }
    assert {p.pid for p in descendants([2], table)} == {2, 4}
    assert {p.pid for p in descendants([6], table)} == {6, 7}


def test_a_process_that_proc_hides_counts_as_alive(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under hidepid, /proc does not show processes of other users."""
    seen = processes.stat(child.pid)
    assert seen is not None
    monkeypatch.setattr(processes, "stat", lambda _pid: None)
    assert processes.alive(seen.process)
    child.kill()
    child.wait()
    assert not processes.alive(seen.process)


def test_one_call_sends_several_signals(child: subprocess.Popen[bytes]) -> None:
    """A stopped process acts on SIGTERM only when it continues."""
    seen = processes.stat(child.pid)
    assert seen is not None
    assert processes.send(seen.process, signal.SIGSTOP)
    assert processes.send(seen.process, signal.SIGTERM, signal.SIGCONT)
    assert child.wait(10) == -signal.SIGTERM


def test_the_pause_of_a_teardown_does_not_grow_with_the_machines_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stop once waited four times as long as its search took: 46 s for 3,000 processes."""
    living = {Process(2**22 + n, 1) for n in range(3000)}
    commands: list[int] = []
    monkeypatch.setattr(processes, "send", lambda *_arguments: True)
    monkeypatch.setattr(processes, "command", lambda pid: commands.append(pid) or "")
    clock = FakeClock()
    fake_time = SimpleNamespace(monotonic=clock.monotonic, thread_time=time.thread_time)
    monkeypatch.setattr("miner_guard.keeper.teardown.time", fake_time)
    teardown = Teardown(lambda: set(living), Process(2**22 - 1, 1))
    teardown.ask(1.0)
    began = clock.monotonic()
    while (again := teardown.step()) is not None:
        assert again <= 1.0
        clock.advance(again)
        if teardown._stage == "kill":
            living.clear()
    assert clock.monotonic() - began < 1.0 + 2.0 + 3 * 0.5
    assert len(teardown.killed) == 3000
    assert len(commands) <= 51, "the others are only counted"


_BURN = """import sys, time
while time.process_time() < float(sys.argv[1]): pass
print("burnt", flush=True)
sys.stdin.read()"""
_COMMAND = [sys.executable, "-S", "-c", _BURN]


def _helper(seconds: float) -> subprocess.Popen[bytes]:
    """A helper that has used this much CPU time and waits until its stdin ends."""
    child = subprocess.Popen(
        [*_COMMAND, str(seconds)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, HELPER: "1"},
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"burnt\n"
    return child


@pytest.fixture
def helper() -> Iterator[subprocess.Popen[bytes]]:
    with _helper(0.3) as child:
        yield child
        child.kill()


def test_a_running_helper_counts_and_still_counts_once_it_has_ended(
    helper: subprocess.Popen[bytes],
) -> None:
    cpu = HelperCpu()
    while_running = cpu.read()
    assert 0.25 <= while_running < 3.0
    helper.communicate()
    assert while_running <= cpu.read() < while_running + 1.0


def test_a_helper_of_another_thread_counts_however_briefly_it_lived() -> None:
    """The CPU time of senders and probes that end between two samples must be counted too."""
    cpu = HelperCpu()
    thread = threading.Thread(target=lambda: _helper(0.3).communicate())
    thread.start()
    thread.join()
    assert 0.25 <= cpu.read() < 3.0


Start = Callable[[], "subprocess.Popen[bytes]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a helper that never ends by itself."""
    started: list[subprocess.Popen[bytes]] = []

    def begin() -> subprocess.Popen[bytes]:
        program = "import time; print(flush=True); time.sleep(600)"
        child = subprocess.Popen([sys.executable, "-S", "-c", program], stdout=-1)
        assert child.stdout is not None
        child.stdout.readline()
        started.append(child)
        return child

    yield begin
    for child in started:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


def test_a_helper_that_another_thread_started_ends_even_if_suspended(start: Start) -> None:
    started: list[subprocess.Popen[bytes]] = []
    release = threading.Event()

    def work() -> None:
        started.append(start())
        release.wait(60)

    thread = threading.Thread(target=work)
    thread.start()
    while not started:
        time.sleep(0.01)
    started[0].send_signal(signal.SIGSTOP)
    end_helpers(10.0)
    release.set()
    thread.join()
    assert started[0].wait(1) == -signal.SIGKILL


def test_the_guards_exit_waits_no_longer_than_it_may(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A helper in uninterruptible sleep does not die."""
    monkeypatch.setattr("psutil.Process.kill", lambda process: None)
    helper = start()
    began = time.monotonic()
    end_helpers(0.1)
    assert time.monotonic() - began < 5
    assert helper.poll() is None


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


def test_a_module_of_the_miners_directory_does_not_replace_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A miner's `json.py` once kept the GPU sampler and the HTTP port from ever starting."""
    for name in ("json", "socket", "psutil"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('foreign')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(REPO))
    answer = probe.ask("miner_guard.checks.host", {}, 60)
    assert "foreign" not in str(answer.reason)


def test_arguments_and_the_name_arrive_as_with_python_m(tmp_path: Path) -> None:
    (tmp_path / "helper_of_test.py").write_text("import sys; print(__name__, *sys.argv)\n")
    done = subprocess.run(
        [*module_command("helper_of_test"), "-x", "y"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["__main__", str(tmp_path / "helper_of_test.py"), "-x", "y"]


HEAPS = """
import ctypes, gc, json, os, sys, threading
from miner_guard.system import children
alive = [[] for _ in range(60_000)]
gc.collect()
if sys.argv[1] == "settled":
    children.settle_memory()
started = gc.get_stats()[2]["collections"]
meet = threading.Barrier(20)
def allocate():
    own = [bytearray(600) for _ in range(100)]
    meet.wait()
threads = [threading.Thread(target=allocate) for _ in range(20)]
for each in threads: each.start()
for each in threads: each.join()
for n in range(20_000): json.dumps({"n": n}, indent=1)
libc = ctypes.CDLL(None)
libc.fdopen.restype = ctypes.c_void_p
reading, writing = os.pipe()
file = ctypes.c_void_p(libc.fdopen(writing, b"w"))
libc.malloc_info(0, file)
libc.fclose(file)
heaps = os.read(reading, 1 << 16).count(b"<heap nr=")
print(heaps, gc.get_stats()[2]["collections"] - started)
"""


def test_neither_threads_nor_garbage_make_a_settled_process_grow() -> None:
    """In an hour of faults, the guard grew from 65 to 72 MB."""

    def heaps_and_collections(how: str) -> list[int]:
        command = [sys.executable, "-c", HEAPS, how]
        return [int(number) for number in subprocess.check_output(command).split()]

    (heaps, collections), (many, few) = map(heaps_and_collections, ("settled", "careless"))
    assert heaps <= 2 < 8 < many
    assert collections > few


def test_descriptors_beyond_those_of_select_are_waited_for() -> None:
    """A guard that inherited or opened 1,024 files must not die of `filedescriptor out of range in
    select()`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 1400:
        if hard != resource.RLIM_INFINITY and hard < 1400:
            pytest.skip(f"at most {hard} descriptors are allowed here")
        resource.setrlimit(resource.RLIMIT_NOFILE, (1400, hard))
    low, write_end = os.pipe()
    try:
        high = 1300
        os.dup2(low, high)
        assert ready([high], 0.0) == []
        os.write(write_end, b"x")
        assert ready([high], 5.0) == [high]
    finally:
        for each in (low, high, write_end):
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_wake_ends_one_wait_however_often_it_is_called_and_none_blocks() -> None:
    pipe = WakePipe()
    for _ in range(100_000):
        pipe.wake()
    assert ready([pipe.reading], 0.0) == [pipe.reading]
    pipe.clear()
    assert ready([pipe.reading], 0.0) == []
    pipe.clear()
    pipe.wake()
    assert ready([pipe.reading], 0.0) == [pipe.reading]
    pipe.close()
    pipe.wake()


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


WORDS = [b"error", b"Err", b"no space", b"xid 79", "已杀死".encode()]
TEXTS = st.lists(
    st.sampled_from(
        [b"ERROR", b"rr", b"\n", b"no ", b"space", b"Xid 79", "已杀死".encode(), b"x\0"]
    )
).map(b"".join)


@pytest.fixture(params=["hyperscan", "plain"], scope="module")
def search(request: pytest.FixtureRequest) -> Iterator[WordSearch]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "plain":
            patch.setattr(word_search, "hyperscan", None)
        elif word_search.hyperscan is None:
            pytest.skip("no hyperscan on this platform")
        found = WordSearch(WORDS)
        assert (found._each_once is None) is (request.param == "plain")
        assert (found._every is None) is (request.param == "plain")
        yield found


@given(text=TEXTS)
def test_it_finds_each_word_and_each_line_with_one(search: WordSearch, text: bytes) -> None:
    small = [word.lower() for word in WORDS]
    assert search.found_in(text) == {word for word in small if word in text.lower()}
    lines = [line for line in text.split(b"\n") if any(word in line.lower() for word in small)]
    assert [text[start:end] for start, end in search.lines_in(text)] == lines


def test_no_words_are_never_found_and_an_empty_word_is_refused() -> None:
    assert WordSearch([]).found_in(b"text") == set()
    assert WordSearch([]).lines_in(b"text") == []
    with pytest.raises(ValueError, match="empty"):
        WordSearch([b""])
