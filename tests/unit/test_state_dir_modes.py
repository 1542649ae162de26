"""The state directory quotes logs, stacks and command lines, so no other user may read it, whatever
its mode was before."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from miner_guard import state_dir
from miner_guard.cli.main import run
from miner_guard.exits import CONFIG
from miner_guard.guard.lock import LockHeld, acquire, make_private
from miner_guard.record.store import CLEAR_NOW, RunStore
from miner_guard.state_dir import (
    StateDir,
    Untrusted,
    choose,
    open_private,
    read_json,
    write_atomic,
    write_json,
)

NOBODY = 65534


@pytest.fixture(autouse=True)
def generous_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    return StateDir(tmp_path / "state")


def open_to_others(root: Path) -> list[str]:
    """The paths below `root` that other users may access."""
    paths = [root, *root.rglob("*")]
    return [
        str(p.relative_to(root))
        for p in paths
        if not p.is_symlink() and stat.S_IMODE(p.stat().st_mode) & 0o077
    ]


def test_what_the_guard_makes_is_private_under_any_umask(state: StateDir) -> None:
    acquire(state, 1)
    write_json(state.costs, {})
    RunStore(state.db).write(CLEAR_NOW)
    state_dir.make_folder(state.incidents / "20260102T030405-hang")
    write_atomic(state.incidents / "20260102T030405-hang" / "output.log", b"token")
    assert open_to_others(state.root) == []
    (state.root / "careless").write_text("token")
    assert open_to_others(state.root) == ["careless"], "the attack works"


def test_a_file_that_people_ask_for_by_its_path_follows_the_umask(tmp_path: Path) -> None:
    state_dir.write_atomic(tmp_path / "report.html", "for the web server", 0o666)
    assert stat.S_IMODE((tmp_path / "report.html").stat().st_mode) == 0o666


def test_an_open_directory_is_tightened_and_reported_once(state: StateDir) -> None:
    """Its mode closes it, whatever the modes of the files in it."""
    state.root.mkdir()
    state.root.chmod(0o777)
    assert open_to_others(state.root) == ["."], "the attack works"
    first, second = list(make_private(state)), list(make_private(state))
    assert [(f.name, f.fields["mode"]) for f in first] == [("guard_degraded", "0777")]
    assert second == []
    assert stat.S_IMODE(state.root.stat().st_mode) == 0o700


def test_a_file_that_became_readable_later_is_tightened_when_it_is_opened(state: StateDir) -> None:
    state.root.mkdir()
    state.log.write_text("")
    os.close(open_private(state.log, os.O_WRONLY))
    assert stat.S_IMODE(state.log.stat().st_mode) == 0o600


def test_a_shared_directory_keeps_its_mode_and_is_reported(state: StateDir) -> None:
    """If root passes `--state-dir /tmp`, changing its mode would lock everybody out."""
    state.root.mkdir()
    state.root.chmod(0o1777)
    [event] = make_private(state)
    assert event.name == "guard_degraded"
    assert "shared by the users of this host" in event.fields["what"]
    assert stat.S_IMODE(state.root.stat().st_mode) == 0o1777


def test_a_pipe_in_place_of_a_file_is_refused_without_waiting_for_its_other_end(
    tmp_path: Path,
) -> None:
    os.mkfifo(tmp_path / "guard.jsonl")
    with pytest.raises(subprocess.TimeoutExpired):  # The attack works.
        subprocess.run(["head", "-c", "1", tmp_path / "guard.jsonl"], timeout=0.5)
    for flags in (os.O_RDWR, os.O_RDONLY):
        with pytest.raises(OSError, match="Not a regular file"):
            open_private(tmp_path / "guard.jsonl", flags)


def test_the_users_own_links_are_followed_and_one_directory_has_one_name(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    (tmp_path / "further").symlink_to(tmp_path / "link")
    assert choose("x", str(tmp_path / "further" / "state"), {}).root == tmp_path / "disk" / "state"
    (tmp_path / "disk" / "elsewhere.jsonl").write_text("")
    (tmp_path / "guard.jsonl").symlink_to(tmp_path / "disk" / "elsewhere.jsonl")
    os.close(open_private(tmp_path / "guard.jsonl", os.O_WRONLY))


def test_a_loop_of_links_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(LockHeld, match=r"Too many levels of symbolic links|File exists"):
        acquire(choose("x", str(tmp_path / "loop"), {}), 1)


needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can make another user's symlink"
)


@needs_root
def test_another_users_link_leads_nowhere(tmp_path: Path) -> None:
    """In a shared directory another user could point the guard at somebody's files before it
    starts."""
    (tmp_path / "victim").mkdir()
    (tmp_path / "state").symlink_to("victim")
    os.chown(tmp_path / "state", NOBODY, NOBODY, follow_symlinks=False)
    for path in ("state", "state/deeper", "victim/../state"):
        with pytest.raises(Untrusted, match=rf"is a symlink owned by nobody \(uid {NOBODY}\)"):
            choose("x", str(tmp_path / path), {})
    (tmp_path / "state" / "guard.jsonl").write_text("")
    assert (tmp_path / "victim" / "guard.jsonl").exists(), "the attack works"


@needs_root
def test_a_directory_that_another_user_prepared_is_refused_by_every_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its gate-inputs.json would name the endpoint that gets the Hugging Face token."""
    root = tmp_path / "state"
    root.mkdir(mode=0o700)
    os.chown(root, NOBODY, NOBODY)
    words = rf"{root} belongs to nobody \(uid {NOBODY}\), .* as root \(uid 0\)"
    with pytest.raises(Untrusted, match=words):
        choose("x", str(root), {})
    commands = ("run", "status", "logs", "audit", "top", "report -o x", "ctl pause")
    for command in (*commands, "gate --outer-step 1 --inner-step 50"):
        arguments = [*command.split(), "--state-dir", str(root)]
        arguments += ["--", "true"] if command == "run" else []
        assert run(arguments) == CONFIG, command
        assert "another directory with --state-dir" in capsys.readouterr().err, command
    assert list(root.iterdir()) == []


