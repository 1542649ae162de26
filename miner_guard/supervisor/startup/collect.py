"""Gathers what the startup checks look at: every question in a child of its own, each with a
deadline."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miner_guard.config import Config, optional_deps
from miner_guard.diagnosis.check import Snapshot
from miner_guard.diagnosis.expectation import Expectation, expected
from miner_guard.diagnosis.gpu_count import ranks_of, visible
from miner_guard.diagnosis.held_memory import HELD_BYTES
from miner_guard.diagnosis.inside import miner_side
from miner_guard.diagnosis.interpreter import of_command
from miner_guard.health.nvml import NvmlSampler
from miner_guard.state_dir import StateDir, read_json
from miner_guard.system import probe
from miner_guard.system.launcher_args import number_of, value_of
from uploads.repos import credentials
from validators.profiles import chosen, load_profile

_READINGS, _BETWEEN_READINGS_S = 3, 3.0
"""Memory held before the launch: three readings three seconds apart, where the first one is
suspicious."""

_DEEP_DEADLINES = 6
"""`--deep` may take this many times the deadline of an ordinary probe."""


@dataclass(frozen=True)
class PreflightRequest:
    """What is asked of this node."""

    config: Config
    state: StateDir
    command: Sequence[str] = ()
    env: Mapping[str, str] = dataclasses.field(default_factory=lambda: dict(os.environ))
    """The environment that the miner gets."""

    deep: bool = False
    torch: bool = True
    """False: ask torch only where there is a driver or a GPU is expected; its import takes
    seconds."""


def profile_of(config: Config) -> Mapping[str, Any]:
    """The profile's minimum compute; empty without a profile."""
    named = chosen(config.miner)
    if named is None:
        return {}
    try:
        return load_profile(named).compute
    except (OSError, ValueError):
        # Settings were loaded with it before; what is wrong with it was said there.
        return {}


def expectation_of(question: PreflightRequest, present: int | None) -> Expectation:
    """Setting, last run's count in host.json, profile, what is there; in that order."""
    setting = question.config.gpu.expect
    memory = read_json(question.state.host_facts)
    last = memory.get("gpu_count") if isinstance(memory, dict) else None
    compute = profile_of(question.config)
    demand = compute.get("min_gpus")
    ranks = ranks_of(question.command)
    if compute.get("gpus_per_rank") and ranks:
        demand = int(compute["gpus_per_rank"]) * ranks
    return expected(
        None if setting == "auto" else int(setting),
        last if isinstance(last, int) else None,
        demand,
        present,
    )


def ports_of(question: PreflightRequest) -> list[dict[str, Any]]:
    """Ports that the miner will listen on, as far as its settings and its command name them."""
    command = question.command
    endpoint = (value_of(command, "--rdzv-endpoint") or "").rpartition(":")[2]
    named = {
        "rendezvous": number_of(command, "--master-port")
        or (int(endpoint) if endpoint.isdigit() else None),
        "axon": number_of(command, "--axon.port"),
        "DHT": number_of(command, "--dht.port"),
    }
    ports = {number: use for use, number in named.items() if number is not None}
    if "rendezvous" not in ports.values() and question.config.miner.master_port:
        ports[question.config.miner.master_port] = "rendezvous"
    # Port 0 is any free one.
    return [{"port": number, "use": use} for number, use in ports.items() if number]


def folders_of(question: PreflightRequest) -> list[str]:
    """Where the miner and the guard write: the state directory, the working directory, checkpoints,
    a local repo."""
    more = [question.config.health.checkpoint_dir, question.config.repo.path]
    return list(dict.fromkeys([str(question.state.root), str(Path.cwd()), *(p for p in more if p)]))


def collect_snapshot(question: PreflightRequest, wait: Callable[[float], bool]) -> Snapshot:
    """Ask everything at once, wait for each answer its deadline at most.

    `wait(seconds)` pauses and answers True where the guard is to stop meanwhile; then what is there
    is enough.
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
        self._python = of_command(question.command, question.env)
        self._unread: dict[str, str] = {}

    def snapshot(self) -> Snapshot:
        asked = {name: self._pool.submit(work) for name, work in self._questions().items()}
        nvml = self._sampler.sample()
        present = sum(1 for row in nvml["gpus"] if row["state"] != "gone")
        # A mask on the GPUs is meant: those behind it are expected by nobody.
        if (shown := visible(self._q.env)) is not None:
            present = min(present, shown)
        expectation = expectation_of(self._q, present)
        torch = None
        if self._q.torch or nvml["state"] != "absent" or expectation.wanted:
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
            lacking={
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
            "host": lambda: probe.ask("miner_guard.diagnosis.host_probe", host, self._deadline),
        }
        document = {"repo": dataclasses.asdict(repo)}
        if repo.kind != "none":
            questions["repo"] = lambda: probe.ask(
                "miner_guard.diagnosis.repo_probe", document, repo.timeout_s, env=dict(q.env)
            )
        if repo.kind in ("s3", "hf"):
            questions["clock"] = lambda: probe.ask(
                "miner_guard.diagnosis.clock_probe", document, repo.timeout_s, env=dict(q.env)
            )
        return questions

    def _inside(self, what: str, more: Mapping[str, Any], deadlines: int = 1) -> probe.Answer:
        """A question to the miner's own interpreter."""
        script = Path(miner_side.__file__)
        request = {"what": what, **more}
        return probe.ask(
            script, request, deadlines * self._deadline, python=self._python, env=dict(self._q.env)
        )

    def _value(self, name: str, future: Future[probe.Answer]) -> Any:
        answer = future.result()
        if answer.reason is not None:
            self._unread[name] = answer.reason
        return answer.value

    def _each(self, devices: Sequence[int], what: str, deadlines: int) -> dict[int, dict[str, Any]]:
        """One child per GPU, at the same time: a GPU that hangs leaves the others their answers."""
        futures = {
            i: self._pool.submit(self._inside, what, {"device": i}, deadlines) for i in devices
        }
        answers = {i: future.result() for i, future in futures.items()}
        return {i: a.value or {"error": a.reason} for i, a in answers.items()}

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
        # One after another would tell more of a single GPU; together is how they train.
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
