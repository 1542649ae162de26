"""Xid numbers according to NVIDIA's catalogue: which component is at fault, what to do, and what a
line with an Xid means."""

from __future__ import annotations

import pytest

from miner_guard.incidents import knowledge, xids
from miner_guard.incidents.knowledge import RESTARTS
from miner_guard.incidents.root import RootCauseAnalyzer
from miner_guard.incidents.scan import Scanner
from tests.unit.incidents.helpers import incidents

KERNEL = "[1234.5] NVRM: Xid (PCI:0000:3b:00): {}"

BUCKETS = {
    "RESTART_APP": (
        *(8, 11, 13, 25, 31, 32, 39, 40, 41, 60, 68, 69, 70, 71, 72, 75, 76, 77, 80),
        *(82, 83, 84, 85, 86, 88, 89, 94, *range(96, 106), *range(126, 136), 139),
    ),
    "IGNORE": (
        *(14, 37, 38, 43, 44, 63, 66, 67, 92, 93, 106, 107, 108, 121, 137, 141),
        *(152, 153, 157, 160, 161),
    ),
    "RESET_GPU": (46, 62, 64, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158),
    "RESTART_BM": (79,),
    "RESTART_VM": (151,),
    "CHECK_MECHANICALS": (54,),
    "UPDATE_SWFW": (78,),
    "CONTACT_SUPPORT": (142,),
}
"""NVIDIA's immediate action by number:
https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html. Left out are the numbers whose
action is a workflow (45, 48, 74, 144-150, 154, 159) or not given."""

TIERS = {
    "RESTART_APP": {"application", "restart"},
    "IGNORE": {"application", "informational", "later"},
    "RESET_GPU": {"reset"},
    "RESTART_BM": {"reboot"},
    "RESTART_VM": {"reboot"},
    "CHECK_MECHANICALS": {"power"},
    "UPDATE_SWFW": {"support"},
    "CONTACT_SUPPORT": {"support"},
}
"""The tiers of xids.toml that match each of NVIDIA's immediate actions."""


@pytest.mark.parametrize("bucket", BUCKETS)
def test_each_number_has_the_immediate_action_of_nvidias_catalogue(bucket: str) -> None:
    rows = {n: xids.of_number(n) for n in BUCKETS[bucket]}
    wrong = {
        n: row and row.tier for n, row in rows.items() if not row or row.tier not in TIERS[bucket]
    }
    assert not wrong


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
        ("145, RLW_REMAP Fatal XC0 i0 Link 00", "gpu_hardware", "hardware"),
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
        "145, RLW_RSPCOL Non-fatal XC0",
        "147, TREX Nonfatal XC0",
        "149, NETIR_LINK_EVT Nonfatal XC0 i0 Link 04",
        "154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)",
    ],
)
def test_an_xid_that_asks_for_nothing_is_not_an_incident(text: str) -> None:
    """The running guard ignores it; `explain` names it as a notice."""
    line = KERNEL.format(text).encode() + b"\n"
    scanner, case = Scanner(knowledge.load()), RootCauseAnalyzer(knowledge.load())
    case.add(scanner.feed(line))
    case.add(scanner.finish())
    assert case.incidents(scanner.line) == []
    assert [incident.first.role for incident in incidents(line)] == ["notice"]
