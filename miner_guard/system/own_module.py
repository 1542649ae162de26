"""The command that runs one of our modules in a process of its own."""

from __future__ import annotations

import sys

_BOOT = (
    "import sys; sys.path[:1] == [''] and sys.path.pop(0); del sys.argv[1]; import runpy; "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)
"""`python -m` would import `json` from the working directory, where the miner may have a `json.py`.
Python 3.10 has no `-P`, and `-I` would ignore PYTHONPATH."""


def own_module(name: str, python: str = sys.executable) -> list[str]:
    """`python -m NAME` without the working directory on its path; arguments may follow."""
    return [python, "-c", _BOOT, "-m", name]
