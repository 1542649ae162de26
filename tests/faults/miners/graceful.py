"""Takes SECONDS to write a checkpoint when it is told to stop: graceful.py SECONDS FILE TOKEN."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

seconds, file = float(sys.argv[1]), Path(sys.argv[2])


def stop(number: int, _frame: object) -> None:
    time.sleep(seconds)
    with file.open("a") as out:
        out.write(f"checkpoint {signal.Signals(number).name}\n")
    sys.exit(0)


for each in (signal.SIGTERM, signal.SIGINT):
    signal.signal(each, stop)
print("graceful ready", flush=True)
while True:
    time.sleep(0.1)
