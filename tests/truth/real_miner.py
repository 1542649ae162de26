"""Runs subnet 38's real miner under `--attach sn38`, from a checkout of it.

    python -m tests.truth.real_miner CHECKOUT [--ranks N] [--only WORDS] [--alone] [--keep FOLDER]

CHECKOUT is a clone of dstrbtd/DistributedTraining at the version to be run; nothing of it is part
of this project. `neurons/miner.py` is started as it is, under torchrun: its classes, its
compressor, its upload worker and its S3 code are its own. What stands in for the rest (chain, Hub,
DHT, data set, GPU; a local S3 server in R2's place; a model of 82,000 parameters) is in
`tests/truth/miner/`. Needs torch, numpy, pydantic, boto3, moto[server], filelock, tqdm, einops and
safetensors.

Two questions, one table, exit code 1 if an answer is no:

1. Is everything the same under `miner-guard run --attach sn38`? Five complete uploads, with and
   without the guard: the bytes in storage, the calls that would have left the machine, in order,
   the miner's log lines by thread, the uploads' return values, weights, error feedback and
   random state after each, and the exit code.
2. Does each reject of the truth table that a miner's own files, keys or bucket can bring about
   stop before the upload, with its sentence? Each is done to the miner (its compressor returns
   other values, its block list is old, …), and between them good uploads go out.
   `--alone` also shows that, without the guard, the first of each group is uploaded.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miner_guard import attach
from miner_guard.flight_recorder.reader import BadFlight, FlightReader
from miner_guard.state_dir import StateDir
from tests.truth import states
from tests.truth.miner import rejects
from tests.truth.miner.plan import Plan, Round
from tests.truth.server import Server

HERE = Path(__file__).resolve().parent
GUARD = "import sys; from miner_guard.cli.main import main; sys.exit(main())"
GOOD = "good"
LIMIT_S = 900.0
_END = "Model state upload completed"
"""A future's callback: it runs in the upload thread, or in the training thread if the upload has
ended by then."""


class Storage(Server):
    """R2: the miner's bucket and the global model's; logs what is written."""

    def __init__(self, folder: Path) -> None:
        self._calls = folder / "calls.jsonl"
        self._writing = threading.Lock()
        super().__init__()
        metadata = {"run": 5, "outer_step": 56, "inner_step": 0, "peer_id": "12D3KooWtest"}
        self.set(states.State(objects={"metadata.json": json.dumps(metadata).encode()}))
        from moto.core.models import DEFAULT_ACCOUNT_ID
        from moto.s3.models import s3_backends

        self._backend = s3_backends[DEFAULT_ACCOUNT_ID]["aws"]
        self._backend.create_bucket(states.MODEL, "us-east-1")
        self._backend.put_object(states.MODEL, "metadata.json", json.dumps(metadata).encode())

    def _door(self, environ: Any, start: Any) -> Any:
        by = re.search(r" by/(\w+)", environ.get("HTTP_USER_AGENT", ""))
        who = by[1] if by else "unknown"
        line = json.dumps(["s3", environ["REQUEST_METHOD"], environ["PATH_INFO"], who])
        with self._writing, self._calls.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        return super()._door(environ, start)

    def objects(self) -> dict[str, str]:
        """What the miner's bucket holds: the digest of each object."""
        keys = self._backend.buckets[states.BUCKET].keys
        return {name: hashlib.sha256(keys[name].value).hexdigest() for name in sorted(keys)}


@dataclass(frozen=True)
class Ran:
    """What one run of the miner left behind."""

    code: int
    objects: Mapping[str, str]
    lines: Mapping[str, Sequence[str]]
    """The miner's log lines by rank and thread."""

    calls: Sequence[Sequence[str]]
    rounds: Sequence[Mapping[str, Any]]
    decisions: Sequence[Mapping[str, Any]]
    printed: str

    def calls_of(self, name: str) -> list[Sequence[str]]:
        """The calls of the round of this name."""
        starts = [n for n, call in enumerate(self.calls) if call[:2] == ["round", name]]
        if not starts:
            return []
        end = next(
            (n for n in range(starts[0] + 1, len(self.calls)) if self.calls[n][0] == "round"), None
        )
        return list(self.calls[starts[0] + 1 : end])


