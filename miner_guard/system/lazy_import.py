"""Leaves out what another library imports only if it is there: the guard starts sooner and is
smaller."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def block_import(name: str) -> Iterator[None]:
    """Within it, `import name` raises ImportError; a module that was imported already stays as it
    is."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[name]
