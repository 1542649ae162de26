"""Restart policy: growing waits, a budget, and no endless restarts for faults that a restart cannot
fix."""

from __future__ import annotations

import pytest

from miner_guard.config import RestartSettings
from miner_guard.guard.restart import Again, Attribution, Failure, GiveUp, RestartPolicy
from miner_guard.record.events import Event, event
from miner_guard.system.clock import FakeClock
from miner_guard.watch.base import Exit

SETTINGS = RestartSettings(max_restarts=4, backoff_s=50.0)


def policy(chance: float = 0.0) -> RestartPolicy:
    return RestartPolicy(SETTINGS, lambda: chance)


def failure(kind: str = "transient", label: str = "", fix: str = "") -> Failure:
    return Failure("exit code 1", 3.0, kind, label, fix)


def test_waits_double_up_to_the_longest_and_the_budget_ends_it() -> None:
    own = policy()
    waits = [own.failed(failure()) for _ in range(4)]
    assert [w.wait_s for w in waits if isinstance(w, Again)] == [50.0, 100.0, 200.0, 300.0]
    last = own.failed(failure())
    assert isinstance(last, GiveUp)
    assert "4 restarts did not help" in last.why
    assert "3s, 3s" in last.why


def test_a_service_that_is_down_is_given_ten_minutes_to_come_back() -> None:
    own = RestartPolicy(RestartSettings(), lambda: 0.0)
    waits = [own.failed(failure("outage", "hub_or_storage_unavailable")) for _ in range(5)]
    assert [w.wait_s for w in waits if isinstance(w, Again)] == [20.0, 40.0, 80.0, 160.0, 300.0]
    assert isinstance(own.failed(failure("outage", "hub_or_storage_unavailable")), GiveUp)


def test_jitter_only_adds() -> None:
    again = policy(0.999).failed(failure())
    assert isinstance(again, Again)
    assert again.wait_s == pytest.approx(55.0, abs=0.01)


def test_a_healthy_stretch_forgets_what_was_before() -> None:
    own = policy()
    for _ in range(4):
        own.failed(failure())
    own.healthy()
    assert own.failures == 0
    again = own.failed(failure())
    assert isinstance(again, Again)
    assert (again.wait_s, again.attempt) == (50.0, 1)


@pytest.mark.parametrize(
    ("kind", "label", "words"),
    [
        ("once", "cuda_oom", "again after a restart"),
        ("hardware", "gpu_lost", "restart the container"),
        ("config", "not_registered", "again after a restart"),
    ],
)
def test_a_recurring_label_ends_the_restarts_and_a_new_one_does_not(
    kind: str, label: str, words: str
) -> None:
    own = policy()
    assert isinstance(own.failed(failure(kind, label)), Again)
    assert isinstance(own.failed(failure(kind, "loss_nan")), Again)
    again = own.failed(failure(kind, label, "Register the hotkey."))
    assert isinstance(again, GiveUp)
    assert words in again.why
    assert kind != "config" or "Register the hotkey." in again.why


def test_an_unknown_kind_of_failure_counts_as_transient() -> None:
    assert isinstance(policy().failed(failure("never", "sigterm")), Again)


def incident(label: str) -> Event:
    return event(
        "incident",
        "error",
        f"INCIDENT {label}: a cause Fix: a fix",
        label=label,
        cause="a cause",
        fix="a fix",
        excerpt="a line",
        restart="once",
    )


def test_an_exit_is_attributed_to_the_incident_shortly_before_it() -> None:
    clock = FakeClock()
    own = Attribution(clock)
    end = Exit(137, 9, asked=False, finished=False, runtime_s=8.0)
    assert own.failure(end) == Failure("signal SIGKILL", 8.0)
    own.hear(incident("loss_nan"))
    clock.advance(200.0)
    own.hear(incident("cuda_oom"))
    own.hear(
        event(
            "miner_paused", "info", "MINER PAUSED: restarts are off until `miner-guard ctl resume`"
        )
    )
    clock.advance(200.0)
    assert own.failure(end) == Failure("cuda_oom, signal SIGKILL", 8.0, "once", "cuda_oom", "a fix")


def test_an_incident_survived_long_ago_or_in_an_earlier_launch_is_not_the_cause() -> None:
    clock = FakeClock()
    own = Attribution(clock)
    end = Exit(1, None, asked=False, finished=False, runtime_s=900.0)
    own.hear(incident("cuda_oom"))
    clock.advance(301.0)
    assert own.failure(end) == Failure("exit code 1", 900.0)
    own.hear(incident("cuda_oom"))
    own.launched()
    assert own.failure(end) == Failure("exit code 1", 900.0)


def test_a_gpu_that_the_guard_sees_fail_is_the_cause_whatever_the_ranks_say() -> None:
    own, end = Attribution(FakeClock()), Exit(1, None, False, False, 3.0)
    own.hear(event("gpu_fault", "critical", "GPU FAULT: GPU 0 Xid 79: fallen off the bus", gpu=0))
    own.hear(event("incident", "critical", "x", label="nccl_network_error", restart="transient"))
    told = own.failure(end)
    assert (told.kind, told.label) == ("hardware", "gpu_hardware")
    assert "Xid 79" in told.cause
    own.hear(event("gpu_fault", "info", "GPU RECOVERED: GPU 0", gpu=0))
    assert own.failure(end).label == "nccl_network_error"