def uploads(calls: Sequence[Sequence[str]]) -> list[Sequence[str]]:
    """Of these calls those that publish something."""
    return [
        call
        for call in calls
        if call[0] in ("upload_folder", "create_tag")
        or (call[0] == "s3" and call[1] in ("PUT", "POST"))
    ]


@dataclass(frozen=True)
class Miner:
    """How to start the miner of a checkout."""

    checkout: Path
    ranks: int
    folder: Path

    def run(self, name: str, plan: Plan, guarded: str | None) -> Ran:
        """Run it once. `guarded`: None, `run` (under `miner-guard run`) or `hook` (in a state
        directory of which this process reads the decisions)."""
        folder = self.folder / name
        (folder / "work").mkdir(parents=True)
        (folder / "calls.jsonl").touch()
        storage, state = Storage(folder), StateDir(folder / "state")
        state.root.mkdir()
        plan.write(folder / "plan.json")
        world = {"folder": str(folder), "endpoint": storage.endpoint, "plan": f"{folder}/plan.json"}
        env = self._env(world)
        command = self._command()
        decisions: list[Mapping[str, Any]] = []
        if guarded == "run":
            options = ["--no-preflight", "--no-restart", "--attach", "sn38"]
            guard = [sys.executable, "-c", GUARD, "run", *options, "--state-dir", str(state.root)]
            command = [*guard, "--", *command]
            env |= {"MINER_GUARD_MINER__FINITE": "true", "MINER_GUARD_MINER__PROFILE": "sn38"}
        elif guarded == "hook":
            env = {
                **attach.environment("sn38", env),
                "_MINER_GUARD_STATE_DIR": str(state.root),
                "_MINER_GUARD_RANK_SETTINGS": json.dumps({"gate": {"broadcast_timeout_s": 60.0}}),
            }
        with _supervising(state, decisions) if guarded == "hook" else _nothing():
            done = subprocess.run(
                command,
                cwd=folder / "work",
                env=env,
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
                check=False,
            )
        storage.close()
        printed = done.stdout + done.stderr
        (folder / "printed.txt").write_text(printed, encoding="utf-8")
        hub = {str(p.relative_to(folder)): _digest(p) for p in sorted((folder / "hub").rglob("*"))}
        return Ran(
            done.returncode,
            {**storage.objects(), **hub},
            _by_thread(_read(folder / "lines.jsonl")),
            _read(folder / "calls.jsonl"),
            _read(folder / "rounds.jsonl"),
            decisions,
            printed,
        )

    def _env(self, world: Mapping[str, str]) -> dict[str, str]:
        paths = [str(HERE / "miner" / "site"), str(self.checkout), str(HERE.parents[1])]
        path = os.environ.get("PYTHONPATH", "")
        own = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
        return {
            **os.environ,
            **(own | {"MASTER_PORT": str(_free_port())} if self.ranks == 1 else {}),
            "PYTHONPATH": os.pathsep.join([*paths, *filter(None, [path])]),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "MINER_WORLD": json.dumps(world),
        }

    def _command(self) -> list[str]:
        script = str(self.checkout / "neurons" / "miner.py")
        if self.ranks == 1:
            return [sys.executable, script]
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={self.ranks}"]
        return [sys.executable, *torchrun, script]


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@contextmanager
def _supervising(state: StateDir, decisions: list[Mapping[str, Any]]) -> Iterator[None]:
    """What the hook needs of a supervisor: a socket to notify, and room in the flight record."""
    over = threading.Event()

    def read() -> None:
        seen, reader = 0, None
        while True:
            last = over.wait(0.05)
            try:
                reader = reader or FlightReader(state.flight_of(0), acknowledge=True)
                for number, entry in reader.entries(seen):
                    seen = number + 1
                    if entry["kind"] == "decision":
                        decisions.append(entry)
                reader.acknowledge(seen)
            except (OSError, BadFlight):
                reader = None
            if last:
                return

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified:
        notified.bind(str(state.socket))
        thread = threading.Thread(target=read)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "a folder"


