"""A private Slurm on this machine: munged, slurmctld and one slurmd per node, all on loopback
ports, sharing nothing with an installed Slurm."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.support import requires
from tests.support.launcher import free_port
from tests.support.waiting import until

_CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,batch_sched_delay=0
ReturnToService=1
KillWait=30
SlurmdTimeout=10
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
StateSaveLocation={folder}/ctld
SlurmdSpoolDir={folder}/spool-%n
"""


class Slurm:
    """The commands of the cluster."""

    def __init__(self, folder: Path, nodes: Sequence[str]) -> None:
        self.folder, self.nodes = folder, nodes
        self.env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start the daemons and wait for idle nodes."""
        for name in ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel"):
            requires.tool(name)
        self._configure()
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        paths = [f"--{what}-file={self.folder}/munged.{what}" for what in ("pid", "log", "seed")]
        munge = [f"--socket={self.folder}/munge.sock", f"--key-file={key}", *paths]
        self._daemon(["munged", "--foreground", "--force", *munge])
        until((self.folder / "munge.sock").exists, 20, "munged")
        self._daemon(["slurmctld", "-D"])
        for node in self.nodes:
            self._daemon(["slurmd", "-D", "-N", node])
        until(
            lambda: self.states().count("idle") == len(self.nodes), 60, lambda: str(self.states())
        )

    def _configure(self) -> None:
        ports = [free_port() for _ in range(1 + len(self.nodes))]
        host = socket.gethostname().partition(".")[0]
        where = f"NodeHostname={host} NodeAddr=127.0.0.1 CPUs=1 RealMemory=1000"
        pairs = zip(self.nodes, ports[1:], strict=True)
        lines = [f"NodeName={node} Port={port} {where}" for node, port in pairs]
        partition = f"PartitionName=all Nodes={','.join(self.nodes)} Default=YES MaxTime=INFINITE"
        text = _CONF.format(host=host, ports=ports, folder=self.folder)
        (self.folder / "slurm.conf").write_text("\n".join([text, *lines, partition, ""]))
        (self.folder / "ctld").mkdir()

    def _daemon(self, command: list[str]) -> None:
        with open(self.folder / "daemons.log", "ab") as log:
            self._daemons.append(
                subprocess.Popen(
                    command, env=self.env, stdout=log, stderr=log, start_new_session=True
                )
            )

    def run(self, *command: str) -> str:
        """The output of a command; raises if the command fails."""
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout.strip()

    def states(self) -> list[str]:
        """Each node's state."""
        shown = subprocess.run(
            ["sinfo", "-N", "-h", "-o", "%t"], env=self.env, capture_output=True, text=True
        )
        return shown.stdout.split()

    def state_of(self, job: str) -> str:
        """`RUNNING`, `PENDING` …; empty once the job has left the queue."""
        return self.run("squeue", "-h", "-o", "%T", "--states=all", "-j", job)

    def nodes_of(self, job: str) -> list[str]:
        """The names of the job's nodes."""
        ranges = self.run("squeue", "-h", "-o", "%N", "-j", job)
        return self.run("scontrol", "show", "hostnames", ranges).split()

    def close(self) -> None:
        """Cancel all jobs and end the daemons."""
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            self.run("scancel", "--user=root")
            until(lambda: not self.run("squeue", "-h"), 45)
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


@contextlib.contextmanager
def cluster(folder: Path, nodes: Sequence[str]) -> Iterator[Slurm]:
    """A cluster that runs within the block."""
    slurm = Slurm(folder, nodes)
    try:
        slurm.start()
        yield slurm
    finally:
        slurm.close()
