"""Finds, from the miner's command, the Python that the miner will run in."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Mapping, Sequence

_PYTHON = re.compile(r"^python(\d+(\.\d+)?)?$")
_SHEBANG_BYTES = 512


def of_command(command: Sequence[str], env: Mapping[str, str]) -> str:
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
