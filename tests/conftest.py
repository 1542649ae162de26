"""What holds for every test, and fixtures of several folders."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest

from tests.servers.webhook import Webhook
from tests.support import requires

# A loaded machine is no defect: how long one example takes is judged by the benchmarks alone.
hypothesis.settings.register_profile("patient", deadline=None)
hypothesis.settings.load_profile("patient")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell's background job ignores SIGINT, and so would every program that the tests start and
    # interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    requires.module("apprise")
    made = Webhook()
    yield made
    made.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    requires.module("playwright")
    chromium = requires.tool("chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield opened
        opened.close()
