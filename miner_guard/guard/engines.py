"""What runs the guard and what runs the ranks: pm2 and systemd, to which the guard reports; Slurm,
Kubernetes and SkyPilot, which have other nodes; clouds, which take a machine back; and launchers
such as torchrun, which replace ranks without asking the guard."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shlex
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from miner_guard.guard.environment import under_pm2
from miner_guard.guard.keeper_client import KeeperClient
from miner_guard.rank.layout import Identity
from miner_guard.record.events import Event, event
from miner_guard.record.status_document import StatusDocument
from miner_guard.record.words import counted, or_unknown
from miner_guard.system.clock import parse_iso_utc

_SHOW_EVERY_S = 5.0
_UNIT = re.compile(r"/([^/\n]+\.service)\s*$", re.MULTILINE)
"""The unit's name at the end of a line of /proc/self/cgroup."""


class ServiceManagers:
    """Reports to pm2 and systemd, through the keeper, if they started it."""

    def __init__(self, keeper: KeeperClient) -> None:
        self._keeper = keeper
        self._pm2, self._systemd = keeper.hello.pm2, keeper.hello.systemd
        self._ready = False
        self._shown: dict[str, Any] = {}
        self._shown_at = float("-inf")

    def _tell(self, pm2: Any, systemd: str) -> None:
        if self._pm2 and pm2 is not None:
            self._keeper.tell("pm2", pm2)
        if self._systemd:
            self._keeper.tell("notify", systemd)

    def ready(self) -> None:
        """Report that the miner has started; once is enough."""
        if not self._ready:
            self._ready = True
            self._tell("ready", "READY=1")

    def pulse(self, status: Mapping[str, Any], now: float) -> None:
        """Send what `pm2 monit` and `systemctl status` show, if it has changed."""
        if not (self._pm2 or self._systemd) or now - self._shown_at < _SHOW_EVERY_S:
            return
        shown = monitor_values(status)
        if shown != self._shown:
            self._shown, self._shown_at = shown, now
            values = {name: {"value": value} for name, value in shown.items()}
            line = ", ".join(f"{name} {value}" for name, value in shown.items())
            self._tell({"type": "axm:monitor", "data": values}, f"STATUS={line}")

    def stopping(self) -> None:
        """Report that the guard is shutting down. pm2 has asked for it itself."""
        self._tell(None, "STOPPING=1")


def start_command(env: Mapping[str, str], argv: Sequence[str], cgroup: str, folder: str) -> str:
    """The shell command that starts this guard again.

    `argv` is the guard's command line, `cgroup` the text of /proc/self/cgroup, `folder` the working
    directory.
    """
    if under_pm2(env):
        return f"pm2 restart {shlex.quote(env.get('name') or env['pm_id'])}"
    if "NOTIFY_SOCKET" in env and (unit := _UNIT.search(cgroup)) is not None:
        user = "--user " if "/user@" in cgroup else ""
        return f"systemctl {user}restart {unit[1]}"
    program = Path(argv[0])
    words = ["python", "-m", "miner_guard"] if program.name == "__main__.py" else [program.name]
    return f"cd {shlex.quote(folder)} && {shlex.join([*words, *argv[1:]])}"


def current_start_command(env: Mapping[str, str]) -> str | None:
    """`start_command` of this process; None if its command line or folder cannot be read."""
    with contextlib.suppress(OSError, IndexError):
        cgroup = Path("/proc/self/cgroup").read_text(encoding="utf-8", errors="replace")
        return start_command(env, sys.argv, cgroup, os.getcwd())
    return None


def monitor_values(document: Mapping[str, Any]) -> dict[str, Any]:
    """Values by name, as pm2 shows them; "unknown" for a value that is not known."""
    status = StatusDocument.from_json(document)
    steps = status.steps
    return {
        "State": str(status.state),
        "Outer step": or_unknown(steps.outer_step),
        "Inner step": or_unknown(steps.inner_step),
        "Loss": or_unknown(steps.loss, ".3f"),
        "Step time": or_unknown(steps.step_time_s, ".1f", " s"),
        "Restarts": status.restarts or 0,
        "Hang": status.hang.hang or "none",
    }


_POD = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_ENGINE_S = 10.0
"""How long an engine may take for one request."""


