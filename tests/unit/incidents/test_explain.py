"""`miner-guard explain`: its exact JSON, its exit codes, and an answer to any input."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from miner_guard.cli import main
from miner_guard.record.store import RunStore, event_row
from tests.unit.incidents.test_scanner import CASCADE


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINER_GUARD_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)


def write(tmp_path: Path, content: bytes) -> str:
    path = tmp_path / "miner.log"
    path.write_bytes(content)
    return str(path)


def test_a_few_kilobytes_of_gzip_that_unpack_to_gigabytes_are_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An attachment of 300 KB must not keep a helper's machine busy for minutes."""
    zeros = gzip.compress(bytes(1 << 20), 9)
    assert len(gzip.decompress(zeros * 20)) == 20 << 20 > 900 * len(zeros * 20), "the attack works"
    assert main.run(["explain", write(tmp_path, zeros * 2000)]) == 64
    assert "unpacks to more than 200 times its size" in capsys.readouterr().err


def test_a_repetitive_log_is_unpacked_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = b"".join(
        b"12:%02d:%02d Inner Step: %d | Loss: 3.40\n" % (n // 60 % 60, n % 60, n)
        for n in range(200_000)
    )
    assert main.run(["explain", write(tmp_path, gzip.compress(lines + CASCADE))]) == 0
    assert "ROOT CAUSE cuda_oom" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_no_character_of_a_log_reorders_what_its_reader_sees(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
) -> None:
    """A log line must not display as different text (Trojan Source) or clear the screen."""
    log = write(
        tmp_path,
        "RuntimeError: CUDA out of memory \u202eegarots eht dna\x9b2J\u2066\u2028".encode(),
    )
    assert main.run(["explain", log, *arguments]) == 0
    printed = capsys.readouterr().out
    assert "\\u202eegarots" in printed
    assert not set(printed) & set("\u202e\u2066\u2028\x9b")
    if arguments:
        assert "\u202eegarots" in json.loads(printed)["findings"][0]["excerpt"]
    monkeypatch.setattr("miner_guard.cli.output.visible", str)
    assert main.run(["explain", log, *arguments]) == 0
    assert "\u202eegarots" in capsys.readouterr().out, "the attack works"


def explained(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main.run(["explain", "--json", *arguments])
    return code, json.loads(capsys.readouterr().out)


def test_the_json_is_the_contracts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, document = explained(capsys, write(tmp_path, CASCADE))
    assert code == 0
    assert document["root_cause"] == "cuda_oom"
    assert set(document) == {"root_cause", "findings"}
    for finding in document["findings"]:
        keys = {"label", "severity", "line", "excerpt", "cause", "fixes", "sources", "root"}
        assert set(finding) == keys
    assert [f["label"] for f in document["findings"] if f["root"]] == ["cuda_oom"]
    assert next(f["line"] for f in document["findings"] if f["root"]) == 5


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe\x00\x80 invalid \xc3\x28 utf-8 \xf0\x9f\n",
        random.Random(1).randbytes(1 << 20),
        b"x" * (3 << 20),
        b"\n" * 100_000,
        b"\x1b[31m" * 10_000,
    ],
    ids=["empty", "invalid utf-8", "random", "one line", "blank lines", "colour codes"],
)
def test_any_content_gets_an_answer(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, document = explained(capsys, write(tmp_path, content))
    assert code == (1 if document["root_cause"] is None else 0)


def test_a_torn_archive_is_refused_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["explain", write(tmp_path, gzip.compress(CASCADE)[:60])]) == 64
    assert "can't be read" in capsys.readouterr().err


