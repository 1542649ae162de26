"""`python -m miner_guard.validators.compare CHECKOUT` is `miner_guard.uploads.compare`, a program
that asks both the checkout's validator and the guard's audit."""

from __future__ import annotations

import runpy

if __name__ == "__main__":
    runpy.run_module("miner_guard.uploads.compare", run_name="__main__")
