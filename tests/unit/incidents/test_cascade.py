"""Ten ranks print together, in any order: one shows the fault, the others its consequences."""

from __future__ import annotations

import random
import re
import sys
from pathlib import Path

import pytest

from tests.unit.incidents.helpers import incidents, root
from tests.unit.incidents.teardown import CONSEQUENCES, SUMMARY

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

RANKS = 10
ROOTS = (
    "cuda_oom",
    "cuda_device_assert",
    "cuda_illegal_memory_access",
    "gpu_hardware",
    "cuda_unavailable",
    "disk_full",
    "shm_exhausted",
    "too_many_open_files",
    "hf_auth",
    "storage_access_denied",
    "clock_skew",
    "state_dict_mismatch",
    "version_mismatch",
    "dataset_fetch_failed",
    "loss_nan",
    "chain_unreachable",
    "code_bug",
)


def causes() -> list[tuple[str, str]]:
    rows = tomllib.loads(Path(__file__).with_name("excerpts.toml").read_text(encoding="utf-8"))[
        "excerpt"
    ]
    texts = [
        (row["label"], row["text"].strip("\n"))
        for row in rows
        if row["label"] in ROOTS and "skip" not in row
    ]
    # Excerpts that name ranks are cascades themselves; the words of a launcher and a shell are a
    # consequence, or come before any rank starts.
    return [
        (label, text)
        for label, text in texts
        if not re.search(r"\[rank\d|Rank \d|launch\.py|exited unexp|command not found", text)
    ]


PREFIXES = (
    "[rank{rank}]: ",
    "[default{rank}]:",
    "0|miner    | ",
    "\x1b[36m2026-01-02 03:04:05.678\x1b[0m | Rank {rank} | ",
    "",
)


def cascade(text: str, chance: random.Random, prefix: str = PREFIXES[0]) -> str:
    """All ranks' lines interleaved, with each rank's in order; the culprit's lines may come after
    the others'."""
    culprit = chance.randrange(RANKS)
    streams = []
    for rank in range(RANKS):
        own = text if rank == culprit else chance.choice(CONSEQUENCES).format(rank=rank)
        streams.append([prefix.format(rank=rank) + line for line in own.splitlines()])
    mixed = []
    while streams:
        stream = chance.choice(streams)
        mixed.append(stream.pop(0))
        streams = [s for s in streams if s]
    return "step 10 loss 3.1\n" + "\n".join(mixed) + "\n" + SUMMARY


@pytest.mark.parametrize("number", range(len(causes())))
def test_the_cascade_resolves_to_the_rank_that_broke(number: int) -> None:
    label, text = causes()[number]
    chance = random.Random(number)
    for prefix in PREFIXES:
        if "{rank}" not in prefix and 'File "' in text:
            continue  # if ten ranks print at the same time and none names itself, nothing shows whose traceback a line belongs to
        log = cascade(text, chance, prefix)
        assert root(log) == label, log


def test_the_rank_of_the_root_is_named() -> None:
    found = incidents(cascade("RuntimeError: CUDA error: out of memory", random.Random(3)).encode())
    [main] = [incident for incident in found if incident.root]
    assert len(main.ranks) == 1
    assert len({rank for incident in found for rank in incident.ranks}) == RANKS


def test_without_the_culprits_output_the_exit_code_names_it() -> None:
    log = cascade("step 11 loss 3.0", random.Random(5)).replace("exitcode  : -6", "exitcode  : -9")
    assert root(log) == "host_oom_kill"


def test_ctrl_c_is_the_root_of_what_falls_apart_after_it() -> None:
    log = "^CKeyboardInterrupt\n" + cascade("step 11 loss 3.0", random.Random(6))
    assert root(log) == "user_interrupt"


def test_a_retry_is_not_an_incident_once_steps_continue() -> None:
    retry = (
        "WARNING huggingface 429 Client Error: Too Many Requests for url: "
        "https://huggingface.co/x, retrying\n"
    )
    steps = [f"Outer Step: 3 | Inner Step: {n} | Loss: 3.40\n" for n in (12, 13)]
    assert root(retry + steps[0]) == "hf_rate_limit", "it may have been printed late"
    assert root(retry + "".join(steps)) is None
    assert root(retry + "".join(steps) + retry) == "hf_rate_limit"
    bar = "Epoch 0: {}%| | {}/900 [00:01<00:09, train_loss=3.1]\n"
    assert root(retry + bar.format(1, 9) + bar.format(2, 18)) is None
    assert root(retry + "val_loss=3.1\nval_loss=3.0\n") == "hf_rate_limit", (
        "an evaluation is no training"
    )
    upload = (
        "WARNING huggingface 503 Server Error: Service Unavailable, upload of the state, retrying\n"
    )
    assert root(upload + "".join(steps)) == "hub_or_storage_unavailable", (
        "training continues without an upload"
    )


