"""Ten ranks print together, in any order: one shows the fault, the others its consequences."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from miner_guard.config import read_toml
from tests.unit.incidents.helpers import incidents, root
from tests.unit.incidents.teardown import CONSEQUENCES, SUMMARY

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
    rows = read_toml(Path(__file__).with_name("excerpts.toml"))["excerpt"]
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


RETRY = "WARNING 429 Client Error: Too Many Requests for url: https://huggingface.co/x, retrying\n"
UPLOAD = "WARNING huggingface 503 Server Error: Service Unavailable, upload of it, retrying\n"
CHAIN = "WARNING | bittensor | Failed to sync metagraph: timed out, will retry\n"
NAN = "Outer Step: 3 | Inner Step: 99 | Loss: nan\n"
ENDED = "failed (exitcode: -9) local_rank: 0\n"
BAR = "Epoch 0: {}%| | {}/900 [00:01<00:09, train_loss=3.1]\n"
FLASH = """Traceback (most recent call last):
  File "/srv/miner.py", line 3, in <module>
    import flash_attn
ModuleNotFoundError: No module named 'flash_attn'
"""
EXITED = "PM2      | App [miner:0] exited with code [{}] via signal [SIGINT]\n"
WATCHDOG = "[rank1]: [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)\n"
REFUSED = (
    "[rank3]:[W121 10:00:01.5 socket.cpp:759] [c10d] The client socket has failed to connect to "
    "[n0]:29500 (errno: 111 - Connection refused).\n"
)
IPV6 = (
    "[W socket.cpp:464] [c10d] The IPv6 network addresses of (n0, 29500) cannot be retrieved "
    "(gai error: -2).\n"
)
POOL = (
    "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='{}', port=443): Max retries "
    "exceeded with url: / (Caused by NewConnectionError('refused'))\n"
)
CLOSING = """WARNING:api:Sending process 41 closing signal {}
Traceback (most recent call last):
  File "train.py", line 30, in train
