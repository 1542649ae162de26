"""Names of the guard's metrics and events in OpenTelemetry. Imports no OpenTelemetry package.

Names, units and attributes follow the semantic conventions (1.37) where those define them:
https://opentelemetry.io/docs/specs/semconv/system/ (system, process, hardware) and
https://opentelemetry.io/docs/specs/semconv/general/events/. Everything else is `miner_guard.*`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from miner_guard.eventlog.status_document import StatusDocument
from miner_guard.reporting import metrics

NAMESPACE = "miner_guard."

SEVERITIES = {"debug": 5, "info": 9, "warning": 13, "error": 17, "critical": 21}
"""The level as an OpenTelemetry severity number: DEBUG, INFO, WARN, ERROR, FATAL."""

_HEAD = frozenset({"ts", "level", "event", "msg", "run_id", "host", "rank"})
"""Record keys that OpenTelemetry stores outside the attributes."""

_UNITS = {"seconds": "s", "bytes": "By", "ratio": "1", "celsius": "Cel", "watts": "W"}
_GPU = {"hw.type": "gpu"}


@dataclass(frozen=True)
class Convention:
    """A metric for which the semantic conventions have a name."""

    name: str
    unit: str
    attributes: Mapping[str, str]


_CONVENTIONS = {
    "host_cpu_ratio": Convention("system.cpu.utilization", "1", {}),
    "host_memory_used_bytes": Convention(
        "system.memory.usage", "By", {"system.memory.state": "used"}
    ),
    "host_memory_limit_bytes": Convention("system.memory.limit", "By", {}),
    "host_swap_used_bytes": Convention(
        "system.paging.usage", "By", {"system.paging.state": "used"}
    ),
    "host_disk_free_bytes": Convention(
        "system.filesystem.usage", "By", {"system.filesystem.state": "free"}
    ),
    "host_network_bytes": Convention("system.network.io", "By", {}),
    "gpu_memory_used_bytes": Convention("hw.gpu.memory.usage", "By", _GPU),
    "gpu_memory_total_bytes": Convention("hw.gpu.memory.limit", "By", _GPU),
    "gpu_utilization_ratio": Convention("hw.gpu.utilization", "1", _GPU),
    "gpu_temperature_celsius": Convention("hw.temperature", "Cel", _GPU),
    "gpu_power_watts": Convention("hw.power", "W", _GPU),
    "gpu_up": Convention("hw.status", "1", {**_GPU, "hw.state": "ok"}),
    "guard_cpu_seconds": Convention("process.cpu.time", "s", {}),
    "guard_memory_bytes": Convention("process.memory.usage", "By", {}),
}

_LABELS = {"gpu": "hw.name", "uuid": "hw.id", "direction": "network.io.direction"}
_VALUES = {("direction", "sent"): "transmit", ("direction", "received"): "receive"}


@dataclass(frozen=True)
class MetricPoint:
    """A single value of a metric."""

    name: str
    unit: str
    description: str
    counter: bool
    """True if the value is a total since the run started."""

    value: float
    attributes: Mapping[str, str]


def points(status: StatusDocument, *, version: str, age_s: float) -> Iterator[MetricPoint]:
    """Every metric on /metrics, under its OpenTelemetry name; unknown values are absent."""
    for family in metrics.families(status, version=version, age_s=age_s):
        if family.type not in ("gauge", "counter"):
            # Version and run are attributes of the resource.
            continue
        name = family.name.removeprefix(metrics.PREFIX)
        convention = _CONVENTIONS.get(name) or _own(name)
        for sample in family.samples:
            attributes = {
                **convention.attributes,
                **{
                    _LABELS.get(key, NAMESPACE + key): _VALUES.get((key, text), text)
                    for key, text in sample.labels.items()
                    if text
                },
            }
            yield MetricPoint(
                convention.name,
                convention.unit,
                family.documentation,
                family.type == "counter",
                sample.value,
                attributes,
            )


def _own(name: str) -> Convention:
    """Name a metric that the conventions don't cover: `step_p50_seconds` becomes
    `miner_guard.step_p50` in seconds, since OpenTelemetry keeps units out of names."""
    stem, _, last = name.rpartition("_")
    unit = _UNITS.get(last)
    return Convention(NAMESPACE + (stem if unit else name), unit or "1", {})


def attributes(record: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an event as attributes, without unknown values (null).

    An incident also gets `error.type`: its label.
    """
    found = {
        NAMESPACE + key: _known(value)
        for key, value in record.items()
        if key not in _HEAD and value is not None
    }
    if record.get("rank") is not None:
        found[f"{NAMESPACE}rank"] = record["rank"]
    if record.get("event") == "incident" and isinstance(record.get("label"), str):
        found["error.type"] = record["label"]
    return found


def _known(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _known(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        # Positions in a list matter, so an unknown value keeps its position.
        return ["" if each is None else _known(each) for each in value]
    return value
