"""The scanner gives the same answer however the bytes are split, and copes with any bytes."""

from __future__ import annotations

import base64
import itertools
import json
import random
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miner_guard.config import read_toml
from miner_guard.incidents import knowledge
from miner_guard.incidents.logs import clean
from miner_guard.incidents.root import Evidence, RootCauseAnalyzer
from miner_guard.incidents.scan import Scanner
from tests.unit.incidents.helpers import incidents, root

EXCERPTS = Path(__file__).with_name("excerpts.toml")

CASCADE = b"""\
[rank0]: step 10 loss 3.4
[rank3]: Traceback (most recent call last):
[rank3]:   File "/srv/miner/train.py", line 88, in step
[rank3]:     loss.backward()
[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB
[rank3]: (GPU 3; 23.68 GiB total capacity; 20.1 GiB already allocated; 1.2 GiB free; 20.4 GiB reserved in total)
[rank0]:[E1 ProcessGroupNCCL.cpp:616] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)
\x1b[31m0|miner  | [rank1]: RuntimeError: [1] is setting up NCCL communicator, connection closed by peer\x1b[0m
progress  10%|#         | 1/10\rprogress  20%|##        | 2/10\rprogress 30%
E0611 failed (exitcode: -9) local_rank: 0 (pid: 3766727) of binary: /opt/venv/bin/python
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
"""


def seen_of(pieces: list[bytes]) -> list[Evidence]:
    scanner = Scanner(knowledge.load())
    seen = [item for piece in pieces for item in scanner.feed(piece)]
    return seen + scanner.finish()


def cut(data: bytes, at: list[int]) -> list[bytes]:
    edges = [0, *sorted(min(a, len(data)) for a in at), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(edges)]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, len(CASCADE)), max_size=12))
def test_where_the_output_is_cut_changes_nothing(at: list[int]) -> None:
    assert seen_of(cut(CASCADE, at)) == seen_of([CASCADE])


COURSE = b"""\
[W socket.cpp:759] [c10d] The client socket has failed to connect to [n0]:29500 (errno: 111 - Connection refused).
step 1 loss 10.93
step 2 loss 10.81
huggingface_hub: 503 Server Error: Service Unavailable for url: https://huggingface.co/x, retrying
step 3 loss 10.70
saving shard 1 of 2
saving shard 2 of 2
"""


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, len(COURSE)), max_size=12))
def test_judging_a_sighting_by_later_lines_does_not_depend_on_the_cuts(at: list[int]) -> None:
    case = RootCauseAnalyzer(knowledge.load())
    case.add(seen_of(cut(COURSE, at)))
    assert [(i.label, i.first.line, i.count) for i in case.incidents(7)] == [
        ("hub_or_storage_unavailable", 4, 1)
    ]


def test_a_line_longer_than_any_chunk_is_the_same_in_pieces() -> None:
    """A very long line is examined in pieces cut at fixed places, not where chunks happen to
    end."""
    chance = random.Random(7)
    filler = bytes(chance.choices(b"abcdefgh ", k=50_000))
    line = (
        filler
        + b" RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB "
        + filler
        + b"\nnext\n"
    )
    whole = seen_of([line])
    assert {getattr(item, "label", None) for item in whole} == {"cuda_oom"}
    for size in (1000, 4096, 16384, 16385, 65536):
        assert seen_of([line[i : i + size] for i in range(0, len(line), size)]) == whole


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=3000))
def test_any_bytes_get_an_answer(data: bytes) -> None:
    incidents(data)


def test_memory_stays_flat_over_a_log_without_newlines_and_over_ever_new_lines() -> None:
    chance = random.Random(3)
    block = bytes(chance.choices(b"abcdefghijklmnopqrstuvwxyz", k=65536))
    scanner = Scanner(knowledge.load())
    # The knowledge itself, which the first error loads, takes several megabytes.
    knowledge.load().prepare()
    scanner.feed(block)
    tracemalloc.start()
    for _ in range(8):
        scanner.feed(block)
    for number in range(500):
        scanner.feed(
            (
                f"error in part {chance.random()} {'x' * (number % 97)} {chance.choice('abcdef')}\n"
            ).encode()
        )
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20


