"""Xid numbers, by NVIDIA's catalogue: whose fault, what to do, what a line with one means."""

from __future__ import annotations

import pytest

from miner_guard.diagnosis.faults import of_events
from miner_guard.health import xids
from miner_guard.incidents.patterns import RESTARTS
from tests.unit.incidents.helpers import incidents, root

KERNEL = "[1234.5] NVRM: Xid (PCI:0000:3b:00): {}"


def test_every_row_has_words_and_a_policy_that_the_restart_policy_knows() -> None:
    for row in xids.catalogue():
        assert row.meaning
        assert row.action.endswith(".")
        assert row.level in ("ok", "warn", "critical")
        assert row.restart in RESTARTS


@pytest.mark.parametrize(
    "number", [11, 12, 16, 18, 24, 25, 38, 44, 46, 54, 59, 60, 65, 66, 70, 71, 96]
)
def test_numbers_that_once_were_unknown_are_known(number: int) -> None:
    assert xids.of_number(number)


@pytest.mark.parametrize(
    ("text", "label", "restart"),
    [
        ("79, pid=1, GPU has fallen off the bus.", "gpu_hardware", "hardware"),
        ("94, pid=77120, name=python, Contained: CE", "gpu_hardware", "once"),
        ("95, pid=1, Uncontained: LTC TAG", "gpu_hardware", "hardware"),
        ("137, pid=1, NVLink: fault type FAULT_PDE", "cuda_illegal_memory_access", "once"),
        ("31, pid=8123, name=python3, Ch 00000008", "cuda_illegal_memory_access", "once"),
        ("46, pid=9, GPU stopped processing", "gpu_hardware", "hardware"),
        ("149, NETIR_LINK_EVT Fatal XC0 i0 Link 00", "gpu_hardware", "hardware"),
        (
            "154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)",
            "gpu_hardware",
            "hardware",
        ),
    ],
)
def test_the_number_tells_whose_fault_it_is(text: str, label: str, restart: str) -> None:
    (found,) = incidents((KERNEL.format(text) + "\n").encode())
    assert (found.label, found.first.restart) == (label, restart)
    assert found.first.cause.startswith(f"Xid {text.split(',')[0]}: ")
    assert found.first.fix


@pytest.mark.parametrize(
    "text",
    [
        "63, pid='<unknown>', Row Remapper: New row marked for remapping, reset gpu to activate.",
        "92, pid=1, High single-bit ECC error rate",
        "93, InfoROM wear limit exceeded",
        "145, RLW_CTRL Nonfatal XC0",
        "149, NETIR_LINK_EVT Nonfatal XC0 i0 Link 04",
        "154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)",
    ],
)
def test_what_asks_for_nothing_is_no_incident(text: str) -> None:
    assert root(KERNEL.format(text)) is None


def test_an_event_that_asks_for_nothing_is_reported_without_an_alarm() -> None:
    levels = {
        n: next(of_events([{"index": 0, "state": "ok", "xids": [n]}])).severity
        for n in (63, 79, 92)
    }
    assert levels == {63: "warning", 79: "critical", 92: "info"}
