"""Runs subnet 38's real miner with and without `--attach sn38`, from a checkout of it.

    python -m tests.truth.real_miner CHECKOUT [--ranks N] [--keep FOLDER]

CHECKOUT is a clone of dstrbtd/DistributedTraining at the version to run; this project contains no
part of it. The command starts `neurons/miner.py` unmodified, under torchrun, with upstream's
classes, compressor, upload worker and S3 code. `tests/truth/miner/` has the stand-ins for the rest
(chain, DHT, data set, GPU; a local S3 server for R2; a model of 82,000 parameters). Needs torch,
numpy, pydantic, boto3, moto[server], filelock, tqdm, einops and safetensors.

It compares five complete uploads with and without the guard: the bytes in storage, the calls that
would have left the machine, in order, the miner's log lines by thread, the uploads' return values,
weights, error feedback and random state after each, and the exit code. It exits with 1 if anything
differs.
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

from tests.truth.miner_runs import Miner, Ran

UPLOADS = 5


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
    """Everything that the guard must leave as it is."""
    pushed, theirs = ([line["result"] for line in ran.uploads] for ran in (alone, guarded))
    whole = bool(pushed) and set(pushed) == {"True"} and bool(alone.objects)
    yield Row("complete uploads without the guard", whole, f"{len(pushed)}: {Counter(pushed)}")
    states = [[line["state"] for line in ran.uploads] for ran in (alone, guarded)]
    for what, one, other in (
        ("exit code", alone.code, guarded.code),
        ("objects published, byte for byte", alone.objects, guarded.objects),
        ("calls that leave the machine", by_caller(alone.calls), by_caller(guarded.calls)),
        ("results of the uploads", pushed, theirs),
        ("weights, error feedback, random state", *states),
        ("log lines of training and upload threads", alone.lines, guarded.lines),
    ):
        yield Row(what, one == other, _compared(one, other))
    allowed = guarded.printed.count("UPLOAD ALLOWED")
    yield Row("allowed by the gate", allowed > 0, f"{allowed} lines UPLOAD ALLOWED")
    degraded = re.findall(r"GUARD DEGRADED.*", guarded.printed)
    yield Row("hooked completely", not degraded, "; ".join(degraded) or "no GUARD DEGRADED")


def _compared(one: Any, other: Any) -> str:
    if one == other:
        values = one.values() if isinstance(one, Mapping) else [one]
        return f"{sum(len(v) if isinstance(v, list) else 1 for v in values)} compared"
    pairs = zip(str(one), str(other), strict=False)
    at = next((n for n, (a, b) in enumerate(pairs) if a != b), 0)
    near = slice(max(at - 40, 0), at + 80)
    return f"alone …{str(one)[near]}…, guarded …{str(other)[near]}…"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; returns 1 if a row disagrees."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--keep", type=Path, help="an empty folder for logs and files")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        miner = Miner(given.checkout.resolve(), given.ranks, (given.keep or Path(folder)).resolve())
        runs = (
            miner.run(name, UPLOADS, guarded=name == "guarded") for name in ("alone", "guarded")
        )
        rows = list(same(*runs))
    for row in rows:
        print(f"  {'yes' if row.agrees else 'NO '}  {row.name}: {row.detail}")
    if all(row.agrees for row in rows):
        return 0
    print(
        "\nDid the miner start? --keep FOLDER keeps its logs. Without a package that it needs it\n"
        "ends at once: pip install tqdm einops safetensors"
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
