"""`python -m tests.benchmarks.fleet`: a scrape of 1,024 ranks, a minute of OTLP, and the time from
a cloud's notice to a saved checkpoint on 1, 2 and 8 nodes, which are processes of this machine."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from miner_guard.config import OtelSettings
from miner_guard.record.status_document import StatusDocument
from miner_guard.record.store import RunReader
from miner_guard.show import metrics
from miner_guard.show.otel import Exporter
from miner_guard.system.clock import parse_iso_utc
from tests.faults.guarded import Guarded, until
from tests.faults.test_slurm import TRAIN
from tests.servers.metadata import Metadata
from tests.servers.otlp import Receiver
from tests.support.launcher import free_port
from tests.support.metric_sample import full_status


def main() -> None:
    """Print one line a figure, with the machine's load."""
    scrape()
    with tempfile.TemporaryDirectory() as folder:
        push(Path(folder))
    for nodes in (1, 2, 8):
        with tempfile.TemporaryDirectory() as folder:
            notice(nodes, Path(folder))


def scrape() -> None:
    ranks = {str(rank): {"step_time_s": 15.2, "last_step_age_s": 3.1} for rank in range(1024)}
    document = full_status().to_json()
    document["steps"]["per_rank"] = ranks
    status, took = StatusDocument.from_json(document), list[float]()
    for _ in range(20):
        start = time.perf_counter()
        text, _kind = metrics.exposition(status, version="1")
        took.append(1e3 * (time.perf_counter() - start))
    show("scrape of 1,024 ranks", f"{len(text):,} bytes, {statistics.median(took):.0f} ms")


def push(folder: Path) -> None:
    """The exporter's own processor time for the events of a short run, and a quiet minute."""
    port, guard = free_port(), Guarded(folder)
    multiprocessing.get_context("fork").Process(target=_receive, args=(port,), daemon=True).start()
    script = "for n in $(seq 60); do echo Inner Step: $n; done"
    guard.start(["sh", "-c", script], "--no-restart").wait()
    (started,) = RunReader(guard.state.db).events({"guard_started"})
    exporter = Exporter(
        guard.state,
        started.record()["run_id"],
        OtelSettings(endpoint=f"http://127.0.0.1:{port}"),
        lambda *words: print(*words, file=sys.stderr),
    )
    start = time.process_time()
    exporter.start()
    time.sleep(60)
    show("a minute of OTLP", f"{1e3 * (time.process_time() - start):.0f} ms of one processor")


def _receive(port: int) -> None:
    Receiver(port)
    time.sleep(300)


def notice(count: int, folder: Path) -> None:
    """The last node has the notice; rank 0 is on the first."""

    cloud, preempted = Metadata(), "GET /computeMetadata/v1/instance/preempted"
    (folder / "train.py").write_text(TRAIN)
    where = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=bench"]
    launch = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={count}", *where]
    guards = [Guarded(folder / f"node-{n}") for n in range(count)]
    try:
        for guard in guards:
            guard.output.parent.mkdir()
            env = {
                "OMP_NUM_THREADS": "1",
                "CHECKPOINTS": "checkpoints",
                "FAKE_NVML_STATE": os.devnull,
            }
            if guard is guards[-1]:
                env["GCE_METADATA_HOST"] = f"127.0.0.1:{cloud.server_port}"
            guard.start([*launch, "--nproc-per-node=1", "train.py"], env=env, cwd=folder)
        for guard in guards:
            guard.wait_for("inner_step", 8, seconds=300)
        cloud.answers[preempted] = "TRUE"
        saved = until(lambda: [*(folder / "checkpoints").glob("step-*/.metadata")], 60)
        told = guards[-1].wait_for("host_warning", line="HOST WARNING: this machine")
        seconds = saved[0].stat().st_mtime - parse_iso_utc(told["ts"])
        show(f"notice to saved checkpoint, {count} nodes", f"{seconds:.2f} s")
    finally:
        for guard in guards:
            guard.clean()
        cloud.shutdown()


def show(what: str, measured: str) -> None:
    print(f"{what:44} {measured:>32}   load {os.getloadavg()[0]:.1f}", flush=True)


if __name__ == "__main__":
    main()
