"""What a preflight asks about, and what the miner's command, settings and profile say: the expected
number of GPUs, the folders, and the Python that the command runs in."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from miner_guard.checks.check import Expectation, expected
from miner_guard.config import Config
from miner_guard.state_dir import StateDir, read_json
from miner_guard.validators import profiles
from miner_guard.validators.profiles import Profile


@dataclass(frozen=True)
class PreflightRequest:
    """The input of a preflight: the miner's command, its environment, and the settings."""

    config: Config
    state: StateDir
    command: Sequence[str] = ()
    env: Mapping[str, str] = dataclasses.field(default_factory=lambda: dict(os.environ))
    """The miner's environment."""

    torch: bool = True
    """If False, query torch only if there is a driver or a GPU is expected: importing torch takes
    seconds."""


def profile_of(config: Config) -> Profile | None:
    """The chosen profile; None without one."""
    try:
        return profiles.profile_of(config.miner)
    except (OSError, ValueError):
        # Loading the settings has already reported the profile's error.
        return None


def expectation_of(request: PreflightRequest, present: int | None) -> Expectation:
    """The expected number of GPUs: from the setting, the last run's count in host.json, the
    profile, or the GPUs present, in that order."""
    setting = request.config.gpu.expect
    memory = read_json(request.state.host_facts)
    last = memory.get("gpu_count") if isinstance(memory, dict) else None
    profile = profile_of(request.config)
    compute = {} if profile is None else profile.compute
    demand = compute.get("min_gpus")
    ranks = number_of(request.command, "--nproc-per-node")
    if compute.get("gpus_per_rank") and ranks:
        demand = int(compute["gpus_per_rank"]) * ranks
    return expected(
        None if setting == "auto" else int(setting),
        last if isinstance(last, int) else None,
        demand,
        present,
    )


def folders_of(request: PreflightRequest) -> list[str]:
    """Folders that the miner and the guard write to: the state directory, the working directory,
    checkpoints, a local repo."""
    more = [request.config.health.checkpoint_dir, request.config.repo.path]
    return list(dict.fromkeys([str(request.state.root), str(Path.cwd()), *(p for p in more if p)]))


def value_of(command: Sequence[str], *names: str) -> str | None:
    """The value of the last argument with one of these names (`--name=value` or `--name value`);
    None if the command has no such argument.

    The last one wins, as in argument parsers. `-` and `_` in a name are equivalent, as in torchrun.
    """
    flags = {_normalised(name) for name in names}
    # `sh -c "torchrun --nnodes 2 train.py"` passes the launcher's command line as one argument.
    words = [part for word in command for part in word.split() or [word]]
    value = None
    for place, word in enumerate(words):
        name, equals, after = word.partition("=")
        if _normalised(name) in flags:
            value = after if equals else (words[place + 1] if place + 1 < len(words) else None)
    return value


def number_of(command: Sequence[str], *names: str) -> int | None:
    """`value_of` as a whole number; None if the value is not a whole number, as in
    `--nproc-per-node=gpu`."""
    value = value_of(command, *names)
    return int(value) if value is not None and value.isascii() and value.isdigit() else None


def _normalised(name: str) -> str:
    return name.replace("_", "-")


_PYTHON = re.compile(r"^python(\d+(\.\d+)?)?$")
_SHEBANG_BYTES = 512


def interpreter_of(command: Sequence[str], env: Mapping[str, str]) -> str:
    """Return the interpreter that `command` or its script's shebang names, otherwise the guard's
    own.

    Skips a leading `env NAME=VALUE`, and looks up names such as `torchrun` on the command's PATH.
    """
    words = list(command)
    while words and (words[0].rpartition("/")[2] in ("env", "nice", "exec") or "=" in words[0]):
        words.pop(0)
    if not words:
        return sys.executable
    program = shutil.which(words[0], path=env.get("PATH"))
    if program is None:
        return sys.executable
    if _PYTHON.match(program.rpartition("/")[2]):
        return program
    return _of_shebang(program, env) or sys.executable


def _of_shebang(path: str, env: Mapping[str, str]) -> str | None:
    try:
        with open(path, "rb") as file:
            head = file.read(_SHEBANG_BYTES).decode("utf-8", "replace").splitlines()
    except OSError:
        return None
    if not head or not head[0].startswith("#!"):
        return None
    words = head[0][2:].split()
    if words and words[0].endswith("/env"):
        words = words[2:] if len(words) > 2 and words[1] == "-S" else words[1:]
    # pip writes this form if the path is too long or contains spaces: `#!/bin/sh`, then `'''exec'
    # PYTHON "$0" "$@"`.
    if words and words[0] == "/bin/sh" and len(head) > 1 and head[1].startswith("'''exec'"):
        words = [head[1].removeprefix("'''exec'").split(' "$0"')[0].strip().strip('"')]
    if not words or not _PYTHON.match(words[0].rpartition("/")[2]):
        return None
    return shutil.which(words[0], path=env.get("PATH"))
