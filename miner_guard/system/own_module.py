"""Builds the command that runs one of the guard's modules in a separate process."""

from __future__ import annotations

import sys

_BOOT = (
    "import sys; sys.path[:1] == [''] and sys.path.pop(0); del sys.argv[1]; import runpy; "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)
"""Replaces `python -m`, which would import `json` from the working directory, where the miner may
have a `json.py`. Python 3.10 has no `-P`, and `-I` would ignore PYTHONPATH."""


def own_module(name: str, python: str = sys.executable) -> list[str]:
    """The command for `python -m NAME` without the working directory on the module path. Callers
    may append arguments."""
    return [python, "-c", _BOOT, "-m", name]