def _read(path: Path) -> list[Any]:
    return states.lines(path) if path.exists() else []


def _by_thread(lines: Sequence[Sequence[str]]) -> dict[str, list[str]]:
    """Lines of the training threads and of the upload threads; how many a thread prints that wakes
    by the clock, the machine decides, as it does which thread reports an upload's end."""
    found: dict[str, list[str]] = {}
    for rank, thread, text in lines:
        if text.startswith(_END):
            found.setdefault(f"rank {rank}, ends", []).append(text)
        elif thread == "MainThread" or thread.startswith("model_upload"):
            found.setdefault(f"rank {rank}, {thread}", []).append(text)
    return found


def by_caller(calls: Sequence[Sequence[str]]) -> dict[str, list[Sequence[str]]]:
    """The calls of each process, in order; the upload worker's, which its threads make at once,
    sorted."""
    found: dict[str, list[Sequence[str]]] = {}
    for call in calls:
        found.setdefault(call[3] if call[0] == "s3" else "other", []).append(call)
    return {who: sorted(made) if who == "worker" else made for who, made in found.items()}


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    name: str
    agrees: bool
    detail: str


def same(alone: Ran, guarded: Ran) -> Iterator[Row]:
    """Question 1."""
    pushed = [line["result"] for line in alone.rounds]
    whole = bool(pushed) and set(pushed) == {"True"} and bool(alone.objects)
    yield Row("complete uploads without the guard", whole, f"{len(pushed)}: {Counter(pushed)}")
    for what, ours, theirs in (
        ("exit code", alone.code, guarded.code),
        ("objects published, byte for byte", alone.objects, guarded.objects),
        ("calls that leave the machine", by_caller(alone.calls), by_caller(guarded.calls)),
        ("results of the uploads", pushed, [line["result"] for line in guarded.rounds]),
        (
            "weights, error feedback, random state",
            [line["state"] for line in alone.rounds],
            [line["state"] for line in guarded.rounds],
        ),
        ("log lines of training and upload threads", alone.lines, guarded.lines),
    ):
        yield Row(what, ours == theirs, _compared(ours, theirs))
    allowed = guarded.printed.count("UPLOAD ALLOWED")
    yield Row("allowed by the gate", allowed > 0, f"{allowed} lines UPLOAD ALLOWED")
    degraded = re.findall(r"GUARD DEGRADED.*", guarded.printed)
    yield Row("hooked completely", not degraded, "; ".join(degraded) or "no GUARD DEGRADED")


def _compared(ours: Any, theirs: Any) -> str:
    if ours == theirs:
        if isinstance(ours, Mapping):
            count = sum(len(v) if isinstance(v, list) else 1 for v in ours.values())
        else:
            count = len(ours) if isinstance(ours, list) else 1
        return f"{count} compared"
    pairs = zip(str(ours), str(theirs), strict=False)
    at = next((n for n, (a, b) in enumerate(pairs) if a != b), 0)
    near = slice(max(at - 40, 0), at + 80)
    return f"alone …{str(ours)[near]}…, guarded …{str(theirs)[near]}…"


def blocked(ran: Ran, rounds: Sequence[Round]) -> Iterator[Row]:
    """Question 2: what became of each round."""
    done = {line["name"]: line for line in ran.rounds}
    for one in rounds:
        if (line := done.get(one.name)) is None:
            yield Row(one.name, False, "the miner did not get there")
            continue
        sent = uploads(ran.calls_of(one.name))
        if one.name.startswith(GOOD):
            yield Row(one.name, bool(sent) and line["result"] == "True", f"{len(sent)} requests")
            continue
        own = [d for d in ran.decisions if line["began"] <= d["decided_at"] <= line["ended"]]
        sentence = next((d["reason"] for d in own if not d["allowed"]), None)
        stopped = not sent and line["result"] in ("not started", "False")
        words = sentence or f"NOT BLOCKED, {len(sent)} requests, result {line['result']}"
        yield Row(one.name, stopped and sentence is not None, words)


