"""A launcher of four steady ranks: four_ranks.py FILE STEP_S TOKEN. Rank 0 writes into FILE.

When one rank ends, it ends the others, as torchrun does.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

file, step_s, token = sys.argv[1:4]
STEADY = str(Path(__file__).with_name("steady.py"))
ranks: list[subprocess.Popen[bytes]] = []


def forward(number: int, _frame: object) -> None:
    for rank in ranks[:1] if number == signal.SIGUSR1 else ranks:
        rank.send_signal(number)


for each in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(each, forward)
signal.signal(signal.SIGUSR2, signal.SIG_IGN)
for number in range(4):
    names = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 4}
    env = {**os.environ, **{name: str(value) for name, value in names.items()}}
    target = file if number == 0 else os.devnull
    ranks.append(subprocess.Popen([sys.executable, "-u", STEADY, target, step_s, token], env=env))
_, status = os.wait()
for rank in ranks:
    rank.terminate()
sys.exit(os.waitstatus_to_exitcode(status) != -signal.SIGTERM)
