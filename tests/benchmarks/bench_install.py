"""The cost of an installation: disk space by extra, and memory and CPU time of the process that
uses it."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from miner_guard.config.optional_deps import requirements
from tests.benchmarks.frame import Row

TITLE = "Installation: disk, memory and start, with each extra"
_PROCESSES = {
    "guard, without its schedule": "miner_guard.guard.app",
    "http: the port's process": "miner_guard.reporting.http_server",
    "otel: the OTLP exporter": "miner_guard.reporting.otel",
    "alerts: apprise": "apprise",
    "s3: boto3": "boto3",
    "hf: huggingface_hub": "huggingface_hub",
    "tensorboard's writer": "tensorboard.summary.writer.event_file_writer",
}
_EXTRAS = ("http", "otel", "alerts", "s3", "hf", "stacks", "tensorboard", "wandb")
_MEASURE = """
import importlib, sys, time
def resident():
    text = open("/proc/self/status").read()
    return int(text.split("VmRSS:")[1].split()[0]) / 1024
before, start = resident(), time.process_time()
importlib.import_module(sys.argv[1])
print(resident() - before, time.process_time() - start)
"""


def _closure(specifiers: list[str]) -> set[str]:
    """The distributions that these requirements pull in, limited to those installed here."""
    found: set[str] = set()
    waiting = [Requirement(text) for text in specifiers]
    while waiting:
        requirement = waiting.pop()
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        if name in found:
            continue
        try:
            needs = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        found.add(name)
        for text in needs:
            need = Requirement(text)
            extras = requirement.extras or {""}
            if need.marker is None or any(need.marker.evaluate({"extra": e}) for e in extras):
                waiting.append(need)
    return found


def _mib(names: set[str]) -> float:
    files = [file for name in names for file in metadata.files(name) or ()]
    paths = [Path(str(file.locate())) for file in files if not str(file).endswith(".pyc")]
    return sum(path.stat().st_size for path in paths if path.is_file()) / 2**20


def _process(module: str) -> tuple[float, float] | None:
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, module], capture_output=True, text=True, timeout=120
    )
    if done.returncode != 0:
        return None
    memory, seconds = map(float, done.stdout.split())
    return memory, seconds


def run() -> list[Row]:
    """Sizes without bytecode; memory is what the import adds, and time is CPU time."""
    declared = metadata.requires("miner-guard") or []
    base = _closure([text for text in declared if "extra ==" not in text])
    rows = [Row("the guard's dependencies, disk", _mib(base), "MiB", note=f"{len(base)} packages")]
    for extra in _EXTRAS:
        more = _closure(requirements(extra)) - base
        if more:
            rows.append(
                Row(f"extra {extra}, disk", _mib(more), "MiB", note=f"{len(more)} packages more")
            )
    for what, module in _PROCESSES.items():
        measured = _process(module)
        if measured is None:
            rows.append(Row(what, None, "MiB", note=f"{module} is not installed"))
        else:
            rows.append(Row(what, measured[0], "MiB", note=f"{1000 * measured[1]:.0f} ms of CPU"))
    return rows
