"""What nvidia-smi printed on real machines, turned into the answers of the fake driver.

`tests/gpu_recordings.toml` lists the recordings by address and checksum, each with the label that
was written before the guard's code saw it. The files stay where they are: `content` takes them from
the folder MINER_GUARD_RECORDINGS or from GitHub.
"""

from __future__ import annotations

import hashlib
import os
import re
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest

from miner_guard.config import read_toml
from tests.support.fake_nvml import FakeNvml

TABLE = Path(__file__).parents[1] / "gpu_recordings.toml"

Values = Mapping[str, str]
"""What one GPU's section prints, by its path of labels in lower case: `fbmemoryusage/used`."""


@dataclass(frozen=True)
class Recording:
    """One output of `nvidia-smi -q` in a public file."""

    address: str
    """`owner/repository@commit:path`"""

    sha256: str
    label: Sequence[str]
    """The checks that must not be ok and their level, such as `gpu.ecc critical`; none: healthy."""

    why: str
    part: int = 0
    """Its place among the outputs in the file."""

    def __str__(self) -> str:
        return f"{self.address.rpartition('/')[2]}#{self.part}"


def recordings() -> list[Recording]:
    return [Recording(**row) for row in read_toml(TABLE)["recording"]]


_out_of_reach: list[str] = []
"""Why GitHub did not answer: it is not asked again."""


def content(recording: Recording) -> str:
    """The file's text. Skips the test if the file cannot be had, and fails it if it has changed."""
    place, _, path = recording.address.partition(":")
    folder = os.environ.get("MINER_GUARD_RECORDINGS")
    try:
        if folder:
            data = (Path(folder) / place / path).read_bytes()
        elif _out_of_reach:
            raise OSError(_out_of_reach[0])
        else:
            url = f"https://raw.githubusercontent.com/{place.replace('@', '/')}/{path}"
            with urllib.request.urlopen(url, timeout=20) as answer:
                data = answer.read()
    except OSError as error:
        _out_of_reach.append(str(error))
        pytest.skip(f"{recording.address}: {error}")
    assert hashlib.sha256(data).hexdigest() == recording.sha256, f"{recording.address} has changed"
    return data.decode("utf-8", "replace")


def gpus_of(text: str, part: int) -> list[Values]:
    """Each GPU's values in one of the outputs of a file, in XML or in plain text."""
    if "<nvidia_smi_log>" in text:
        document = re.findall(r"<nvidia_smi_log>.*?</nvidia_smi_log>", text, re.DOTALL)[part]
        return [dict(_of_xml(gpu, "")) for gpu in ElementTree.fromstring(document).iter("gpu")]
    outputs = re.split(r"^(?:Timestamp +: |```\n(?=    ECC Errors))", text, flags=re.MULTILINE)[1:]
    output = re.sub(r"^```.*", "", outputs[part], flags=re.DOTALL | re.MULTILINE)
    gpus = re.split(r"^GPU [0-9A-F]{4,8}:.*\n", output, flags=re.MULTILINE)
    return [dict(_of_text(gpu)) for gpu in gpus[1:] or gpus]


def _plain(label: str) -> str:
    return re.sub(r"[^a-z0-9]", "", label.lower())


def _of_xml(element: ElementTree.Element, above: str) -> Iterator[tuple[str, str]]:
    for child in element:
        path = f"{above}/{_plain(child.tag)}"
        yield path, (child.text or "").strip()
        yield from _of_xml(child, path)


def _of_text(section: str) -> Iterator[tuple[str, str]]:
    above: list[tuple[int, str]] = []
    for line in section.splitlines():
        indent = len(line) - len(line.lstrip())
        if not line.strip():
            continue
        if indent == 0:
            return
        label, _, value = line.partition(" : ")
        above = [(depth, name) for depth, name in above if depth < indent]
        above.append((indent, _plain(label)))
        # A note beside a value, such as an arrow, is set off by several spaces.
        yield "/" + "/".join(name for _, name in above), re.split(r" {3,}", value.strip())[0]


