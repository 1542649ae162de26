"""Runs a command in the background of a terminal that stops background processes when they write to
it."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import termios
import threading

_LFLAG = 3


def main() -> int:
    master, slave = pty.openpty()
    attributes = termios.tcgetattr(slave)
    attributes[_LFLAG] |= termios.TOSTOP
    termios.tcsetattr(slave, termios.TCSANOW, attributes)

    def drain() -> None:
        while os.read(master, 65536):
            pass

    threading.Thread(target=drain, daemon=True).start()
    session = [sys.executable, __file__, "--session", *sys.argv[1:]]
    return subprocess.call(session, stdin=slave, stdout=slave, stderr=slave, start_new_session=True)


def session() -> int:
    import fcntl

    # The terminal becomes this session's; the command is in a different process group from the
    # foreground one.
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    os.tcsetpgrp(0, os.getpgrp())
    return subprocess.call(sys.argv[2:], preexec_fn=os.setpgrp)


sys.exit(session() if sys.argv[1] == "--session" else main())
