"""Agreement between ranks in separate processes: how many descriptors the hook holds and how long a
question takes as the number of ranks grows."""

from __future__ import annotations

import statistics
import subprocess
import tempfile
from pathlib import Path

from tests.benchmarks.frame import Row
from tests.support import many_ranks

TITLE = "The ranks' agreement, real processes, 8 a node"

SIZES = ((8, "gloo"), (64, "gloo"), (64, "fake"), (256, "fake"))
"""`fake`: ranks that share only the launcher's store; a gloo mesh of 256 ranks does not fit
here."""

_SECONDS = 500.0


def run() -> list[Row]:
    """Connections and the time per question, for each number of ranks."""
    rows: list[Row] = []
    for ranks, backend in SIZES:
        name = f"{ranks} ranks, {'gloo mesh' if backend == 'gloo' else 'no mesh'}"
        with tempfile.TemporaryDirectory() as folder:
            try:
                answers = many_ranks.run(Path(folder), ranks, 8, backend, _SECONDS)
            except (subprocess.SubprocessError, OSError) as error:
                rows.append(Row(name, None, "", "<= 4", str(error)[:80]))
                continue
        opened = max(answer.descriptors for answer in answers)
        connections = max(answer.connections for answer in answers)
        # The first question waits for all ranks to start.
        asked = [statistics.median(answer.seconds[1:]) for answer in answers]
        note = f"{connections} of them connections"
        rows.append(Row(f"{name}: descriptors of the hook in a rank", opened, "", "<= 4", note))
        rows.append(
            Row(f"{name}: a question, median over ranks", 1e3 * statistics.median(asked), "ms")
        )
    return rows
