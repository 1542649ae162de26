"""What holds for every test."""

from __future__ import annotations

import signal

import hypothesis

# A loaded machine is no defect: how long one example takes is judged by the benchmarks alone.
hypothesis.settings.register_profile("patient", deadline=None)
hypothesis.settings.load_profile("patient")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell's background job ignores SIGINT, and so would every program that the tests start and interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)
