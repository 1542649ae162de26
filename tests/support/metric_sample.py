"""A status in which every value is known, for the metrics tests and for the site's page on
metrics."""

from __future__ import annotations

from miner_guard.record.status_document import StatusDocument
from miner_guard.show import metrics


def full_status() -> StatusDocument:
    """A status in which every value is known, so that every metric appears."""
    gpu = {"index": 0, "state": "ok", **dict.fromkeys(metrics._GPU, 1.0)}
    steps = {
        **dict.fromkeys(metrics._STEPS, 1.0),
        "steps": 1,
        "goodput": {"training": 1.0},
        "per_rank": {"0": {"step_time_s": 1.0, "last_step_age_s": 1.0}},
    }
    host = {**dict.fromkeys(metrics._HOST, 1.0), "oom_kills": 0, "network_sent_bytes": 1}
    status = {
        "state": "running",
        "restarts": 0,
        "steps": steps,
        "verdict": {
            "life": "training",
            "earning": "yes",
            "colour": "green",
            "since": "2026-01-02T03:04:05.000000Z",
            "key": "well",
        },
        "updated": "2026-01-02T03:04:05.000000Z",
        "metrics": {
            "events": {"slow_step": 1},
            "histograms": {name: {"buckets": {"1": 1, "+Inf": 2}} for name in metrics.HISTOGRAMS},
            "since": "2026-01-02T03:04:05.000000Z",
        },
        "chain": {"block": 1, "uid": 5, "registered": True, "incentive": 0.1},
        "uploads": {
            "repo": {"age_s": 1, "limit_s": 2000, "stale": False},
            "audit": {"outcome": "accepted"},
        },
        "health": {
            "gpus": {"gpus": [gpu]},
            "host": host,
            "guard": {"cpu_s": 1.0, "memory_bytes": 1},
            "unknown": {"disk": "does not answer"},
        },
        "costs": {
            "share_pct": 0.1,
            "budget_pct": 5,
            "operations": {"validation": {"total_time": 1, "background_time": 1}},
        },
    }
    return StatusDocument.from_json(status)