Row = tuple[str, str, str, dict[str, Any]]
HANG: Row = (
    "hang_detected",
    "critical",
    "HANG DETECTED: rank 1 in data for 912s, ranks 0,2,3 waiting in allreduce",
    {"rank": 1},
)
ENDED: Row = (*HANG[:2], "HANG DETECTED: rank 0 in shutdown for 4s, rank 1 waiting in forward", {})
GONE: Row = (*HANG[:2], "HANG DETECTED: rank 0 is gone, rank 1 waiting in forward", {})
STARTED: Row = ("miner_started", "info", "MINER STARTED: pid 7", {})
KILLED: Row = ("orphan_killed", "warning", "ORPHAN KILLED: p2pd, hivemind.dht failed", {})
EXITED: Row = ("miner_exited", "error", "MINER EXITED: signal SIGTERM", {})
CURVES = {"cause": "it learns the examples", "fixes": ["stop earlier"], "rank": 0}
PLATEAU: Row = ("loss_plateau", "warning", "LOSS PLATEAU: loss 9.1", CURVES)
SLOW: Row = ("straggler", "error", "STRAGGLER: rank 1 is busy longer than the others", {"rank": 1})
SLOW_NO_MORE: Row = ("straggler", "info", "STRAGGLER CLEARED: rank 1 after 100 steps", {"rank": 1})
OVERFIT: Row = ("overfit", "warning", "OVERFITTING: evaluation loss 2.4", CURVES)


def incident(label: str, level: str = "error") -> Row:
    told = {"label": label, "cause": f"{label} here", "fixes": ["a", "b"], "excerpt": "E: x"}
    return ("incident", level, f"INCIDENT {label}: …", told)


def overcome(label: str) -> Row:
    return ("incident", "info", f"OVERCOME {label}", {"label": label})


def guards_log(folder: Path, *rows: Row) -> None:
    """The events of a guard."""
    store, ts = RunStore(folder / "run.db"), "2026-01-02T03:04:05.000000Z"
    for name, level, text, more in rows or (HANG, EXITED):
        row = {"ts": ts, "level": level, "event": name, "run_id": "r", "msg": text, **more}
        store.write(event_row(row))
    store.close()


def test_where_nothing_failed_the_guards_warnings_are_quoted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`Nothing wrong found` once stood beside a critical MONITORING OVER BUDGET."""
    over = ("monitoring_over_budget", "critical", "MONITORING OVER BUDGET: 11.2% (limit 5%)", {})
    guards_log(tmp_path, over)
    assert main.run(["explain", "--state-dir", str(tmp_path)]) == 1
    told = capsys.readouterr().out
    assert "No failure found" in told
    assert f"2026-01-02T03:04:05Z {over[2]}" in told


@pytest.mark.parametrize(
    ("rows", "root", "others"),
    [
        ([STARTED, HANG, KILLED, EXITED], "hang", []),
        (
            [STARTED, incident("cuda_oom"), EXITED, STARTED, incident("disk_full")],
            "disk_full",
            ["cuda_oom"],
        ),
        ([STARTED, incident("cuda_oom"), EXITED, STARTED], "cuda_oom", []),
        ([STARTED, incident("cuda_oom"), overcome("cuda_oom"), OVERFIT], "overfit", []),
        (
            [STARTED, incident("hub_or_storage_unavailable", "warning"), HANG],
            "hang",
            ["hub_or_storage_unavailable"],
        ),
        ([PLATEAU, STARTED, ("loss_spike", "info", "LOSS SPIKE", CURVES), OVERFIT], "overfit", []),
        ([STARTED, KILLED, EXITED], None, []),
        ([STARTED, SLOW, SLOW_NO_MORE], "straggler", []),
        (
            [STARTED, ("gpu_fault", "critical", "GPU FAULT: Xid 79", {"rank": 2})],
            "gpu_hardware",
            [],
        ),
        ([STARTED, ("disk_full", "error", "", {}), ("disk_full", "info", "", {})], None, []),
        ([STARTED, incident("code_bug"), ENDED, EXITED], "code_bug", ["hang"]),
        ([STARTED, incident("code_bug"), GONE, EXITED], "code_bug", ["hang"]),
        ([STARTED, ENDED, incident("code_bug")], "hang", ["code_bug"]),
        ([STARTED, incident("code_bug"), HANG], "hang", ["code_bug"]),
    ],
)
def test_a_state_directory_is_explained_from_its_typed_events(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    rows: list[Row],
    root: str | None,
    others: list[str],
) -> None:
    """`explain --state-dir` took the guard's own lines for evidence, and said "Nothing wrong"
    beside OVERFITTING."""
    guards_log(tmp_path / "at", *rows)
    code, report = explained(capsys, "--state-dir", str(tmp_path / "at"))
    assert (code, report["root_cause"]) == (0 if root else 1, root)
    assert [f["label"] for f in report["findings"] if not f["root"]] == others
    for finding in report["findings"]:
        assert finding["fixes"]
        if finding["excerpt"] == "E: x":
            assert (finding["cause"], finding["fixes"]) == (f"{finding['label']} here", ["a", "b"])


def test_the_latest_judgement_of_an_attempt_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After the second NaN that passed, the guard knows that mixed precision causes them."""
    causes = "unknown", "mixed precision", "of the next attempt"
    first, second, third = (
        ("loss_nan", "critical", f"Loss is NaN: {cause}", {"cause": cause, "fixes": ["f"]})
        for cause in causes
    )
    guards_log(tmp_path / "at", STARTED, first, second, STARTED)
    _, report = explained(capsys, "--state-dir", str(tmp_path / "at"))
    assert [(f["line"], f["cause"]) for f in report["findings"]] == [(2, "mixed precision")]
    guards_log(tmp_path / "two", STARTED, first, second, STARTED, third)
    _, report = explained(capsys, "--state-dir", str(tmp_path / "two"))
    assert report["findings"][-1]["cause"] == "of the next attempt"


