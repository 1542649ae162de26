"""A libnvidia-ml.so.1 for tests, built with cc and driven by a text file; see fakes/fake_nvml.c for
its keys."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support import requires

SOURCE = Path(__file__).with_name("fakes") / "fake_nvml.c"


class FakeNvml:
    """The state file, and the environment that a process needs to load the library."""

    def __init__(self, folder: Path, library: Path) -> None:
        self.path = folder / "nvml.state"
        self._library = library
        self._values: dict[str, object] = {}
        self.set(count=4)

    def set(self, values: dict[str, object] | None = None, **more: object) -> None:
        """Change values; None removes one. Running processes see the change at their next call."""
        for key, value in {**(values or {}), **more}.items():
            if value is None:
                self._values.pop(key, None)
            else:
                self._values[key] = value
        draft = self.path.with_suffix(".tmp")
        draft.write_text("".join(f"{key}={value}\n" for key, value in self._values.items()))
        os.replace(draft, self.path)

    @property
    def env(self) -> dict[str, str]:
        """Set the environment before exec, because the loader reads LD_LIBRARY_PATH only once."""
        return {"LD_LIBRARY_PATH": str(self._library.parent), "FAKE_NVML_STATE": str(self.path)}


def build(folder: Path) -> Path:
    """Compile the library. Skips the test without a compiler."""
    library = folder / "libnvidia-ml.so.1"
    compiler = requires.tool("cc")
    flags = [
        "-shared",
        "-fPIC",
        "-O1",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-Wl,-soname,libnvidia-ml.so.1",
    ]
    subprocess.run([compiler, *flags, "-o", str(library), str(SOURCE)], check=True)
    return library


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def fake_nvml(tmp_path: Path, nvml_library: Path) -> FakeNvml:
    """Four healthy A100s."""
    return FakeNvml(tmp_path, nvml_library)
