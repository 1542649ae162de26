"""The checks before a start: machine, GPUs, environment, storage."""

from __future__ import annotations

import http.server
import sys
import threading
from dataclasses import replace
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest

from miner_guard.checks import environment, host
from miner_guard.checks.check import Expectation, Snapshot
from miner_guard.checks.gpu import sliced
from miner_guard.config import (
    AlertSettings,
    ChainSettings,
    Config,
    HealthSettings,
    HttpSettings,
    RepoSettings,
    optional_deps,
    read_toml,
)
from miner_guard.guard.preflight import judge
from miner_guard.system import probe
from miner_guard.uploads.repos import credentials
from tests.support import requires
from tests.support.snapshots import FOUR, GIB, HEALTHY_HOST, PACKAGES, by_name, healthy, snapshot


@pytest.mark.parametrize(
    ("change", "check", "level"),
    [
        ({"shm_bytes": 64 * 1024**2}, "host.shm", "warn"),
        ({"shm_bytes": None}, "host.shm", "unknown"),
        ({"limits": {"nofile": 1024, "memlock": -1}}, "host.nofile", "warn"),
        ({"limits": {"nofile": -1, "memlock": 65536}}, "host.memlock", "warn"),
        ({"disks": {"/": GIB}}, "host.disk", "warn"),
        ({"disks": {"/": None}}, "host.disk", "unknown"),
    ],
)
def test_each_shortage_of_the_host_is_found(change: dict[str, Any], check: str, level: str) -> None:
    found = by_name(host.host_checks(snapshot(host={**HEALTHY_HOST, **change})))[check]
    assert found.level == level
    assert found.next_step
    assert {c.level for c in host.host_checks(snapshot())} == {"ok"}


def test_a_host_that_could_not_be_read_is_unknown_and_not_healthy() -> None:
    (check,) = host.host_checks(snapshot(host=None, unread={"host": "no answer within 20 s"}))
    assert check.level == "unknown"
    assert "no answer" in check.seen


@pytest.mark.parametrize(
    ("command", "exposed"),
    [
        (["m.py", "--r2.secret=abcdefgh12345"], True),
        (["m.py", "--r2_secret_key", "abcdefgh12345", "--steps", "5"], True),
        (["m.py", "hf_" + "a" * 34], True),
        (["m.py", "--neuron.local_batch_size_train=2", "--steps", "5"], False),
    ],
)
def test_a_secret_on_the_command_line_is_named_and_not_shown(
    command: list[str], exposed: bool
) -> None:
    checks = by_name(environment.environment_checks(snapshot(command=tuple(command))))
    assert ("env.secret_on_command_line" in checks) == exposed
    if exposed:
        value_shown = checks["env.secret_on_command_line"].seen
        assert "abcdefgh12345" not in value_shown
        assert "aaaa" not in value_shown


def test_an_interpreter_without_the_guard_is_unknown() -> None:
    for found, level in ((True, None), (False, "unknown")):
        packages = {**PACKAGES, "miner_guard": found}
        checks = by_name(environment.environment_checks(snapshot(packages=packages)))
        assert getattr(checks.get("env.miner_guard"), "level", None) == level
        assert checks["env.python"].level == "ok"