@dataclass(frozen=True)
class Engine:
    """What started the guard, and may start it again on another machine."""

    name: str
    node: str | None = None
    """This machine's name in the engine."""

    job: str | None = None

    @classmethod
    def of(cls, env: Mapping[str, str]) -> Engine:
        """The engine of this process, by the variables that it sets."""
        if "SLURM_JOB_ID" in env:
            return cls("Slurm", env.get("SLURMD_NODENAME"), env["SLURM_JOB_ID"])
        if "SKYPILOT_TASK_ID" in env:
            return cls("SkyPilot", env.get("SKYPILOT_NODE_RANK"), env["SKYPILOT_TASK_ID"])
        if "KUBERNETES_SERVICE_HOST" in env:
            return cls("Kubernetes", env.get("NODE_NAME"), env.get("POD_NAME"))
        if under_pm2(env):
            return cls("pm2", job=env.get("name"))
        return cls("systemd" if "NOTIFY_SOCKET" in env else "none")

    def __str__(self) -> str:
        where = f" on {self.node}" if self.node else ""
        return f"{self.name}{f' job {self.job}' if self.job else ''}{where}"

    def leave_node(self, why: str) -> str | None:
        """Keep the engine from starting this job here again, because the machine has failed.
        Returns what was done; None if the engine has no other machine. Never raises."""
        if self.name == "SkyPilot":
            return "SkyPilot may recover on another machine"  # It does so after any code but 0.
        if self.name not in ("Slurm", "Kubernetes") or self.node is None:
            return None
        reason = f"miner-guard: {' '.join(why.split())}"[:200]
        try:
            return self._drain(reason) if self.name == "Slurm" else self._cordon(reason)
        except (OSError, http.client.HTTPException, subprocess.SubprocessError) as error:
            return f"{self.name} could not exclude {self.node} ({error})"

    def _drain(self, reason: str) -> str:
        """Drain the node, which an operator may, and leave the job a comment, which its owner may:
        ops/slurm/miner.sbatch excludes the node that it names."""

        def update(*words: str) -> bool:
            command = ["scontrol", "update", *words]
            return not subprocess.run(command, capture_output=True, timeout=_ENGINE_S).returncode

        drained = update(f"NodeName={self.node}", "State=DRAIN", f"Reason={reason}")
        noted = update(f"JobId={self.job}", f"Comment=miner-guard exclude {self.node}")
        if not (drained or noted):
            raise OSError("scontrol update is refused")
        return f"Slurm {'drains' if drained else 'is to exclude'} {self.node}"

    def _cordon(self, reason: str) -> str:
        """Cordon the node, and put a condition on this pod, by which the Job's podFailurePolicy
        replaces it whatever the exit code; ops/kubernetes/cordon grants both rights."""
        address = (os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"])
        trust = ssl.create_default_context(cafile=str(_POD / "ca.crt"))
        headers = {
            "Authorization": f"Bearer {(_POD / 'token').read_text()}",
            "Content-Type": "application/strategic-merge-patch+json",
        }
        pod = f"namespaces/{(_POD / 'namespace').read_text()}/pods/{self.job}/status"
        failed = {"type": "miner-guard/NodeFailed", "status": "True", "message": reason}
        patches = {
            f"nodes/{self.node}": {"spec": {"unschedulable": True}},
            pod: {"status": {"conditions": [failed]}},
        }
        for path, patch in patches.items():
            api = http.client.HTTPSConnection(
                address[0], int(address[1]), timeout=_ENGINE_S, context=trust
            )
            with contextlib.closing(api):
                api.request("PATCH", f"/api/v1/{path}", json.dumps(patch), headers)
                answer = api.getresponse()
                if answer.status != 200:
                    raise OSError(f"{path}: {answer.status} {answer.reason}")
        return f"Kubernetes cordons {self.node} and replaces the pod"


Notice = tuple[str, float | None]
"""What the cloud does to this machine, and when (seconds since 1970), if it says so."""


def _metadata(base: str, path: str, method: str = "GET", **headers: str) -> tuple[int, str]:
    """Status and text of the cloud's answer. Raises OSError and HTTPException."""
    host = urlsplit(base if "//" in base else f"http://{base}").netloc
    connection = http.client.HTTPConnection(host, timeout=2.0)
    with contextlib.closing(connection):
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, headers=named)
        answer = connection.getresponse()
        return answer.status, answer.read(1 << 20).decode(errors="replace")


def aws_notice(base: str) -> Notice | None:
    """https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html"""
    lifetime = {"X_aws_ec2_metadata_token_ttl_seconds": "60"}
    _, token = _metadata(base, "/latest/api/token", "PUT", **lifetime)
    path = "/latest/meta-data/spot/instance-action"
    status, text = _metadata(base, path, X_aws_ec2_metadata_token=token)
    if status != 200:
        return None
    action = json.loads(text)
    return f"AWS spot {action['action']}", parse_iso_utc(action["time"])


def google_notice(base: str) -> Notice | None:
    """https://cloud.google.com/compute/docs/instances/create-use-spot#detect-preemption"""
    path = "/computeMetadata/v1/instance/preempted"
    _, text = _metadata(base, path, Metadata_Flavor="Google")
    return ("Google preempts it", time.time() + 30.0) if text.strip() == "TRUE" else None