@pytest.mark.parametrize("piped", [CASCADE, None])
def test_with_a_state_directory_the_guards_own_log_is_read(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    piped: bytes | None,
) -> None:
    """`explain` once waited for standard input, or explained whatever was piped in."""
    stdin = None if piped is None else io.TextIOWrapper(io.BytesIO(piped))
    monkeypatch.setattr(sys, "stdin", stdin)
    guards_log(tmp_path / "at" / "other")
    assert (
        explained(capsys, "--state-dir", str(tmp_path / "at" / "other"))[1]["root_cause"] == "hang"
    )
    assert main.run(["explain", "--state-dir", str(tmp_path / "at" / "other")]) == 0
    printed = capsys.readouterr().out
    assert f"Log         {tmp_path / 'at' / 'other' / 'run.db'}\n" in printed


def test_without_a_file_it_reads_piped_input_or_else_the_guards_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(CASCADE)))
    assert explained(capsys)[1]["root_cause"] == "cuda_oom"
    with open(os.devnull, encoding="utf-8") as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        assert main.run(["explain"]) == 64
        assert "there is no guard log in" in capsys.readouterr().err
        guards_log(tmp_path / "state")
        assert explained(capsys)[1]["root_cause"] == "hang"


@pytest.mark.parametrize("what", ["missing.log", "."])
def test_a_file_that_cannot_be_read_is_refused(
    what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["explain", what]) == 64
    assert f"{what} can't be read" in capsys.readouterr().err


def test_it_names_one_change(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = write(tmp_path, CASCADE)
    assert main.run(["explain", log]) == 0
    out = capsys.readouterr().out
    assert out.startswith("ROOT CAUSE cuda_oom (line 5, rank 3)\n  Observed ")
    assert out.count("  Change ") == 1


def test_secrets_in_the_observed_line_are_masked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = (
        b"RuntimeError: 401 Client Error: Unauthorized for url https://huggingface.co/x token=hf_"
        + b"a" * 34
        + b"\n"
    )
    _, document = explained(capsys, write(tmp_path, log))
    assert document["root_cause"] == "hf_auth"
    assert "hf_aaaa" not in json.dumps(document)


NOTICE = (
    b"NVRM: Xid (PCI:0018:01:00): 145, pid=876767, name=python3, RLW_RXPIPE Nonfatal XC0 i0 "
    b"Link 13 (0x0409a0c2 0x00000008)\n"
)


def test_a_notice_is_named_with_its_own_action_and_without_alarm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`explain` once gave no answer for a notice; the label's other fixes would take a healthy GPU
    out of service."""
    code, document = explained(capsys, write(tmp_path, NOTICE))
    [found] = document["findings"]
    assert (code, document["root_cause"], found["severity"]) == (0, "gpu_hardware", "info")
    assert found["fixes"] == [
        "No action needed. If many occur, report them to the machine's owner."
    ]
    main.run(["explain", str(tmp_path / "miner.log")])
    out = capsys.readouterr().out
    assert "Severity    info" in out
    assert "Make one change" not in out