_NOT_SUPPORTED = 3
_REASONS = {
    "idle": 0x1,
    "applicationsclockssetting": 0x2,
    "swpowercap": 0x4,
    "hwslowdown": 0x8,
    "syncboost": 0x10,
    "swthermalslowdown": 0x20,
    "hwthermalslowdown": 0x40,
    "hwpowerbrakeslowdown": 0x80,
    "displayclocksetting": 0x100,
}
"""The bits of nvml.h, by what nvidia-smi prints for them."""

_NUMBERS = (
    ("mem.total", r"fbmemoryusage/total", 1 << 20, "MemoryInfo_v2 MemoryInfo"),
    ("mem.used", r"fbmemoryusage/used", 1 << 20, "MemoryInfo_v2 MemoryInfo"),
    ("util.gpu", r"utilization/gpu(util)?", 1, "UtilizationRates"),
    ("temp", r"temperature/gpu(current)?temp", 1, "Temperature TemperatureV"),
    ("power.mw", r"(gpu)?powerreadings/(instant|average)?powerdraw", 1000, "PowerUsage"),
    ("rows.unc", r"remappedrows/(uncorrectableerror|remappedrowunc)", 1, "RemappedRows"),
    ("pcie.width", r".*linkwidths?/current(linkwidth)?", 1, "CurrPcieLinkWidth"),
    ("pcie.width.max", r".*linkwidths?/max(linkwidth)?", 1, "MaxPcieLinkWidth"),
)
_WORDS = (
    ("rows.pending", r"remappedrows/(remappedrow)?pending", ("No", "Yes"), "RemappedRows"),
    (
        "rows.failure",
        r"remappedrows/remapp(edrowfailure|ingfailureoccurred)",
        ("No", "Yes"),
        "RemappedRows",
    ),
    ("mig", r"migmode/current(mig)?", ("Disabled", "Enabled"), "MigMode"),
    ("fabric", r"fabric/state", ("", "Not Started", "In Progress", "Completed"), None),
)
"""The key of the fake driver's state, the path of the label, and the functions that are not
supported where nvidia-smi prints no value."""


def replay(driver: FakeNvml, gpus: list[Values]) -> None:
    """Let the fake driver answer what nvidia-smi printed."""
    state: dict[str, object] = {"count": len(gpus)}
    for index, values in enumerate(gpus):
        state |= {f"{key}.{index}": value for key, value in _state(values).items()}
    driver.set(state)


def _state(values: Values) -> dict[str, object]:
    def find(pattern: str) -> list[str]:
        return [value for path, value in values.items() if re.fullmatch(f"/{pattern}", path)]

    state: dict[str, object] = {"name": "".join(find("productname"))}
    missing: set[str] = set()
    for key, pattern, factor, functions in _NUMBERS:
        if numbers := [n for value in find(pattern) for n in re.findall(r"^[\d.]+", value)]:
            state[key] = round(float(numbers[0]) * factor)
        else:
            missing |= set(functions.split())
    for key, pattern, words, function in _WORDS:
        if known := [words.index(value) for value in find(pattern) if value in words]:
            state[key] = known[0]
        elif function:
            missing.add(function)
    reasons = (
        r"clocks(?:event|throttle)reasons?/(?:.*/)?(?:clocks(?:event|throttle)reason)?(?:gpu)?"
    )
    bits = [bit for name, bit in _REASONS.items() if "Active" in find(reasons + name)]
    state["clocks.reasons"] = sum(bits)
    uncorrected = find(r"eccerrors/volatile/([sd]ramuncorrectable.*|doublebit/total)")
    if counts := [int(count) for count in uncorrected if count.isdigit()]:
        state["ecc.unc.vol"] = sum(counts)
    else:
        missing.add("TotalEccErrors")
    return state | {f"fail.nvmlDeviceGet{function}": _NOT_SUPPORTED for function in missing}