def test_an_extra_that_the_settings_need_is_named_with_its_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With addresses set but Apprise not installed, all seemed well until the first alert."""
    for name in ("apprise", "starlette", "boto3", "bittensor"):
        monkeypatch.setitem(sys.modules, name, None)
    asks = Config(
        alerts=AlertSettings(urls=("json://x",)),
        http=HttpSettings(port=0),
        repo=RepoSettings(kind="s3"),
        chain=ChainSettings(network="finney"),
    )
    assert [extra.name for extra, _ in optional_deps.missing_extras(asks)] == [
        "s3",
        "chain",
        "alerts",
        "http",
    ]
    assert not list(optional_deps.missing_extras(Config()))
    missing_extras = {extra.name: names for extra, names in optional_deps.missing_extras(asks)}
    found = by_name(
        environment.environment_checks(snapshot(config=asks, missing_extras=missing_extras))
    )
    assert {name for name in found if name.startswith("env.extra")} == {
        f"env.extra.{name}" for name in missing_extras
    }
    alerts = found["env.extra.alerts"]
    assert alerts.level == "warn"
    assert (
        alerts.seen == "[alerts] urls is set and apprise is not installed: no alerts are delivered"
    )
    assert alerts.next_step is not None
    assert "pip install 'apprise>=1.7'" in alerts.next_step


def test_every_extra_named_is_one_of_the_distributions() -> None:
    project = read_toml(Path(__file__).parents[2] / "pyproject.toml")["project"]
    assert {extra.name for extra in optional_deps.EXTRAS} <= project["optional-dependencies"].keys()


def test_the_subnets_minimum_compute() -> None:
    compute = {
        "min_gpus": 4,
        "min_gpu_memory_gb": 48,
        "min_vcpus": 48,
        "min_memory_gb": 300,
        "min_disk_gb": 1000,
    }
    rows = [{"memory_total_bytes": 79.6 * GIB}] * 4
    good = snapshot(compute=compute, nvml={"state": "ok", "gpus": rows})
    assert {c.level for c in host.minimum_checks(good)} == {"ok"}
    small = snapshot(
        compute=compute, nvml={"state": "ok", "gpus": rows[:2]}, host={**HEALTHY_HOST, "cpus": 8}
    )
    assert {n for n, c in by_name(host.minimum_checks(small)).items() if c.level == "warn"} == {
        "minimum.gpus",
        "minimum.vcpus",
    }
    unread = by_name(host.minimum_checks(snapshot(compute=compute, nvml=None, host=None)))
    assert {c.level for c in unread.values()} == {"unknown"}


@pytest.mark.parametrize(
    ("ranks", "level"),
    [
        ("--nproc_per_node=4", "ok"),
        ("--nproc-per-node 8", "critical"),
        ("--nproc_per_node=2", "warn"),
        ("--nproc_per_node=gpu", None),
    ],
)
def test_ranks_are_counted_against_gpus_before_the_start(ranks: str, level: str | None) -> None:
    command = ("torchrun", *ranks.split(), "m.py")
    levels = {c.check: c.level for c in judge(healthy(4, command=command))}
    assert levels.get("gpu.ranks") == level
    on_cpu = healthy(4, command=command, expectation=Expectation(0, "[gpu] expect"))
    assert "gpu.ranks" not in {c.check for c in judge(on_cpu)}


def test_an_unreadable_snapshot_is_judged_without_a_crash() -> None:
    empty = Snapshot(
        config=Config(health=HealthSettings()),
        expectation=FOUR,
        unread={"torch": "ModuleNotFoundError: No module named 'torch'"},
    )
    levels = {c.check: c.level for c in judge(empty)}
    assert levels["driver.nvml"] == "unknown"
    assert levels["cuda.torch"] == "critical"
    assert "ok" not in levels.values()


@pytest.mark.parametrize(
    ("late", "unknown"),
    [
        (
            {
                "torch": None,
                "cuda": {},
                "unread": {"torch": "no answer within 180 s"},
                "unanswered": frozenset({"torch"}),
            },
            {"cuda.torch"},
        ),
        (
            {
                "cuda": {
                    0: {"seconds": 0.2},
                    1: {"error": "no answer within 20 s", "answered": False},
                }
            },
            {"cuda.use"},
        ),
        (
            {"nvml": {"state": "hangs", "reason": "no answer within 20 s", "gpus": []}},
            {"driver.nvml", "gpu.count"},
        ),
    ],
    ids=["torch", "one GPU", "the driver"],
)
def test_a_probe_that_did_not_answer_is_unknown_and_refuses_no_start(
    late: dict[str, Any], unknown: set[str]
) -> None:
    """`import torch` takes a minute from a cold disk; a start was refused after 20 s."""
    checks = judge(replace(healthy(4), **late))
    assert {c.check for c in checks if c.level == "unknown"} >= unknown
    assert not [c for c in checks if c.level == "critical"]


@pytest.mark.parametrize(("ranks", "level"), [(1, "ok"), (2, "warn")])
def test_a_process_sees_one_mig_slice_however_many_are_named(ranks: int, level: str) -> None:
    """NVIDIA's MIG User Guide, "CUDA Device Enumeration"; ranks that choose their own slice may
    start."""
    command = ("torchrun", f"--nproc_per_node={ranks}", "m.py")
    slices = healthy(4, command=command, env={"CUDA_VISIBLE_DEVICES": "MIG-6e1c,MIG-7f2d"})
    slices = replace(slices, torch={**(slices.torch or {}), "gpu_count": 1})
    levels = {c.check: c.level for c in judge(slices)}
    assert levels["gpu.ranks"] == level
    assert levels["cuda.count"] == "warn"
    assert "critical" not in levels.values()


@pytest.mark.parametrize(
    ("code", "devices", "words", "step"),
    [
        (9, None, "is not loaded", "modprobe"),
        (12, None, "libnvidia-ml.so.1 is missing", "--gpus all"),
        (18, None, "versions differ", "reboot"),
        (999, None, "Unknown Error", "daemon-reload"),
        *((12, shown, "NVIDIA_VISIBLE_DEVICES", "--gpus all") for shown in ("", "void", "none")),
        # With CDI the variable is `void`, and the container has GPUs, which were revoked.
        (999, "void", "Unknown Error", "daemon-reload"),
    ],
)
def test_each_failure_of_the_driver_has_its_step(
    code: int, devices: str | None, words: str, step: str
) -> None:
    failed = {"state": "failed", "code": code, "reason": "as NVML says it", "gpus": []}
    env = {} if devices is None else {"NVIDIA_VISIBLE_DEVICES": devices}
    checks = judge(replace(healthy(4), nvml=failed, env=env))
    (check,) = (c for c in checks if c.check == "driver.nvml")
    assert (check.level, check.may_clear) == ("critical", True)
    assert words in check.seen
    assert step in str(check.next_step)
    assert code == 12 or "NVIDIA_VISIBLE_DEVICES" not in check.seen


def test_a_driver_older_than_torchs_cuda_is_critical_and_a_newer_minor_build_is_not() -> None:
    for driver, level in (("11.8", "critical"), ("12.1", "ok"), ("13.0", "ok")):
        nvml = {**(healthy(4).nvml or {}), "cuda_driver": driver}
        checks = {c.check: c for c in judge(replace(healthy(4), nvml=nvml))}
        assert checks["driver.cuda_version"].level == level


@pytest.mark.parametrize(
    ("mask", "level", "held"),
    [
        *((None, "critical", True), ("0,1", "warn", False), ("GPU-0", "warn", False)),
        *(("2,3", "critical", True), ("GPU-3", "critical", True), ("", "critical", True)),
    ],
)
def test_a_gpu_that_the_mask_hides_stops_no_start(mask: str | None, level: str, held: bool) -> None:
    """On a shared machine the other GPUs are somebody else's."""
    rows = [{**row, "uuid": f"GPU-{row['index']}"} for row in healthy(4).gpu_rows]
    rows[3] |= {"state": "lost", "error": "it is lost", "memory_total_bytes": 80 * GIB}
    shared = replace(
        healthy(4),
        nvml={**(healthy(4).nvml or {}), "gpus": rows},
        held=({"GPU-3": 60 * GIB},),
        env={} if mask is None else {"CUDA_VISIBLE_DEVICES": mask},
        expectation=Expectation(None, "no source"),
    )
    checks = {c.check: c.level for c in judge(shared) if c.gpu == 3}
    assert checks == {"gpu.state": level, **({"gpu.held_memory": "critical"} if held else {})}


