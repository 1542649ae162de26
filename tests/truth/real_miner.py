"""Runs subnet 38's real miner under `--attach sn38`, from a checkout of it.

    python -m tests.truth.real_miner CHECKOUT [--ranks N] [--only WORDS] [--alone] [--keep FOLDER]

CHECKOUT is a clone of dstrbtd/DistributedTraining at the version to run; this project contains no
part of it. The command starts `neurons/miner.py` unmodified, under torchrun, with upstream's
classes, compressor, upload worker and S3 code. `tests/truth/miner/` has the stand-ins for the rest
(chain, Hub, DHT, data set, GPU; a local S3 server for R2; a model of 82,000 parameters). Needs
torch, numpy, pydantic, boto3, moto[server], filelock, tqdm, einops and safetensors.

It answers two questions with one table, and exits with 1 if an answer is no:

1. Is everything the same under `miner-guard run --attach sn38`? Five complete uploads, with and
   without the guard: the bytes in storage, the calls that would have left the machine, in order,
   the miner's log lines by thread, the uploads' return values, weights, error feedback and
   random state after each, and the exit code.
2. Is each reject in the truth table that a miner's own files, keys or bucket can cause
   blocked before the upload, with a sentence that says why? Each is inflicted on the miner (its
   compressor returns other values, its block list is old, …), with good uploads in between.
   `--alone` also shows that, without the guard, the first of each group is uploaded.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.truth.miner import rejects
from tests.truth.miner.plan import Plan, Round
from tests.truth.miner_runs import Miner, Ran

GOOD = "good"


def uploads(calls: Sequence[Sequence[str]]) -> list[Sequence[str]]:
    """The calls that publish something."""
    return [
        call
        for call in calls
        if call[0] in ("upload_folder", "create_tag")
        or (call[0] == "s3" and call[1] in ("PUT", "POST"))
    ]


def by_caller(calls: Sequence[Sequence[str]]) -> dict[str, list[Sequence[str]]]:
    """The calls of each process, in order; the upload worker's are sorted, because its threads run
    in parallel."""
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
    """Question 2: the outcome of each round."""
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
    """The miner's behaviour in these rounds without the guard."""
    done = {line["name"]: line for line in ran.rounds}
    for one in rounds:
        sent = uploads(ran.calls_of(one.name))
        result = done.get(one.name, {}).get("result", "not reached")
        yield Row(one.name, bool(sent), f"{len(sent)} requests, result {result}")


def plan_of(rounds: Sequence[Round]) -> list[Round]:
    """The rounds, each between good ones: the miner must continue after each stop."""
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
        # Only the guard reads keys and buckets; the miner itself behaves the same.
        own = [one for one in firsts if one.gradients or one.config]
        ran = miner.run("unguarded", Plan(1, own), None)
        yield "Uploaded without the guard", list(uploaded_alone(ran, own))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; returns 1 if a row disagrees."""
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
