"""Checks that the driver and NVML are present, respond, and are compatible with the torch build."""

from __future__ import annotations

from collections.abc import Iterator

from miner_guard.diagnosis.check import Check, Snapshot
from miner_guard.record.words import counted

_REVOKED = (
    "`systemctl daemon-reload` on the host cuts running containers off from their GPUs: restart "
    "the container"
)

_NO_GPUS = ("", "void", "none")
"""Values for which NVIDIA's container runtime adds no GPU (NVIDIA Container Toolkit, "Specialized
configurations with Docker"). A container that got its GPUs through CDI also has `void`, so the
value counts only if NVML found no driver."""

_NO_DRIVER_HERE = (9, 12)

ERRORS = {
    9: (
        "the NVIDIA driver is not loaded",
        "load it (modprobe nvidia) or reboot; in a container, start it with --gpus",
    ),
    12: (
        "libnvidia-ml.so.1 is missing",
        "install the NVIDIA driver; in a container, start it with --gpus all",
    ),
    18: (
        "driver and library versions differ: the driver was updated while loaded",
        "reboot the node, or reload the driver",
    ),
    999: ("NVML reports Unknown Error", f"{_REVOKED}; otherwise check dmesg for NVRM"),
    4: ("no permission to talk to the driver", "check the permissions of /dev/nvidiactl"),
}
"""nvmlReturn_t of a failed initialisation: its meaning and the fix (nvml.h)."""


def checks(s: Snapshot) -> Iterator[Check]:
    """Check NVML's state and the driver's version."""
    if s.nvml is None:
        step = "run miner-guard doctor again"
        yield Check("driver.nvml", "unknown", s.unread.get("nvml", "not read"), None, step)
        return
    yield _nvml(s)
    yield from _versions(s)


def _nvml(s: Snapshot) -> Check:
    assert s.nvml is not None
    state, reason = s.nvml["state"], s.nvml.get("reason")
    if state == "ok":
        gpus = counted(s.nvml["count"], "GPU")
        seen = f"driver {s.nvml['driver']}, CUDA {s.nvml['cuda_driver']}, {gpus}"
        return Check("driver.nvml", "ok", seen)
    if state == "absent" and not s.expectation.expects_gpus:
        return Check("driver.nvml", "ok", "no NVIDIA driver: this is a CPU machine")
    if state == "hangs":
        # A probe without an answer proves nothing about the GPUs; if the miner cannot use them, it
        # reports that itself.
        step = "check dmesg for NVRM and Xid; if nvidia-smi hangs as well, reboot the node"
        limit = "a response within the deadline"
        return Check("driver.nvml", "unknown", f"NVML hangs: {reason}", limit, step)
    words, step = ERRORS.get(
        s.nvml.get("code") or 0, (str(reason), "run nvidia-smi and read its message")
    )
    shown = s.env.get("NVIDIA_VISIBLE_DEVICES")
    if shown in _NO_GPUS and s.nvml.get("code") in _NO_DRIVER_HERE:
        words = f"this container has no GPU: NVIDIA_VISIBLE_DEVICES={shown!r}"
        step = "start it with --gpus all, or with NVIDIA_VISIBLE_DEVICES=all and the nvidia runtime"
    level = "critical" if state != "unreadable" else "unknown"
    return Check(
        "driver.nvml", level, f"{words} (NVML: {reason})", "NVML initialises", step, may_clear=True
    )


def _versions(s: Snapshot) -> Iterator[Check]:
    build = (s.torch or {}).get("cuda_version")
    driver = (s.nvml or {}).get("cuda_driver")
    if not build or not driver:
        return
    # CUDA's minor version compatibility: a driver runs newer minor builds of the same major
    # version.
    older = _major(driver) < _major(build)
    seen = f"torch was built for CUDA {build}; the driver supports CUDA up to {driver}"
    limit = "a driver that supports torch's CUDA major version or a newer one"
    step = "update the driver, or install a torch build for CUDA " + driver if older else None
    yield Check("driver.cuda_version", "critical" if older else "ok", seen, limit, step)


def _major(version: str) -> int:
    return int(version.split(".", 1)[0])
