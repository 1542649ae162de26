"""A launcher with every kind of descendant that supervisors lose: process_tree.py MODE TOKEN.

`stay` waits until it is stopped, `leave` exits with 0 immediately and leaves them all behind.
Children: plain, setsid, double-forked, double-forked with an empty environment, one that ignores
SIGTERM, one stopped by SIGSTOP.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

mode, token = sys.argv[1], sys.argv[2]
SLEEP = f"import time; time.sleep(600) # {token}"
DEAF = (
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', "
    f"flush=True); {SLEEP}"
)


def python(code: str, **popen: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-S", "-c", code], **popen)  # type: ignore[call-overload, no-any-return]


def double_fork(env: dict[str, str] | None) -> None:
    if os.fork() == 0:
        os.setsid()
        python(SLEEP, env=env)
        os._exit(0)
    os.wait()


python(SLEEP)
python(SLEEP, start_new_session=True)
double_fork(None)
double_fork({})
deaf = python(DEAF, stdout=subprocess.PIPE)
assert deaf.stdout is not None
deaf.stdout.readline()
stopped = python(SLEEP)
os.kill(stopped.pid, signal.SIGSTOP)
print("family complete", flush=True)
if mode == "leave":
    os._exit(0)
time.sleep(600)