def test_a_directory_that_others_could_have_filled_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "state"
    root.mkdir(mode=0o777)
    assert choose("x", str(root), {}).root == root, "the guard makes an empty one private"
    (root / "host.json").write_text("{}")
    for mode in (0o777, 0o770, 0o1777):
        root.chmod(mode)
        with pytest.raises(Untrusted, match=rf"other users can write to .*mode {mode:04o}"):
            choose("x", str(root), {})


def test_a_file_that_another_user_could_have_written_is_not_believed(state: StateDir) -> None:
    state_dir.make_folder(state.root)
    write_json(state.host_facts, {"processes": [[1, 1]]})
    assert read_json(state.host_facts) == {"processes": [[1, 1]]}
    state.host_facts.chmod(0o660)
    assert read_json(state.host_facts) is None
    os.replace(state.host_facts, state.root / "elsewhere")
    (state.root / "elsewhere").chmod(0o600)
    state.host_facts.symlink_to("elsewhere")
    assert read_json(state.host_facts) is None


@needs_root
def test_another_users_link_in_place_of_a_file_is_refused(state: StateDir, tmp_path: Path) -> None:
    state_dir.make_folder(state.root)
    (tmp_path / "victim").write_text("precious")
    for path in (state.log, state.lock):
        path.symlink_to(tmp_path / "victim")
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    with pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
        open_private(state.log, os.O_WRONLY | os.O_TRUNC)
    with pytest.raises(LockHeld):
        acquire(state, 1)
    assert (tmp_path / "victim").read_text() == "precious"
    os.close(os.open(state.log, os.O_WRONLY | os.O_TRUNC))
    assert (tmp_path / "victim").read_text() == "", "the attack works"


def test_a_folder_that_creating_its_parent_cannot_fix_raises_at_once() -> None:
    """A HOME in a file system that creates nothing must not cause endless recursion."""
    with pytest.raises(FileNotFoundError):
        state_dir.make_folder(Path("/proc/absent/state"))