def test_no_known_error_is_lost_by_the_search_for_trigger_words() -> None:
    """The scanner examines a line only if it contains a trigger word, so every line that a pattern
    matches must contain one."""
    known = knowledge.load()
    lost = []
    for row in read_toml(EXCERPTS)["excerpt"]:
        for line in row["text"].splitlines():
            lowered = clean(line.encode())[1].lower()
            answer = known.match(lowered)
            matters = answer.benign.cancels if answer.benign else answer.patterns
            if matters and not known.triggers.found_in(lowered.encode()):
                lost.append(line)
    assert not lost


def test_the_excerpt_of_a_long_line_shows_the_error_in_it() -> None:
    line = (
        b"x = 1; " * 1500
        + b"RuntimeError: CUDA error: an illegal memory access was encountered "
        + b"y = 2; " * 500
    )
    [found] = incidents(line)
    assert "illegal memory access" in found.first.text
    assert len(found.first.text) <= 800


BROKE = 'Traceback (most recent call last):\n  File "/srv/miner.py", line 3, in step\nKeyError: 7\n'


def test_the_message_in_a_line_of_json_is_read_as_lines() -> None:
    """Structured logs once hid every exception that no pattern knows."""
    for record in (
        {"event": "step failed", "exc_info": BROKE},
        {"message": BROKE},
        {"log": "[rank3]: KeyError: 7\n"},
    ):
        [found] = incidents(json.dumps({"level": "error", "rank": 3, **record}).encode())
        assert (found.label, found.root, found.ranks) == ("code_bug", True, [3])
    assert root(json.dumps({"msg": "Exception ignored in: <function f>\n" + BROKE})) is None
    ignored = "Exception ignored in: <function f>\n" + BROKE
    assert root(ignored + "\nDuring handling of it, another\n\n" + BROKE) is None, "chained"
    assert root(ignored + "step 3\n" * 9 + BROKE) == "code_bug", "the next traceback is not"
    assert root('{"step": 12, "loss": NaN}') == "loss_nan"
    assert root('{"step": 12, "loss": 3.1, "errors": 0, "error": null}') is None
    assert root('{"msg": "KeyError: 7"') is None, "cut off: as any other text"


@pytest.mark.parametrize(
    "line",
    [
        "{'loss': '3.%s', 'grad_norm': '1.%s', 'learning_rate': '%se-07', 'epoch': '0.%s'}",
        (
            "{'eval_loss': 3.%s, 'eval_runtime': %s.12, 'eval_samples_per_second': %s.4, "
            "'epoch': 1.%s}"
        ),
        "2025-01-01 10:00:00.%s | INFO | rank 0 status: step %s error rate 0.%s response %sms",
        "Outer Step: 5 | Inner Step: %s | Loss: 3.%s | Step Time: 1.%ss | Tokens/s: %s",
        "Uploading epoch-%s/gradients.pt (%s MB) to the bucket took %s s, step %s",
    ],
)
def test_a_number_of_training_is_not_a_status_code(line: str) -> None:
    """A gradient norm of 1.429 beside `learning_rate` was once read as HTTP status 429, a rate
    limit."""
    log = "".join(line % ((f"{number:03d}",) * 4) + "\n" for number in range(1000))
    assert incidents(log.encode()) == []


FRAMES = b"""\
step 9 loss 3.4
Traceback (most recent call last):
  File "/srv/miner/train.py", line 88, in step
    loss.backward()
    ^^^^^^^^^^^^^^^
  File "/srv/lib/hivemind/dht.py", line 12, in run
    raise ValueError("connection refused by rank 3")
ValueError: no
[rank1]: Traceback (most recent call last):
[rank3]: Traceback (most recent call last):
[rank3]:   File "/srv/miner/train.py", line 88, in step
[rank1]:   File "/srv/lib/torch/serialization.py", line 8, in load
[rank1]:     return pickle_module.load(f)
[rank3]:     call("cuda out of memory")
[rank1]: EOFError: Ran out of input
[rank3]: KeyError: 3
"""


def test_the_source_that_a_frame_quotes_is_not_an_error() -> None:
    labels = [getattr(item, "label", None) for item in seen_of([FRAMES])]
    assert labels == ["code_bug", "checkpoint_corrupt", "code_bug"]


