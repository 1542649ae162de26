"""A guard over GPUs simulated by a fake NVML library, for the tests of `doctor` and `run`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_nvml import FakeNvml

TORCH = Path(__file__).parent.parent / "support" / "fakes" / "torch_with_cuda"
GUARD = [sys.executable, "-c", "from miner_guard.cli.main import main; main()"]
CRITICAL = 69


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """A miner's interpreter whose torch has CUDA."""
    program = tmp_path / "bin" / "python3"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nPYTHONPATH={TORCH} exec {sys.executable} "$@"\n')
    program.chmod(0o755)
    return program


def environment(fake: FakeNvml | None, tmp_path: Path, **settings: object) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("MINER_GUARD_", "CUDA_"))}
    own = {f"MINER_GUARD_{k}": str(v) for k, v in settings.items()}
    return {
        **env,
        **own,
        "MINER_GUARD_STATE_DIR": str(tmp_path / "state"),
        **(fake.env if fake else {}),
    }


class Running:
    """A guard with a miner that only waits."""

    def __init__(
        self,
        fake: FakeNvml,
        tmp_path: Path,
        python: Path,
        *flags: str,
        miner: list[str] | None = None,
        **settings: object,
    ) -> None:
        self.log = tmp_path / "state" / "guard.jsonl"
        quick = {"HEALTH__SNAPSHOT_EVERY_S": 0.5, "GPU__PREFLIGHT_WAIT_S": 0, **settings}
        waits = [
            str(python),
            "-c",
            "import time; print('the miner lives', flush=True); time.sleep(120)",
        ]
        self.process = subprocess.Popen(
            [*GUARD, "run", *flags, "--", *(miner or waits)],
            env=environment(fake, tmp_path, **quick),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def events(self) -> list[dict[str, Any]]:
        if not self.log.exists():
            return []
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def wait_for(self, event: str, text: str = "", seconds: float = 60) -> dict[str, Any]:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for record in self.events():
                if record["event"] == event and text in record["msg"]:
                    return record
            time.sleep(0.1)
        raise AssertionError(f"no {event} {text!r} in {[r['msg'] for r in self.events()]}")

    def end(self) -> tuple[int, str]:
        self.process.terminate()
        output, _ = self.process.communicate(timeout=60)
        return self.process.returncode, output