def azure_notice(base: str) -> Notice | None:
    """https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events"""
    path = "/metadata/scheduledevents?api-version=2020-07-01"
    _, text = _metadata(base, path, Metadata="true")
    for planned in json.loads(text)["Events"]:
        machines = planned.get("Resources") or []
        ours = len(machines) == 1 or socket.gethostname() in machines
        if planned["EventType"] in ("Preempt", "Terminate") and ours:
            at = planned.get("NotBefore")
            when = parsedate_to_datetime(at).timestamp() if at else None
            return f"Azure {planned['EventType'].lower()}", when
    return None


_LOCAL = "169.254.169.254"
_CLOUDS: Sequence[tuple[str, str, str, Callable[[str], Notice | None]]] = (
    ("Amazon EC2", "AWS_EC2_METADATA_SERVICE_ENDPOINT", _LOCAL, aws_notice),
    ("Google", "GCE_METADATA_HOST", "metadata.google.internal", google_notice),
    ("Microsoft Corporation", "", _LOCAL, azure_notice),
)
"""The machine's vendor by its firmware, the variable of the cloud's own SDK that names another
metadata server, the usual one, and how to read a notice from it."""

NOTICE_EVERY_S = 5.0
"""As AWS recommends."""

_UNANSWERED = 3
"""After so many failures and no answer, this machine has no metadata server."""


class PreemptionNotices:
    """Asks the cloud's metadata server whether it takes this machine back, and if so asks the ranks
    for a checkpoint. Inactive where the firmware names no cloud."""

    def __init__(
        self, env: Mapping[str, str], report: Callable[[Event], None], save: Callable[[], None]
    ) -> None:
        self._report, self._save = report, save
        self._told: str | None = None
        self._failures: int | None = 0
        """None once the server has answered."""

        vendor = ""
        with contextlib.suppress(OSError):
            vendor = Path("/sys/class/dmi/id/sys_vendor").read_text().strip()
        readers = (
            (read, env.get(variable, usual))
            for name, variable, usual, read in _CLOUDS
            if variable in env or name == vendor
        )
        self._read: Callable[[str], Notice | None] | None
        self._read, self._base = next(readers, (None, ""))

    @property
    def active(self) -> bool:
        return self._read is not None

    def look(self) -> None:
        """Ask once. Runs in a job thread."""
        if self._read is None:
            return
        try:
            notice, self._failures = self._read(self._base), None
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
            if self._failures is not None:
                self._failures += 1
                self._read = self._read if self._failures < _UNANSWERED else None
            return
        what, at = notice or (None, None)
        if what is not None and what != self._told:
            self._save()
            left_s = None if at is None else round(at - time.time(), 1)
            when = "soon" if left_s is None else f"in {left_s:.0f}s"
            text = f"HOST WARNING: this machine is taken back {when} ({what}); "
            text += "asked the ranks for a checkpoint"
            facts: dict[str, Any] = {"what": what, "deadline_s": left_s}
            self._report(event("host_warning", "warning", text, **facts))
        self._told = what


class RestartsInPlace:
    """Counts how often a launcher, such as torchrun with `--max-restarts`, has replaced its ranks
    in this run, and why: after a failure, or because nodes joined or left."""

    def __init__(self) -> None:
        self.count = 0
        self._now: dict[int, Identity] = {}
        """The ranks since the last restart."""

        self._before: set[tuple[int, int]] = set()

    def launched(self) -> None:
        """Forget the ranks of the last launch."""
        self._now.clear()

    def replaced(self, ranks: Mapping[int, Identity]) -> Iterator[Event]:
        """Yield an event if ranks have new processes since the last call and these are the first of
        a restart: the other ranks follow them."""
        new = [
            rank for rank, each in ranks.items() if _who(self._now.get(rank, each)) != _who(each)
        ]
        if new:
            now, before = ranks[new[0]], self._now[new[0]]
            # torchrun counts failures too; ranks may fail before they reach the guard.
            self.count += max(1, now.generation - before.generation)
            yield self._restarted(new, now, before)
            self._before, self._now = {_who(each) for each in self._now.values()}, {}
        for rank, each in ranks.items():
            if _who(each) not in self._before:
                self._now.setdefault(rank, each)

    def _restarted(self, new: Sequence[int], now: Identity, before: Identity) -> Event:
        # Ranks that lose a peer fail too, so torchrun counts a node that leaves as a failure.
        size, was = now.world_size, before.world_size
        joined = f"; world size {was} -> {size}" if size != was else ""
        ranks, sizes = counted(len(new), "rank"), {"world_size": size, "world_size_before": was}
        text = f"RANKS RESTARTED: the launcher replaced {ranks}, restart {self.count} in place"
        facts: dict[str, Any] = {"ranks": new, "generation": now.generation, **sizes}
        level = "info" if joined else "warning"
        return event("ranks_restarted", level, f"{text}{joined}", count=self.count, **facts)


def _who(rank: Identity) -> tuple[int, int]:
    return rank.pid, rank.process_start