def test_a_long_line_in_braces_is_read_like_any_other() -> None:
    """Only a complete JSON record has fields. A longer line that merely looks like one, such as a
    metagraph, shows an error in a later piece, and is counted once."""
    neurons = '{"neurons":[' + '{"status":"error 429, retrying","uid":7},' * 1000
    (incident,) = incidents(neurons.encode() + b"\n")
    assert incident.count == 1
    error = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    seen = seen_of([f"{neurons} {error}\n".encode()])
    assert "cuda_oom" in {getattr(item, "label", None) for item in seen}


CHANCE = random.Random(11)
NOISE = bytes(CHANCE.choices(b"abcdefghijklmnopqrstuvwxyz 0123456789.:()[]\n", k=1 << 20))
BASE64 = base64.encodebytes(CHANCE.randbytes(60_000)).decode()
BAR = "\r".join(f"{n}%|#####    | {n}/90000 [1:02:03<9:08:07,  2.1s/it]" for n in range(900))
ILLEGAL = "RuntimeError: CUDA error: an illegal memory access was encountered\n"
GAI = """Traceback (most recent call last):
  File "/e/lib/python3.11/site-packages/{}", line 7, in f
    x()
socket.gaierror: [Errno -3] Temporary failure in name resolution
"""


@pytest.mark.parametrize(
    ("log", "label"),
    [
        # Short words such as `xid` and `nan` turn up by chance in random letters.
        (NOISE, None),
        (CHANCE.randbytes(1 << 20), None),
        # Every redraw of a progress bar is a line of its own.
        (BAR + "\n", None),
        (BAR + "\r" + ILLEGAL, "cuda_illegal_memory_access"),
        (BASE64, None),
        (BASE64 + ILLEGAL + BASE64, "cuda_illegal_memory_access"),
        ("Found 0 inf or nan gradients", None),
        ('INFO:     127.0.0.1:54321 - "GET /healthz HTTP/1.1" 503 Service Unavailable', None),
        # `socket.gaierror` did not end a traceback: whoever could not resolve the chain's name was
        # told to fix the access to the Hub.
        (GAI.format("bittensor/core/subtensor.py"), "chain_unreachable"),
        (GAI.format("huggingface_hub/file_download.py"), "hub_or_storage_unavailable"),
    ],
    ids=map(str, range(10)),
)
def test_what_a_log_holds(log: str | bytes, label: str | None) -> None:
    assert root(log) == label


SCRIPT = """\
/srv/my miner/.venv/bin/python: can't open file '/srv/my miner/train.py': [Errno 2] No such file or directory
E1122 02:38:19.506000 9781 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 2) local_rank: 0
"""
PASSWORD = """\
Enter password to unlock key: Traceback (most recent call last):
  File "/srv/miner/neurons/miner.py", line 12, in <module>
    password = input("Enter password to unlock key: ")
EOFError: EOF when reading a line
"""


def test_a_script_that_is_not_there_and_a_password_are_no_bugs() -> None:
    """Also where the interpreter's folder has a space."""
    (script,) = (incident for incident in incidents(SCRIPT.encode()) if incident.root)
    assert "can't open file" in script.first.text
    (password,) = (incident for incident in incidents(PASSWORD.encode()) if incident.root)
    assert "keyboard input" in password.first.cause


def test_an_actor_of_ray_raises_what_ends_its_own_traceback() -> None:
    task = "ray.exceptions.RayTaskError(RuntimeError): ray::W.save() (pid=7, ip=10.0.0.3)\n"
    inner = 'File "/e/lib/python3.11/site-packages/torch/serialization.py", line 7, in f\n    x()\n'
    failed = "RuntimeError: PytorchStreamWriter failed writing file data/37: file write failed\n"
    assert root(BROKE.replace("KeyError: 7\n", task) + "  " + inner + failed) == "disk_full"


def test_an_interrupt_while_an_error_is_handled_is_the_end_of_the_run() -> None:
    chained = "\nDuring handling of the above exception, another exception occurred:\n\n"
    stopped = BROKE.replace("KeyError: 7", "KeyboardInterrupt")
    refused = BROKE.replace("KeyError: 7", "ConnectionRefusedError: [Errno 111] refused")
    assert root(refused + chained + stopped) == "user_interrupt"
    assert root(refused + stopped) == "connection_failed", "another rank's"