CHAIN = "WARNING | bittensor | Failed to sync metagraph: timed out, will retry\n"


def steps(count: int) -> str:
    return "".join(f"Outer Step: 3 | Inner Step: {n} | Loss: 3.40\n" for n in range(count))


def test_a_retried_chain_request_is_not_the_cause_of_a_later_end() -> None:
    """A retry hours earlier was once reported as the root cause when the kernel had killed a
    rank."""
    assert root(CHAIN) == "chain_unreachable"
    assert root(CHAIN + steps(5)) is None, "it came back"
    assert root(CHAIN + steps(5) + "failed (exitcode: -9) local_rank: 0\n") == "host_oom_kill"
    assert root(CHAIN + "failed (exitcode: -9) local_rank: 0\n") == "chain_unreachable"


def test_a_chain_that_stays_unreachable_is_reported_while_training_continues() -> None:
    assert root(3 * (CHAIN + steps(5))) == "chain_unreachable"
    assert root(3 * (CHAIN + steps(300)) + steps(5)) is None, "three short ones far apart"
    found = incidents((5 * (CHAIN + steps(5)) + "failed (exitcode: -9) local_rank: 0\n").encode())
    assert {i.label: i.root for i in found} == {"chain_unreachable": False, "host_oom_kill": True}


NAN = "Outer Step: 3 | Inner Step: 99 | Loss: nan\n"
ENDED = "failed (exitcode: -9) local_rank: 0\n"


def test_a_nan_that_training_survived_is_not_the_cause_of_a_later_end() -> None:
    assert root(NAN + steps(3)) == "loss_nan", "the other ranks may print a while"
    assert root(NAN + 4 * steps(1)) == "loss_nan", "one step, by four ranks"
    assert root(NAN + steps(4)) is None
    assert root(NAN + steps(4) + ENDED) == "host_oom_kill"
    assert root(NAN + steps(4) + NAN) == "loss_nan"


@pytest.mark.parametrize(
    "log",
    [
        NAN + steps(4).replace("3.40", "0.0"),
        NAN + ENDED + steps(9),
        NAN.replace("Loss: nan", "Loss is nan, stopping training") + steps(9),
        "RuntimeError: loss is nan\n" + steps(9),
        "{'eval_loss': nan, 'eval_runtime': 9.1}\n" + steps(9),
        "Loss exploded: 2.1 -> 98.3\n" + steps(9),
    ],
)
def test_later_losses_do_not_clear_every_nan(log: str) -> None:
    """HF Trainer prints 0.0 for a NaN loss, and once the NaN has crashed the run, the restarted run
    prints steps again."""
    assert root(log) == "loss_nan"


def test_an_optional_dependency_is_not_an_incident() -> None:
    failed = WAITED.replace(
        "asyncio.exceptions.TimeoutError", "requests.exceptions.ReadTimeout: Read timed out."
    )
    assert root(failed + "WARNING metrics not sent, continuing without them\n") is None
    assert (
        root(failed + "WARNING upload of the state failed, continuing without it\n")
        == "hub_or_storage_unavailable"
    )


def test_pm2_writes_sigint_without_an_interrupt() -> None:
    ended = "PM2      | App [miner:0] exited with code [{}] via signal [SIGINT]\n"
    waited = "[rank1]: [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)\n"
    assert root(waited + ended.format(1)) == root(waited + ended.format(0)) == "nccl_timeout"
    assert root(ended.format(0)) is None
    assert root(ended.format(0) * 2) == "crash_loop"
    assert root("PM2      | Stopping app:miner id:0\n" + ended.format(0)) == "user_interrupt"


def test_a_socket_that_finally_connects_is_not_an_incident() -> None:
    waiting = (
        "[rank3]:[W121 10:00:01.5 socket.cpp:759] [c10d] The client socket has failed to "
        "connect to [n0]:29500"
    )
    refused = f"{waiting} (errno: 111 - Connection refused).\n"
    assert root(3 * refused) == "rendezvous_timeout"
    assert root(3 * refused + "step 1 loss 10.93\nstep 2 loss 10.81\n") is None
    for printed in (
        "Process group initialized, world size 16\n",
        "INFO rank 3 connected to the TCPStore\n",
    ):
        assert root(3 * refused + printed) is None
    for printed in ("Process group not initialized\n", "failed: never connected to the master\n"):
        assert root(3 * refused + printed) == "rendezvous_timeout"
    ipv6 = (
        "[W socket.cpp:464] [c10d] The IPv6 network addresses of (n0, 29500) cannot be "
        "retrieved (gai error: -2).\n"
    )
    assert root(ipv6) is None
    assert root(ipv6 + refused.replace("[W", "[E")) == "rendezvous_timeout"