"""
ASKED = "^C2026-11-21 10:12:00 | INFO | KeyboardInterrupt received, saving and leaving\n"
LEFT = ASKED + "2026-11-21 10:12:01 | INFO | {}\n"
OOM = "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB\n"


def steps(count: int) -> str:
    return "".join(f"Outer Step: 3 | Inner Step: {n} | Loss: 3.40\n" for n in range(count))


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
TIMEOUT = "asyncio.exceptions.TimeoutError"
READ = WAITED.replace(TIMEOUT, "requests.exceptions.ReadTimeout: Read timed out.")


@pytest.mark.parametrize(
    ("log", "label"),
    [
        # Steps after a retry: one may have been printed late; an evaluation is no training;
        # training continues without an upload.
        (RETRY + steps(1), "hf_rate_limit"),
        (RETRY + steps(2), None),
        (RETRY + steps(2) + RETRY, "hf_rate_limit"),
        (RETRY + BAR.format(1, 9) + BAR.format(2, 18), None),
        (RETRY + "val_loss=3.1\nval_loss=3.0\n", "hf_rate_limit"),
        (UPLOAD + steps(2), "hub_or_storage_unavailable"),
        # A retry hours earlier was once the root cause when the kernel had killed a rank.
        (CHAIN, "chain_unreachable"),
        (CHAIN + steps(5), None),
        (CHAIN + steps(5) + ENDED, "host_oom_kill"),
        (CHAIN + ENDED, "chain_unreachable"),
        # A chain that stays unreachable is reported while training continues; three short
        # outages far apart are not.
        (3 * (CHAIN + steps(5)), "chain_unreachable"),
        (3 * (CHAIN + steps(300)) + steps(5), None),
        (5 * (CHAIN + steps(5)) + ENDED, "host_oom_kill"),
        # A NaN that training survived: other ranks may print for a while, and four ranks one step.
        (NAN + steps(3), "loss_nan"),
        (NAN + 4 * steps(1), "loss_nan"),
        (NAN + steps(4), None),
        (NAN + steps(4) + ENDED, "host_oom_kill"),
        (NAN + steps(4) + NAN, "loss_nan"),
        # HF Trainer prints 0.0 for a NaN loss; a restarted run prints steps after the crash.
        (NAN + steps(4).replace("3.40", "0.0"), "loss_nan"),
        (NAN + ENDED + steps(9), "loss_nan"),
        (NAN.replace("Loss: nan", "Loss is nan, stopping training") + steps(9), "loss_nan"),
        ("RuntimeError: loss is nan\n" + steps(9), "loss_nan"),
        ("{'eval_loss': nan, 'eval_runtime': 9.1}\n" + steps(9), "loss_nan"),
        ("Loss exploded: 2.1 -> 98.3\n" + steps(9), "loss_nan"),
        # An import error that the miner had caught 50 steps before its end; five steps may be the
        # other ranks' last.
        (FLASH, "version_mismatch"),
        (FLASH + steps(5), "version_mismatch"),
        (FLASH + steps(12), None),
        (FLASH + steps(12) + ENDED, "host_oom_kill"),
        (FLASH + steps(12) + FLASH, "version_mismatch"),
        # pm2 writes SIGINT without an interrupt.
        (WATCHDOG + EXITED.format(1), "nccl_timeout"),
        (WATCHDOG + EXITED.format(0), "nccl_timeout"),
        (EXITED.format(0), None),
        (EXITED.format(0) * 2, "crash_loop"),
        ("PM2      | Stopping app:miner id:0\n" + EXITED.format(0), "user_interrupt"),
        # A socket that connects in the end.
        (3 * REFUSED, "rendezvous_timeout"),
        (3 * REFUSED + "step 1 loss 10.93\nstep 2 loss 10.81\n", None),
        (3 * REFUSED + "Process group initialized, world size 16\n", None),
        (3 * REFUSED + "INFO rank 3 connected to the TCPStore\n", None),
        (3 * REFUSED + "Process group not initialized\n", "rendezvous_timeout"),
        (3 * REFUSED + "failed: never connected to the master\n", "rendezvous_timeout"),
        (IPV6, None),
        (IPV6 + REFUSED.replace("[W", "[E"), "rendezvous_timeout"),
        # A stop that the program handled.
        (LEFT.format("bye"), None),
        (LEFT.format("Checkpoint step_120 saved"), None),
        (LEFT.format("Exited cleanly."), None),
        (LEFT.format("shutdown complete"), None),
        (ASKED, "user_interrupt"),
        (ASKED + "RuntimeError: checkpoint could not be saved\n", "user_interrupt"),
        # A saved checkpoint hides no fault on its line.
        (OOM + "RuntimeError: CUDA out of memory; emergency checkpoint saved\n", "cuda_oom"),
        (OOM + "OOM, model saved\n", "cuda_oom"),
        # A server that is neither Hub nor storage: the first fix was once the Hub's status page.
        (POOL.format("huggingface.co"), "hub_or_storage_unavailable"),
        (POOL.format("prices.example.org"), "connection_failed"),
        (POOL.format("api.wandb.ai"), "tracker_unavailable"),
        # A timed out wait or a lost connection is no code defect.
        (WAITED, "connection_failed"),
        (WAITED.replace(TIMEOUT, "TimeoutError: no answer"), "connection_failed"),
        (WAITED.replace(TIMEOUT, "ConnectionResetError: [Errno 104] reset"), "connection_failed"),
        # What the program does without.
        (READ + "WARNING metrics not sent, continuing without them\n", None),
        (READ + "WARNING upload failed, continuing without it\n", "hub_or_storage_unavailable"),
        # A signal to the launcher, and its clean-up.
        (CLOSING.format("SIGHUP"), "user_interrupt"),
        (CLOSING.format("SIGTERM"), "code_bug"),
    ],
)
def test_the_course_of_a_log_decides(log: str, label: str | None) -> None:
    assert root(log) == label


@pytest.mark.parametrize(
    "words",
    [
        "During handling of the above exception, another exception occurred:",
        "The above exception was the direct cause of the following exception:",
    ],
)
@pytest.mark.parametrize("after", [WAITED, WAITED.replace(TIMEOUT, "UploadError: no")])
def test_what_follows_from_a_known_error_is_not_the_root(words: str, after: str) -> None:
    """A throttled bucket once passed for a code defect, and the guard gave up."""
    assert root(f"{THROTTLED}\n{words}\n\n{after}") == "hf_rate_limit"


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
