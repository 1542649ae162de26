"""Children that hide: shedding.py TOKEN. One clears its environment with `env -i`, one overwrites
it in place. Both first leave their parent, session and process group, so that they can be found
only through a cgroup's members or a list."""

from __future__ import annotations

import os
import subprocess
import sys
import time

token = sys.argv[1]
SLEEP = f"import time; time.sleep(600) # {token}"
OVERWRITE = f"""
import ctypes, time
fields = open("/proc/self/stat").read().rpartition(")")[2].split()
start, end = int(fields[47]), int(fields[48])  # env_start, env_end: what setproctitle writes over
ctypes.memset(start, 0, end - start)
{SLEEP}
"""


def daemon(command: list[str]) -> None:
    if os.fork() == 0:
        os.setsid()
        subprocess.Popen(command)
        os._exit(0)
    os.wait()


daemon(["env", "-i", sys.executable, "-S", "-c", SLEEP])
daemon([sys.executable, "-S", "-c", OVERWRITE])
print("all hidden", flush=True)
time.sleep(600)