def uploaded_alone(ran: Ran, rounds: Sequence[Round]) -> Iterator[Row]:
    """What the miner does with these when no guard is there."""
    done = {line["name"]: line for line in ran.rounds}
    for one in rounds:
        sent = uploads(ran.calls_of(one.name))
        result = done.get(one.name, {}).get("result", "not reached")
        yield Row(one.name, bool(sent), f"{len(sent)} requests, result {result}")


def plan_of(rounds: Sequence[Round]) -> list[Round]:
    """The rounds between good ones: the miner must continue after each stop."""
    middle = len(rounds) // 2
    first, last = rounds[:middle], rounds[middle:]
    goods = [Round(f"{GOOD}: {when}") for when in ("at the start", "halfway", "at the end")]
    return [goods[0], *first, goods[1], *last, goods[2]]


def questions(
    miner: Miner, rounds: Sequence[Round], *, alone: bool
) -> Iterator[tuple[str, list[Row]]]:
    """The table, part by part."""
    five = Plan(5, [Round(f"{GOOD}: upload {n}") for n in range(1, 6)])
    yield (
        "The same with and without the guard",
        list(same(miner.run("alone", five, None), miner.run("guarded", five, "run"))),
    )
    stops = plan_of(rounds)
    inputs = miner.folder / "stops" / "state" / "gate-inputs.json"
    ran = miner.run("stops", Plan(1, stops, str(inputs)), "hook")
    yield "Blocked before the upload", list(blocked(ran, stops))
    if alone:
        firsts = list({one.name.partition(":")[0]: one for one in reversed(rounds)}.values())
        # Keys and buckets are the guard's to read; the miner itself does not differ.
        own = [one for one in firsts if one.gradients or one.config]
        ran = miner.run("unguarded", Plan(1, own), None)
        yield "Uploaded without the guard", list(uploaded_alone(ran, own))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 1 if a row disagrees."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", default="", help="rejects with these words in their name")
    parser.add_argument("--alone", action="store_true", help="also some rejects without the guard")
    parser.add_argument("--keep", type=Path, help="an empty folder for logs and files")
    given = parser.parse_args(arguments)
    rounds, beyond = rejects.rounds_and_beyond()
    rounds = [one for one in rounds if given.only in one.name]
    version = _version(given.checkout)
    with tempfile.TemporaryDirectory() as folder:
        miner = Miner(given.checkout.resolve(), given.ranks, (given.keep or Path(folder)).resolve())
        wrong = 0
        for title, rows in questions(miner, rounds, alone=given.alone):
            print(f"\n{title} (miner {version}, {given.ranks} ranks)")
            for row in rows:
                print(f"  {'yes' if row.agrees else 'NO '}  {row.name}: {row.detail}")
            good = sum(row.agrees for row in rows)
            print(f"  {good} of {len(rows)}", flush=True)
            wrong += len(rows) - good
    if wrong:
        print(
            "\nDid the miner start? --keep FOLDER keeps its logs. Without a package that it needs "
            "it\nends at once: pip install tqdm einops safetensors"
        )
    print("\nRejects that nothing beside the miner can stop before the upload")
    for why, count in Counter(one.why for one in beyond).items():
        print(f"  {count:>3}  {why}")
    return int(wrong > 0)


def _version(checkout: Path) -> str:
    text = (checkout / "distributed_training" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r"""__version__ = ["']([^"']+)""", text)
    return found[1] if found else "of unknown version"


if __name__ == "__main__":
    sys.exit(main())
