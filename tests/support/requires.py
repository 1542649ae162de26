"""Requirements of a test on the machine: if something is missing, the test skips with the reason
locally, and fails under CI=true."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
CORPUS = REPO.parent / "shared" / "corpus"


def missing(reason: str) -> None:
    """Skip the test for this reason; under CI=true fail it."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"{reason}, and CI must have it")
    # Also skip if a whole file needs it.
    pytest.skip(reason, allow_module_level=True)


def tool(name: str) -> str:
    """Path of a program."""
    # The environment's own folder first: a venv need not be activated, and the system's program may
    # be too old (Debian 12's rclone cannot serve S3).
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        missing(f"the program {name} is not installed")
    return str(found)


def module(name: str) -> None:
    """An importable module."""
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        # A parent of a dotted name.
        found = None
    if found is None:
        missing(f"the Python module {name} is not installed")


def corpus(name: str) -> Path:
    """A file of the corpus next to the repository. A missing file is never a failure, because a
    clone does not have it."""
    path = CORPUS / name
    if not path.exists():
        pytest.skip(f"{path} is not on this machine")
    return path