@pytest.mark.parametrize(
    ("held_gb", "total_gb", "level"),
    [(0.5, 80, "ok"), (1, 80, "warn"), (41, 80, "critical"), (0.8, 1, "critical")],
)
def test_memory_that_others_hold_is_judged_by_its_share(
    held_gb: float, total_gb: int, level: str
) -> None:
    row = {**healthy(1).gpu_rows[0], "uuid": "GPU-0", "memory_total_bytes": total_gb * GIB}
    nvml = {**(healthy(1).nvml or {}), "gpus": [row]}
    checks = judge(replace(healthy(1), nvml=nvml, held=({"GPU-0": int(held_gb * GIB)},)))
    assert [c.level for c in checks if c.check == "gpu.held_memory"] == [level]


def test_a_missing_fabric_manager_is_named_where_cuda_fails() -> None:
    torch = {
        **(healthy(8).torch or {}),
        "cuda_available": False,
        "reason": "Error 802: system not yet initialized",
    }
    checks = {c.check: c for c in judge(replace(healthy(8), torch=torch))}
    assert "nvidia-fabricmanager" in str(checks["cuda.available"].next_step)


@pytest.mark.parametrize(
    ("count", "levels"), [(4, {"ok", "unknown"}), (2, {"ok", "unknown", "critical"})]
)
def test_amds_gpus_are_judged_by_torch_alone(count: int, levels: set[str]) -> None:
    """NVML, which is missing there, is no reason to refuse a start."""
    torch = {"torch_version": "2.9", "cuda_version": None, "hip_version": "6.4", "gpu_count": count}
    failed = {"state": "failed", "code": 12, "reason": "not found", "gpus": []}
    amd = replace(healthy(4), torch={**torch, "cuda_available": True}, nvml=failed)
    checks = [c for c in judge(amd) if c.check.startswith(("driver.", "cuda.", "gpu."))]
    assert {c.level for c in checks} == levels
    assert not any("NVIDIA" in f"{c.seen} {c.next_step}" for c in checks)