THROTTLED = (
    "botocore.exceptions.ClientError: An error occurred (SlowDown) when calling the PutObject "
    "operation "
    "(reached max retries: 4): Please reduce your request rate.\n"
)
WAITED = """Traceback (most recent call last):
  File "/srv/neurons/comms.py", line 210, in put
    await asyncio.wait_for(self._put(key, body), 30)
asyncio.exceptions.TimeoutError
"""


@pytest.mark.parametrize(
    "words",
    [
        "During handling of the above exception, another exception occurred:",
        "The above exception was the direct cause of the following exception:",
    ],
)
@pytest.mark.parametrize(
    "after", [WAITED, WAITED.replace("asyncio.exceptions.TimeoutError", "UploadError: no")]
)
def test_what_follows_from_a_known_error_is_not_the_root(words: str, after: str) -> None:
    """A throttled bucket once passed for a code defect, and the guard gave up."""
    assert root(f"{THROTTLED}\n{words}\n\n{after}") == "hf_rate_limit"


@pytest.mark.parametrize(
    "last", ["bye", "Checkpoint step_120 saved", "Exited cleanly.", "shutdown complete"]
)
def test_a_stop_that_the_program_handled_is_not_an_incident(last: str) -> None:
    asked = "^C2026-11-21 10:12:00 | INFO | KeyboardInterrupt received, saving and leaving\n"
    assert root(f"{asked}2026-11-21 10:12:01 | INFO | {last}\n") is None
    assert root(asked) == "user_interrupt"
    assert root(f"{asked}RuntimeError: checkpoint could not be saved\n") == "user_interrupt"


@pytest.mark.parametrize(
    "line", ["RuntimeError: CUDA out of memory; emergency checkpoint saved", "OOM, model saved"]
)
def test_a_saved_checkpoint_hides_no_fault_on_its_line(line: str) -> None:
    assert (
        root(f"RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB\n{line}\n")
        == "cuda_oom"
    )


@pytest.mark.parametrize(
    "last",
    [
        "asyncio.exceptions.TimeoutError",
        "TimeoutError: no answer",
        "ConnectionResetError: [Errno 104] reset",
    ],
)
def test_a_timed_out_wait_or_lost_connection_is_not_a_code_defect(last: str) -> None:
    [found] = incidents(WAITED.replace("asyncio.exceptions.TimeoutError", last).encode())
    assert (found.label, found.root) == ("connection_failed", True)


def test_an_import_error_that_the_program_handled_is_not_an_incident() -> None:
    """`miner ended: version_mismatch, exit code 0` after 50 steps: the miner had caught it and
    continued."""
    caught = (
        'Traceback (most recent call last):\n  File "/srv/miner.py", line 3, in <module>\n '
        "   import flash_attn\n"
    )
    caught += "ModuleNotFoundError: No module named 'flash_attn'\n"
    assert root(caught) == "version_mismatch"
    assert root(caught + steps(5)) == "version_mismatch", "the other ranks' last steps"
    assert root(caught + steps(12)) is None
    assert root(caught + steps(12) + "failed (exitcode: -9) local_rank: 0\n") == "host_oom_kill"
    assert root(caught + steps(12) + caught) == "version_mismatch"


BROKEN_OFF = 'Traceback (most recent call last):\n  File "train.py", line 30, in train\n'


def test_a_signal_to_the_launcher_is_distinguished_from_its_clean_up() -> None:
    closing = "WARNING:api:Sending process 41 closing signal {}\n" + BROKEN_OFF
    assert root(closing.format("SIGHUP")) == "user_interrupt"
    assert root(closing.format("SIGTERM")) == "code_bug"


def test_a_server_that_is_neither_hub_nor_storage_is_not_called_one() -> None:
    """The first fix was once the Hub's status page."""
    refused = "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='{}', port=443): Max"
    refused += " retries exceeded with url: / (Caused by NewConnectionError('refused'))\n"
    assert root(refused.format("huggingface.co")) == "hub_or_storage_unavailable"
    assert root(refused.format("prices.example.org")) == "connection_failed"
    assert root(refused.format("api.wandb.ai")) == "tracker_unavailable"


REMAPPED = (
    "NVRM: Xid (PCI:0000:10:1c): 63, pid=1896, Row Remapper: New row marked for remapping, "
    "reset gpu to activate.\n"
)
STEPS = "".join(f"step {n} loss 3.{n}\n" for n in range(20))


def test_a_driver_notice_counts_only_if_nothing_else_happened() -> None:
    assert root(STEPS + REMAPPED + STEPS) == "gpu_hardware"
    broken = "RuntimeError: CUDA error: device-side assert triggered\n"
    for log in (REMAPPED + broken, broken + REMAPPED, broken + "x\n" * 300 + REMAPPED):
        [found] = incidents(log.encode())
        assert found.label == "cuda_device_assert"
