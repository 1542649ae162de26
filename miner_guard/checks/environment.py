"""Checks the miner's environment: leftover variables, packages, exposed secrets. Finds the
Python that the miner's command runs in."""

from __future__ import annotations

import functools
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from miner_guard.checks.check import Check, Snapshot
from miner_guard.config import read_toml
from miner_guard.config.optional_deps import EXTRAS, install, not_installed
from miner_guard.record.redaction import Redactor


@functools.cache
def leftovers() -> tuple[Mapping[str, Any], ...]:
    """The rows of leftovers.toml."""
    return tuple(read_toml(Path(__file__).with_name("leftovers.toml"))["leftover"])


def environment_checks(s: Snapshot) -> Iterator[Check]:
    """Check variables, packages and the command line."""
    yield from _leftovers(s.env)
    yield from _packages(s)
    yield from _extras(s)
    yield from _command(s)
    yield from _upstream(s)


def _leftovers(env: Mapping[str, str]) -> Iterator[Check]:
    for row in leftovers():
        value = env.get(row["name"], "")
        if value and ("values" not in row or value.lower() in row["values"]):
            seen = f"{row['name']}={value}: {row['why']}"
            yield Check(
                "env.leftover",
                "warn",
                seen,
                "unset",
                f"unset {row['name']} unless you set it on purpose",
            )


def _packages(s: Snapshot) -> Iterator[Check]:
    if s.packages is None:
        why = f"the miner's interpreter: {s.unread.get('packages', 'not queried')}"
        yield Check(
            "env.packages", "unknown", why, None, "check that the command's interpreter starts"
        )
        return
    p = s.packages
    yield Check("env.python", "ok", f"the miner runs Python {p['python']} ({p['executable']})")
    # Attached, the miner imports the guard's own copy, or, with --attach log, none.
    if not p["miner_guard"] and s.config.miner.attach is None:
        seen = "the miner's interpreter can't import miner_guard"
        step = "install miner-guard into the miner's environment, or use --attach auto"
        yield Check("env.miner_guard", "unknown", seen, "importable", step)


def _extras(s: Snapshot) -> Iterator[Check]:
    """Report extras that the settings require but the guard's interpreter lacks."""
    for extra in EXTRAS:
        if names := s.missing_extras.get(extra.name):
            seen = f"{extra.setting} is set and {not_installed(names)}: {extra.without}"
            step = f"{install(extra.name)} in the guard's environment"
            yield Check(f"env.extra.{extra.name}", "warn", seen, "installed", step)


def _command(s: Snapshot) -> Iterator[Check]:
    redactor = Redactor.from_environment(s.env)
    exposed = [
        a.partition("=")[0] if a.startswith("--") else "an argument"
        for a in s.command
        if redactor.text(a) != a
    ]
    # `--secret VALUE`: two arguments that only together look like a secret.
    pairs = [
        a
        for a, b in zip(s.command, s.command[1:], strict=False)
        if a.startswith("--") and redactor.text(f"{a} {b}") != f"{a} {b}"
    ]
    if named := sorted({*exposed, *pairs}):
        seen = f"a secret on the command line: {', '.join(named)}"
        step = (
            "pass it through the environment or a file: every user on this host can "
            "read command lines"
        )
        yield Check("env.secret_on_command_line", "warn", seen, "none", step)


def _upstream(s: Snapshot) -> Iterator[Check]:
    """Report secrets that subnet 38's own code exposes to others (see ops/sn38)."""
    if "sn38" not in (s.config.miner.attach, s.config.miner.profile):
        return
    seen = "subnet 38's upload worker gets the bucket's write keys on its command line"
    step = (
        "every user on this host can read them while it runs: give the miner a dedicated host or "
        "container, or mount /proc with hidepid=2"
    )
    yield Check("env.worker_keys", "warn", seen, "none", step)
    if verbose := [a for a in s.command if a in ("--logging.debug", "--logging.trace")]:
        seen = (
            f"with {verbose[0]}, subnet 38's miner writes its bucket's read credentials to the log"
        )
        step = "start the miner without it, and delete the log files that contain them"
        yield Check("env.debug_log", "warn", seen, "off", step)


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
