"""Facts that the guard derives from a miner's command and environment before the start:
interpreter, ranks, GPUs, ports."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from miner_guard.checks.check import Expectation
from miner_guard.checks.gpu import visible
from miner_guard.checks.request import PreflightRequest, expectation_of, interpreter_of, value_of
from miner_guard.config import Config, MinerSettings
from miner_guard.state_dir import StateDir


def program(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def test_the_miners_interpreter_is_found_from_its_command(tmp_path: Path) -> None:
    python = tmp_path / "python3.11"
    python.symlink_to(sys.executable)
    torchrun = program(tmp_path / "torchrun", f"#!{python}\nimport sys\n")
    long = program(tmp_path / "accelerate", f"#!/bin/sh\n'''exec' {python} \"$0\" \"$@\"\n' '''\n")
    script = program(tmp_path / "miner.py", "#!/usr/bin/env python3.11\n")
    shell = program(tmp_path / "start.sh", "#!/bin/bash\n")
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    for command in (
        [str(python), "m.py"],
        ["python3.11", "-u", "m.py"],
        ["torchrun", "--nproc_per_node=4", "m.py"],
        [torchrun, "m.py"],
        [long, "launch"],
        [script],
        ["env", "A=1", "python3.11", "m.py"],
    ):
        assert interpreter_of(command, env) == str(python), command
    for command in ([], [shell], ["nothing-of-that-name"]):
        assert interpreter_of(command, env) == sys.executable


@pytest.mark.parametrize(
    ("command", "value"),
    [
        (["torchrun", "--nnodes=2", "m.py"], "2"),
        (["torchrun", "--nnodes", "1:4", "m.py"], "1:4"),
        (["sh", "-c", "exec torchrun --nnodes 2 m.py"], "2"),
        (["torchrun", "--nnodes=2", "--nnodes=3", "m.py"], "3"),
        (["torchrun", "m.py", "--nnodes"], None),
        (["torchrun", "m.py", "nnodes=2"], None),
    ],
)
def test_an_argument_is_read_as_its_parser_will(command: list[str], value: str | None) -> None:
    assert value_of(command, "--nnodes") == value


@pytest.mark.parametrize(
    ("mask", "shown"),
    [
        *((None, None), ("", 0), ("-1", 0), ("0,1", 2), ("0,-1,2", 1), ("GPU-1a, GPU-2b", 2)),
        *(("none", 0), ("NoDevFiles", 0), ("0,none,1", 1), ("MIG-GPU-1a/1/0", 1)),
    ],
)
def test_what_cuda_visible_devices_shows(mask: str | None, shown: int | None) -> None:
    assert visible({} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}) == shown


def test_the_profile_demands_one_gpu_per_rank(tmp_path: Path) -> None:
    config = Config(miner=MinerSettings(profile="sn38"))
    asked = PreflightRequest(
        config, StateDir(tmp_path), ("torchrun", "--nproc_per_node=2", "m.py"), {}
    )
    assert expectation_of(asked, 8) == Expectation(2, "the profile")
    assert expectation_of(PreflightRequest(config, StateDir(tmp_path), (), {}), 8) == Expectation(
        4, "the profile"
    )
