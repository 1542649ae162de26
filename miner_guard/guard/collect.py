"""Collects the data for the startup checks. Each query runs in a separate child process with a
deadline."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from miner_guard.checks import miner_side
from miner_guard.checks.check import Snapshot
from miner_guard.checks.environment import interpreter_of
from miner_guard.checks.gpu import HELD_BYTES, visible
from miner_guard.checks.nvml import NvmlSampler
from miner_guard.checks.preflight import (
    PreflightRequest,
    expectation_of,
    folders_of,
    ports_of,
    profile_of,
)
from miner_guard.config import optional_deps
from miner_guard.system import probe
from miner_guard.uploads.repos import credentials

_READINGS, _BETWEEN_READINGS_S = 3, 3.0
"""Take up to three readings of GPU memory, three seconds apart, as long as the latest shows a GPU
whose memory is in use."""

_DEEP_DEADLINES = 6
"""Multiple of an ordinary probe's deadline that `--deep` probes may take."""


def collect_snapshot(question: PreflightRequest, wait: Callable[[float], bool]) -> Snapshot:
    """Run all queries in parallel and wait for each until its deadline.

    `wait(seconds)` pauses and returns True if the guard is stopping, which ends the GPU memory
    readings.
    """
    deadline = question.config.gpu.probe_timeout_s
    sampler = NvmlSampler(deadline, question.env)
    try:
        with ThreadPoolExecutor(max_workers=16, thread_name_prefix="preflight") as pool:
            return SnapshotCollector(question, pool, sampler, wait).snapshot()
    finally:
        sampler.close()


class SnapshotCollector:
    def __init__(
        self,
        question: PreflightRequest,
        pool: ThreadPoolExecutor,
        sampler: NvmlSampler,
        wait: Callable[[float], bool],
    ) -> None:
        self._q, self._pool, self._sampler, self._wait = question, pool, sampler, wait
        self._deadline = question.config.gpu.probe_timeout_s
        self._python = interpreter_of(question.command, question.env)
        self._unread: dict[str, str] = {}
        self._unanswered: set[str] = set()

    def snapshot(self) -> Snapshot:
        asked = {name: self._pool.submit(work) for name, work in self._questions().items()}
        nvml = self._sampler.sample()
        present = sum(1 for row in nvml["gpus"] if row["state"] != "gone")
        # A mask such as CUDA_VISIBLE_DEVICES is deliberate: do not expect the GPUs that it hides.
        if (shown := visible(self._q.env)) is not None:
            present = min(present, shown)
        expectation = expectation_of(self._q, present)
        torch = None
        if self._q.torch or nvml["state"] != "absent" or expectation.expects_gpus:
            torch = self._value("torch", self._pool.submit(self._inside, "torch", {}))
        cuda = self._each(range(torch["gpu_count"]), "use", 1) if torch else {}
        held = self._held(nvml)
        answers = {name: self._value(name, future) for name, future in asked.items()}
        return Snapshot(
            config=self._q.config,
            expectation=expectation,
            command=tuple(self._q.command),
            env=self._q.env,
            compute=profile_of(self._q.config),
            nvml=nvml,
            held=held,
            torch=torch,
            cuda=cuda,
            deep=self._deep(torch) if self._q.deep else None,
            unread=self._unread,
            unanswered=frozenset(self._unanswered),
            missing_extras={
                extra.name: names for extra, names in optional_deps.missing_extras(self._q.config)
            },
            keys_file=credentials.problem(self._q.config.repo),
            **answers,
        )

    def _questions(self) -> dict[str, Callable[[], probe.Answer]]:
        q, repo = self._q, self._q.config.repo
        host = {"paths": folders_of(q), "ports": ports_of(q)}
        questions: dict[str, Callable[[], probe.Answer]] = {
            "packages": lambda: self._inside("packages", {}),
            "host": lambda: probe.ask("miner_guard.checks.host_probe", host, self._deadline),
        }
        settings = dataclasses.asdict(repo)
        if repo.kind != "none":
            questions["repo"] = lambda: probe.ask(
                "miner_guard.checks.storage",
                {"what": "repo", "repo": settings},
                repo.timeout_s,
                env=dict(q.env),
            )
        if repo.kind in ("s3", "hf"):
            questions["clock"] = lambda: probe.ask(
                "miner_guard.checks.storage",
                {"what": "clock", "repo": settings},
                repo.timeout_s,
                env=dict(q.env),
            )
        return questions

    def _inside(self, what: str, more: Mapping[str, Any], deadlines: int = 1) -> probe.Answer:
        """Run a query in the miner's Python interpreter."""
        script = Path(miner_side.__file__)
        return probe.ask(
            script,
            {"what": what, **more},
            deadlines * self._deadline,
            python=self._python,
            env=dict(self._q.env),
            patience_s=self._q.config.gpu.probe_patience_s,
        )

    def _value(self, name: str, future: Future[probe.Answer]) -> Any:
        answer = future.result()
        if answer.reason is not None:
            self._unread[name] = answer.reason
            if not answer.answered:
                self._unanswered.add(name)
        return answer.value

    def _each(self, devices: Sequence[int], what: str, deadlines: int) -> dict[int, dict[str, Any]]:
        """Query each GPU in a separate child process, in parallel, so that a hung GPU does not
        block the others' answers. Returns the answers by device index."""
        futures = {
            i: self._pool.submit(self._inside, what, {"device": i}, deadlines) for i in devices
        }
        answers = {i: future.result() for i, future in futures.items()}
        return {
            i: a.value or {"error": a.reason, "answered": a.answered} for i, a in answers.items()
        }

    def _held(self, nvml: Mapping[str, Any]) -> tuple[dict[str, int], ...]:
        used = "memory_used_bytes"
        first = {
            r["uuid"]: int(r[used])
            for r in nvml["gpus"]
            if r.get("uuid") and r.get(used) is not None
        }
        readings = [first]
        while any(v >= HELD_BYTES for v in readings[-1].values()) and len(readings) < _READINGS:
            if self._wait(_BETWEEN_READINGS_S):
                break
            readings.append(self._sampler.memory_levels() or {})
        return tuple(readings)

    def _deep(self, torch: Mapping[str, Any] | None) -> dict[str, Any] | None:
        if torch is None:
            self._unread["deep"] = "--deep needs torch in the miner's interpreter"
            return None
        gpus = int(torch["gpu_count"])
        # Measuring one GPU at a time would be more precise, but training loads all of them at the
        # same time.
        matmul = self._each(range(gpus), "matmul", _DEEP_DEADLINES)
        request = {
            "ranks": max(gpus, 2),
            "cuda": gpus > 1,
            "timeout_s": _DEEP_DEADLINES * self._deadline / 2,
        }
        if gpus == 1:
            return {"matmul": matmul, "all_reduce": None}
        answer = self._inside("all_reduce", request, _DEEP_DEADLINES)
        return {
            "matmul": matmul,
            "all_reduce": answer.value if answer.reason is None else {"error": answer.reason},
        }
