"""Many children that ignore SIGTERM: deaf.py CHILDREN TOKEN. They are `sleep`s started by shells,
which makes thousands of them affordable."""

from __future__ import annotations

import os
import signal
import sys
import time

children, token = int(sys.argv[1]), sys.argv[2]
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for _ in range(children):
    if os.posix_spawn("/bin/sleep", ["sleep", "600"], {**os.environ, "DEAF": token}) < 0:
        raise SystemExit("no more processes")
print("all deaf", flush=True)
time.sleep(600)
