"""The gate in a real miner: from the hook's question to the line, the ledger, the status and the
replay."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from miner_guard.record.store import RunReader
from tests.faults.guarded import guarding
from tests.support.present_state import status_of

SCRIPT = Path(__file__).parent / "scripts" / "uploading_miner.py"

pytestmark = pytest.mark.slow


def test_every_upload_is_decided_reported_stored_and_checked(tmp_path: Path) -> None:
    repo = {"repo.kind": "local", "repo.path": tmp_path / "repo", "repo.refresh_every_s": 1}
    with guarding(tmp_path) as guard:
        settings = {**repo, "gate.min_inner_step": 5}
        code = guard.run(sys.executable, SCRIPT, tmp_path / "repo", settings=settings)
    out = guard.output.read_text()
    assert code == 0, out
    # The archive at inner step 0 goes out; the first block is reported, its repetitions are not.
    assert "archive at inner_step 0: exempt from the minimum of 5" in out
    assert (
        out.count("UPLOAD BLOCKED: inner_step (1) < minimum (5). Validators will reject this!") == 1
    )
    assert out.count("UPLOAD BLOCKED") == 1
    assert "UPLOAD VERIFIED: tag 5.3.6" in out
    assert (
        "UPLOAD FAILED: reported as pushed, but metadata.json says inner step 6, not 8 as the "
        "miner reported" in out
    )
    assert "Repo Age: 0s (keep < 1800s)" in out

    state = tmp_path / "state"
    uploads = {row["tag"]: row for row in RunReader(state / "run.db").rows("upload")}
    assert (uploads["5.3.6"]["outcome"], uploads["5.3.8"]["outcome"]) == ("verified", "refuted")
    assert uploads["5.3.6"]["attempts"] == 2
    decisions = RunReader(state / "run.db").rows("decision")
    assert [row["allowed"] for row in decisions] == [1, 0, 0, 0, 0, 1, 1, 1, 1]
    status = status_of(state)["uploads"]
    assert status["upload"]["outcome"] == "refuted"
    assert status["repo"]["inner_step"] == 6
    assert decisions[1]["inner_step"] == 1
