"""Makes files fail or hang for real processes, through a library preloaded into them; see
fakes/faulty_files.c."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.support import requires

SOURCE = Path(__file__).with_name("fakes") / "faulty_files.c"


class FaultyFiles:
    """The paths that fail or hang, and the environment that makes them do so in a process."""

    def __init__(self, folder: Path, library: Path) -> None:
        self._state = folder / "faulty.state"
        self.env = {"LD_PRELOAD": str(library), "FAULTY_FILES_STATE": str(self._state)}
        self.set()

    def set(self, *, fail: Iterable[str] = (), hang: Iterable[str] = ()) -> None:
        """From now on, exactly the paths that match these shell patterns fail with EIO, or hang."""
        draft = self._state.with_suffix(".tmp")
        draft.write_text(
            "".join([*(f"fail {path}\n" for path in fail), *(f"hang {path}\n" for path in hang)])
        )
        os.replace(draft, self._state)


@pytest.fixture(scope="session")
def faulty_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("faulty") / "faulty_files.so"
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror"]
    subprocess.run(
        [requires.tool("cc"), *flags, "-o", str(library), str(SOURCE), "-ldl"], check=True
    )
    return library


@pytest.fixture
def faulty_files(tmp_path: Path, faulty_library: Path) -> FaultyFiles:
    """A library that injects no faults until the test asks for them."""
    return FaultyFiles(tmp_path, faulty_library)
