"""A guard whose loop hangs a few seconds after its miner has started."""

from __future__ import annotations

import time
from typing import Any

from miner_guard.__main__ import main
from miner_guard.watch.runner import MonitorRunner

_launch = MonitorRunner.launch


def hang_here() -> None:
    print("wedged now", flush=True)
    while True:
        time.sleep(600)


def launch(self: MonitorRunner, record: Any) -> None:
    _launch(self, record)
    hang_here()


MonitorRunner.launch = launch  # type: ignore[method-assign]

if __name__ == "__main__":
    main()
