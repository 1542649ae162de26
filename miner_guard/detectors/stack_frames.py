"""Finds where a rank is: the innermost frame of the miner's own code in a stack dump. Pure."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping

_THREAD = re.compile(r"^(?:Thread|Current thread) ")
_PY_SPY = re.compile(r"^ {2,}.+ \((?P<file>[^()]+\.pyx?):(?P<line>\d+)\)$")
_FAULTHANDLER = re.compile(r'^ {2}File "(?P<file>[^"]+)", line (?P<line>\d+) in ')

_LIBRARIES = frozenset(
    {
        "torch",
        "torchvision",
        "transformers",
        "accelerate",
        "lightning",
        "lightning_fabric",
        "pytorch_lightning",
        "deepspeed",
        "datasets",
        "numpy",
        "miner_guard",
        "boto3",
        "botocore",
        "urllib3",
        "requests",
        "huggingface_hub",
        "aiohttp",
        "websockets",
        "websocket",
        "bittensor",
        "async_substrate_interface",
        "substrateinterface",
        "tqdm",
        "fsspec",
        "s3transfer",
        "httpx",
        "httpcore",
    }
)
"""py-spy shortens file names to start at the package, so the first component identifies the
library."""


def innermost_user_frame(dump: str) -> str | None:
    """Return the training thread's location, such as `loops.py:14`, from a py-spy or faulthandler
    dump; None if the dump has no frames.

    This is the main thread's innermost frame outside the standard library and known libraries, or
    simply its innermost frame if all of them are in libraries.
    """
    frames = [
        match
        for line in _training_thread(dump)
        if (match := _PY_SPY.match(line) or _FAULTHANDLER.match(line))
    ]
    for match in frames:
        if not _library(match["file"]):
            return _name(match)
    return _name(frames[0]) if frames else None


def waits_for_ranks(dump: str) -> bool:
    """Return whether the miner's code has called torch.distributed and has not returned from it, so
    the rank is waiting for the others."""
    for line in _training_thread(dump):
        match = _PY_SPY.match(line) or _FAULTHANDLER.match(line)
        if match is None:
            continue
        if "torch/distributed/" in match["file"]:
            return True
        if not _library(match["file"]):
            return False
    return False


def outside_the_collective(waiting: Mapping[int, bool]) -> tuple[int, ...]:
    """The ranks that the others are waiting for; empty if all ranks or none are waiting in
    torch.distributed. `waiting` maps each rank to True if it is waiting there."""
    outside = tuple(sorted(rank for rank, waits in waiting.items() if not waits))
    return outside if len(outside) < len(waiting) else ()


def _training_thread(dump: str) -> list[str]:
    threads: list[list[str]] = []
    for line in dump.splitlines():
        if _THREAD.match(line):
            threads.append([line])
        elif threads:
            threads[-1].append(line)
    if not threads:
        return dump.splitlines()
    return next(iter(_of_main(threads)), threads[0])


def _of_main(threads: Iterable[list[str]]) -> Iterable[list[str]]:
    # faulthandler does not name threads; the main thread handles the signal.
    return (
        thread
        for thread in threads
        if '"MainThread"' in thread[0] or thread[0].startswith("Current thread")
    )


def _library(file: str) -> bool:
    if "site-packages/" in file or "dist-packages/" in file or file.startswith("<"):
        return True
    if re.search(r"/lib/python3\.\d+/", file):
        return True
    first = file.partition("/")[0].removesuffix(".py")
    return first in sys.stdlib_module_names or first in _LIBRARIES


def _name(match: re.Match[str]) -> str:
    return f"{match['file'].rpartition('/')[2]}:{match['line']}"