def test_slices_that_the_container_runtime_gave_are_slices() -> None:
    s = healthy(1, env={"NVIDIA_VISIBLE_DEVICES": "0:0,0:1"})
    assert sliced(s)


@pytest.mark.parametrize(
    ("skew", "level"),
    [(0.4, "ok"), (-61.0, "warn"), (600.0, "warn"), (1000.0, "critical"), (-5000.0, "critical")],
)
def test_clock_skew_against_the_storage(skew: float, level: str) -> None:
    config = Config(repo=RepoSettings(kind="s3"))
    repo = {"label": "b", "skew_s": skew, "server": "s3.example"}
    checks = by_name(environment.storage_checks(snapshot(config=config, repo=repo)))
    assert checks["host.clock"].level == level


@pytest.mark.parametrize(("kind", "variable"), [("hf", "HF_ENDPOINT"), ("s3", "AWS_ENDPOINT_URL")])
def test_the_date_header_of_a_refusal_counts_from_where_the_keys_point(
    kind: Any, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock was once compared with the public service, which the miner of a mirror may not even
    reach."""

    class Refusing(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response_only(403)
            self.send_header("Date", formatdate(4_000_000_000, usegmt=True))
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    monkeypatch.delenv("R2_ACCOUNT_ID", raising=False)
    with http.server.HTTPServer(("127.0.0.1", 0), Refusing) as server:
        monkeypatch.setenv(variable, f"http://127.0.0.1:{server.server_port}")
        threading.Thread(target=server.handle_request, daemon=True).start()
        answer = environment.clock_skew(RepoSettings(kind=kind))
    assert answer["server"] == "127.0.0.1"
    assert answer["skew_s"] > 1e9


def test_a_local_repo_is_read_and_left_as_it_was(tmp_path: Path) -> None:
    document = {"repo": {"kind": "local", "path": str(tmp_path / "repo")}}
    (tmp_path / "repo").mkdir()
    answer = probe.ask("miner_guard.checks.environment", document, 30)
    assert answer.value == {"label": f"folder:{tmp_path / 'repo'}", "credentials": None}
    assert list((tmp_path / "repo").iterdir()) == []
    config = Config(repo=RepoSettings(kind="local", path=str(tmp_path / "repo")))
    assert {
        c.level for c in environment.storage_checks(snapshot(config=config, repo=answer.value))
    } == {"ok"}


def test_an_alert_target_that_apprise_does_not_know_is_named_without_its_address() -> None:
    """Such an address passed `doctor` and the start, and nobody was told of the first crash."""
    requires.module("apprise")
    urls = {"alerts": ["json://localhost", "dis.cord://secret", "nonsense"]}
    answer = probe.ask("miner_guard.checks.environment", urls, 60)
    assert answer.value == {"unusable": [2, 3]}
    checks = environment.environment_checks(snapshot(unusable_alerts=answer.value["unusable"]))
    found = [c.seen for c in checks if c.check == "alerts.target"]
    assert [words.split()[1] for words in found] == ["2", "3"]
    assert "secret" not in " ".join(found)


@pytest.mark.parametrize("kind", ["none", "local"])
def test_a_keys_file_that_no_repo_needs_is_missed_too(tmp_path: Path, kind: Any) -> None:
    """Otherwise alerts would be silently dead: their addresses are in a .env that can't be used."""
    file = tmp_path / ".env"
    asks = Config(
        repo=RepoSettings(kind=kind, path="x", credentials="dotenv", credentials_file=str(file))
    )
    file.write_text("MINER_GUARD_ALERTS__URLS=json://127.0.0.1:9/")
    file.chmod(0o600)
    assert credentials.problem(asks.repo) is None
    file.chmod(0o666)
    problem = credentials.problem(asks.repo)
    check = by_name(
        environment.storage_checks(snapshot(config=asks, repo={"label": "x"}, keys_file=problem))
    )["repo.keys_file"]
    assert (check.level, "chmod 600" in check.seen) == ("warn", True)
    assert "alerts" in str(check.next_step)


@pytest.mark.parametrize(
    ("env", "missing"),
    [
        ({"R2_WRITE_ACCESS_KEY_ID": "a", "R2_WRITE_SECRET_ACCESS_KEY": "b"}, []),
        ({"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}, []),
        ({"R2_READ_ACCESS_KEY_ID": "a", "R2_READ_SECRET_ACCESS_KEY": "b"}, 2),
        ({"R2_WRITE_ACCESS_KEY_ID": "a"}, 1),
    ],
)
def test_credentials_are_named_and_never_shown(env: dict[str, str], missing: Any) -> None:
    settings = RepoSettings(kind="s3", bucket="b")
    answer = environment.missing_credentials(settings, env)
    assert answer is not None
    assert len(answer) == (missing or 0)
    checks = by_name(
        environment.storage_checks(
            snapshot(config=Config(repo=settings), repo={"label": "b", "credentials": answer})
        )
    )
    assert checks["repo.credentials"].level == ("critical" if missing else "ok")
    assert environment.missing_credentials(RepoSettings(kind="local", path="x"), {}) is None


def test_a_repo_that_cannot_be_read_is_critical(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed:
        label = "bucket:b"

        def state(self) -> None:
            raise environment.RepoError("AccessDenied")

    monkeypatch.setattr(environment, "open_repo", lambda _settings: Closed())
    answer = environment.examine(RepoSettings(kind="local"))
    config = Config(repo=RepoSettings(kind="s3"))
    checks = by_name(environment.storage_checks(snapshot(config=config, repo=answer)))
    assert checks["repo.read"].level == "critical"
    assert "AccessDenied" in checks["repo.read"].seen
