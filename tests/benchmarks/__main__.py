"""`python -m tests.benchmarks [NAME…]`: run the benchmarks in this folder, all or the named ones,
and print tables.

Each `bench_NAME.py` has a TITLE and `run() -> list[Row]`.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from pathlib import Path

from tests.benchmarks.frame import table


def main(requested: list[str]) -> int:
    here = Path(__file__).parent
    names = sorted(p.stem.removeprefix("bench_") for p in here.glob("bench_*.py"))
    if unknown := set(requested) - set(names):
        print(
            f"no benchmark named {', '.join(sorted(unknown))}; there are: {', '.join(names)}",
            file=sys.stderr,
        )
        return 64
    failed = 0
    for name in requested or names:
        try:
            module = importlib.import_module(f"tests.benchmarks.bench_{name}")
            print(table(module.TITLE, module.run()), flush=True)
        except Exception:  # noqa: BLE001 - one benchmark that breaks must not hide the others' figures
            failed += 1
            print(f"### {name}\n\nfailed:\n", traceback.format_exc(), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
