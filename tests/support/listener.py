"""A process that receives a rank's notifications, as a supervisor does."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LISTENER = """
import socket, sys
server = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
server.bind(sys.argv[1])
print("ready", flush=True)
while True:
    server.recv(65536)
"""


@contextmanager
def listening(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that reads from the socket at `path`, killed after the block: a full queue would
    turn each notification into an error."""
    listener = subprocess.Popen([sys.executable, "-c", _LISTENER, path], stdout=subprocess.PIPE)
    try:
        assert listener.stdout is not None
        assert listener.stdout.readline() == b"ready\n"
        yield listener
    finally:
        listener.kill()
        listener.communicate()
