"""The general layer: classifies errors that no pattern knows by what was acted on and how that
failed."""

from __future__ import annotations

from itertools import chain

import pytest

from miner_guard.incidents import grammar, knowledge
from miner_guard.incidents.general import GeneralLayer, literal
from miner_guard.incidents.patterns import BadKnowledge
from miner_guard.incidents.scanner import Scanner
from miner_guard.incidents.sightings import Retraction, Sighting
from tests.unit.incidents.helpers import root

PACKAGES = "/opt/venv/lib/python3.11/site-packages"


def traceback(last: str, *frames: tuple[str, str, str], prefix: str = "") -> str:
    lines = ["Traceback (most recent call last):"]
    for path, function, source in frames:
        lines += [f'  File "{path}", line 71, in {function}', f"    {source}"]
    return "".join(f"{prefix}{line}\n" for line in [*lines, last])


@pytest.mark.parametrize(
    ("label", "last", "frames"),
    [
        (
            "checkpoint_corrupt",
            "OSError: 17 bytes left over after the index",
            [("/srv/a.py", "main", "x()"), ("/srv/b.py", "load_checkpoint", "parse(path)")],
        ),
        (
            "state_dict_mismatch",
            "ValueError: saved state has 12 groups, this one 10",
            [(f"{PACKAGES}/fancy/adam.py", "load_state_dict", "raise ValueError(why)")],
        ),
        (
            "version_mismatch",
            "RuntimeError: namespace fancy has two owners",
            [("/srv/a.py", "<module>", "import fancy"), (f"{PACKAGES}/f.py", "<module>", "go()")],
        ),
        (
            "compile_failed",
            "OSError: entry of the cache is a directory",
            [(f"{PACKAGES}/torch/_inductor/codecache.py", "load", "raise OSError(out)")],
        ),
        (
            "chain_unreachable",
            "Exception: gone",
            [
                (f"{PACKAGES}/bittensor/core/subtensor.py", "sync", "self.open()"),
                (f"{PACKAGES}/websockets/client.py", "connect", "sock = create_connection(at)"),
            ],
        ),
        (
            "tracker_unavailable",
            "fancy.errors.CommError: entity unknown",
            [("/srv/a.py", "main", "x()"), (f"{PACKAGES}/wandb/sdk/init.py", "init", "raise e")],
        ),
        (
            "dataset_fetch_failed",
            "OSError: row 331 has 7 columns",
            [("/srv/a.py", "__getitem__", "self.read(i)"), ("/srv/b.py", "read", "raise e")],
        ),
    ],
)
@pytest.mark.parametrize("prefix", ["", "[rank3]: ", "[default1]:", "0|miner  | "])
def test_frames_show_what_an_exception_does_not_say(
    label: str, last: str, frames: list[tuple[str, str, str]], prefix: str
) -> None:
    assert root(traceback(last, *frames, prefix=prefix)) == label


@pytest.mark.parametrize(
    ("label", "line"),
    [
        ("host_oom_kill", "PinError: mmap failed: ENOMEM for 3 GiB of staging"),
        ("process_limit", "StartError: std::thread: could not create a thread, EAGAIN"),
        ("too_many_open_files", "ShardError: file descriptor limit reached (1024)"),
        ("disk_full", "WriteError: device has no free space"),
        ("hf_rate_limit", "HubStatusError: the server asked us to slow down: 429"),
        ("storage_access_denied", "PutError: bucket state: the access key was rejected"),
        ("hub_or_storage_unavailable", "PutError: bucket state: the server answered 503"),
        ("checkpoint_corrupt", "ReadError: the checkpoint's index is truncated"),
        ("nccl_network_error", "SendError: rank 5 hung up (ECONNRESET)"),
        ("rendezvous_timeout", "JoinError: rendezvous closed after the deadline"),
        ("port_in_use", "ServeError: port 50051 is occupied by another process"),
        ("version_mismatch", "FormatError: this file was built for a newer library"),
        ("cuda_unavailable", "StartError: the NVIDIA driver is not loaded"),
        ("nan_loss", "StepError: gradients of layer 12 blew up to infinity"),
        ("wallet_permission", "KeyFileError: wrong password for the coldkey"),
        ("dht_unreachable", "P2PError: none of the initial peers could be dialled"),
        ("connection_failed", "TimeoutError: no answer from the parameter server within 60 s"),
    ],
)
def test_the_object_and_its_failure_name_the_label(label: str, line: str) -> None:
    assert root(line + "\n") == label


BUGS = (
    "KeyError: 'lr'",
    "TypeError: unsupported operand type(s) for +: 'int' and 'str'",
    "TypeError: forward() got an unexpected keyword argument 'mask'",
    "AttributeError: 'NoneType' object has no attribute 'shape'",
    "AttributeError: 'Namespace' object has no attribute 'lr_scheduler'",
    "AssertionError: image size must be divisible by the patch size",
    "AssertionError: data parallel group is not initialized",
    "ValueError: num_heads must divide hidden_size",
    "ValueError: target modules {'q_proj'} not found in the base model",
    "ValueError: the number of labels does not match the number of classes",
    "ValueError: you should activate truncation and padding to have equal lengths",
    "RuntimeError: expected scalar type Half but found Float",
    "RuntimeError: view size is not compatible with the stride of the input",
    "RuntimeError: a view of a leaf is used in an in-place operation",
    "RuntimeError: op is not implemented for 'Half'",
    "RuntimeError: cannot re-initialize CUDA in a forked subprocess",
    "RuntimeError: mismatching argument: broadcast a dimension of length 2",
)


@pytest.mark.parametrize("line", BUGS)
@pytest.mark.parametrize("function", ["run", "forward", "__getitem__", "<module>"])
def test_a_bug_stays_a_bug(line: str, function: str) -> None:
    frames = [("/srv/train.py", "main", "run()"), ("/srv/model.py", function, "x = self.f(y)")]
    assert root(traceback(line, *frames)) == "code_bug"


WORKER = traceback("asyncio.exceptions.CancelledError", ("/srv/a.py", "wait", "await it"))


def test_a_cancelled_task_is_a_consequence() -> None:
    bug = traceback("KeyError: 'lr'", ("/srv/a.py", "f", "x"))
    shard = traceback("OSError: row 331", ("/srv/a.py", "load_shard", "x"))
    assert root(WORKER + bug) == "code_bug"
    assert root(WORKER + shard) == "dataset_fetch_failed"


FIRST = "RuntimeError: nothing to train on\n"
REST = "Files of the dataset do not exist below /data\n"


@pytest.mark.parametrize("between", ["", "[rank3]: loss 3.1\n", "[rank3]: a\n[rank4]: b\n"])
def test_a_message_may_continue_on_the_next_lines(between: str) -> None:
    assert root(FIRST) == "code_bug"
    assert root(FIRST + between + REST) == "dataset_fetch_failed"
    assert root(f"{FIRST}Check the settings.\n{between}{REST}") == "dataset_fetch_failed"


@pytest.mark.parametrize(
    "other",
    ["\n", "wandb: ", "2026-01-02 03:04:05 - ", "[data] ", "TypeError: 3\n", "1\n2\n3\n4\n5\n6\n"],
)
def test_a_line_that_begins_anew_continues_nothing(other: str) -> None:
    assert root(FIRST + other + REST) in ("code_bug", None)


def test_a_message_continues_in_the_next_piece_of_the_log() -> None:
    scanner = Scanner(knowledge.load())
    (bug,) = scanner.feed(FIRST.encode())
    gone, data = scanner.feed(REST.encode())
    assert isinstance(bug, Sighting)
    assert isinstance(data, Sighting)
    assert (bug.label, data.label, data.line) == ("code_bug", "dataset_fetch_failed", 1)
    assert gone == Retraction(("code_bug",), 2, 1)


@pytest.mark.parametrize("cut", [1, 5_000, 16_384, 17_000, 30_000])
def test_a_long_line_in_pieces_is_one_line(cut: int) -> None:
    """However it arrives, its later pieces are not further lines of the message."""
    log = (FIRST + "see below " * 1536 + REST.rstrip() + " b" * 9_000 + "\n").encode()
    scanner = Scanner(knowledge.load())
    pieces = [seen for part in (log[:cut], log[cut:]) for seen in scanner.feed(part)]
    assert pieces == Scanner(knowledge.load()).feed(log)


def test_the_last_line_of_a_traceback_may_lack_its_prefix() -> None:
    lost = "OSError: row 331 has 7 columns"
    frames = traceback("", ("/srv/a.py", "load_shard", "x"), prefix="[rank3]: ")
    whole = frames.removesuffix("[rank3]: \n") + lost + "\n"
    assert root(whole) == "dataset_fetch_failed"


@pytest.mark.parametrize(
    ("source", "label"),
    [("ds = load_dataset(name)", "dataset_fetch_failed"), ("x()", "hub_or_storage_unavailable")],
)
def test_a_pattern_may_require_what_the_frames_show(source: str, label: str) -> None:
    last = "ConnectionError: Couldn't reach 'corpus' on the Hub (ConnectionError)"
    assert root(traceback(last, ("/srv/train.py", "main", source))) == label


RICH = """\
\u256d\u2500\u2500 Traceback (most recent call last) \u2500\u2500\u256e
\u2502 /srv/train.py:7 in main                                  \u2502
\u2502                                                          \u2502
\u2502     6 \u2502   for path in paths:                             \u2502
\u2502 \u2771   7 \u2502   \u2502   model.load_state_dict(read(path))         \u2502
\u2502                                                          \u2502
\u2502 /opt/lib/python3.10/site-packages/fancy/model.py:31 in   \u2502
\u2570\u2500\u2500\u2500\u2500\u2500\u256f
ValueError: 12 groups here, 10 there
"""
NOTEBOOK = """\
OSError                                   Traceback (most recent call last)
/srv/train.ipynb in main(path)
/opt/lib/python3.10/dist-packages/fancy/files.py in load_shard(path, mode)
     30     with open(path, mode) as file:
---> 31         raise OSError(path)

OSError: row 331 has 7 columns
"""


@pytest.mark.parametrize(
    ("log", "label"), [(RICH, "state_dict_mismatch"), (NOTEBOOK, "dataset_fetch_failed")]
)
@pytest.mark.parametrize("prefix", ["", "[rank3]: "])
def test_the_frames_of_rich_and_of_a_notebook_count(log: str, label: str, prefix: str) -> None:
    assert root("".join(f"{prefix}{line}\n" for line in log.splitlines())) == label


def test_a_workers_traceback_follows_that_of_its_parent() -> None:
    parent = traceback("Exception: ", (f"{PACKAGES}/torch/mp/spawn.py", "join", "raise e"))
    said = "\n-- Process 3 terminated with the following error:\n"
    worker = traceback("OSError: row 331 has 7 columns", ("/srv/a.py", "load_shard", "x"))
    assert root(parent + said + worker) == "dataset_fetch_failed"


def test_a_pattern_wins() -> None:
    """The words alone would point to a data set error."""
    known = "OSError: [Errno 28] No space left on device: '/data/dataset/shard-3.tar'"
    assert root(traceback(known, ("/srv/a.py", "__getitem__", "raise e"))) == "disk_full"


def test_a_cut_off_traceback_answers_by_its_frames() -> None:
    whole = traceback("", (f"{PACKAGES}/fancy/adam.py", "load_state_dict", "raise ValueError("))
    assert root(whole.rstrip("\n")) == "state_dict_mismatch"


ERROR = "2026-01-02 03:04:05 | ERROR | data - shard train-17.jsonl.zst does not exist\n"


def test_an_error_line_counts_if_nothing_better_is_known() -> None:
    assert root(ERROR) == "dataset_fetch_failed"
    assert root(f"{ERROR}{traceback('KeyError: 1', ('/srv/a.py', 'f', 'x'))}") == "code_bug"
    assert root(f"{ERROR}torch.OutOfMemoryError: CUDA out of memory.\n") == "cuda_oom"


def test_an_error_line_is_the_cause_of_the_symptoms_after_it() -> None:
    symptom = "[rank1]: torch.distributed.DistBackendError: NCCL error: remote process exited\n"
    assert root(ERROR + symptom) == "dataset_fetch_failed"


@pytest.mark.parametrize(
    "quiet",
    [
        "WARNING: could not connect to the metrics server, continuing without it\n",
        "2026-01-02 03:04:05 | INFO | data - shard train-17.jsonl.zst does not exist, skipping\n",
        "2026-01-02 03:04:05 | INFO | data - 3 corrupt shards could not be read\n",
        ERROR + "step 10 loss 2.1\nstep 11 loss 2.0\n",
        ERROR + "fine\n" * 300,
        "eval: token error 12.1 %, memory 14 GB, timeout 600 s\n",
    ],
)
def test_a_line_that_stops_nothing_is_no_fault(quiet: str) -> None:
    assert root(quiet) is None


def test_the_running_guard_judges_exceptions_only() -> None:
    scanner = Scanner(knowledge.load())
    assert scanner.feed(ERROR.encode()) == []
    last = "ReadError: ckpt 7: bad CRC"
    (seen,) = scanner.feed(traceback(last, ("/srv/a.py", "f", "x")).encode())
    assert isinstance(seen, Sighting)
    # A label that this layer names may be wrong: the guard tries a restart.
    assert (seen.label, seen.role, seen.restart) == ("checkpoint_corrupt", "exception", "once")


def test_every_class_is_used() -> None:
    rules = knowledge.load().general.grammar
    needs = [n for rule in rules.rules for n in (*rule.needs, *rule.excludes)]
    words = chain.from_iterable(need.classes(frames=False) for need in needs)
    assert {*rules.errors, *rules.harmless, *words} == rules.words.keys()
    frames = chain.from_iterable(need.classes(frames=True) for need in needs)
    assert {*frames} == rules.frames.keys()


def test_a_fix_of_a_rule_says_where_it_comes_from() -> None:
    rules = knowledge.load().general.grammar.rules
    assert all(r.pattern.source.startswith("https://") for r in rules if r.pattern.fix)


@pytest.mark.parametrize(
    ("word", "text"),
    [("corrupt*", " corrupt"), ("*error", "error "), ("not found", " not found "), ("*x*", "x")],
)
def test_a_star_stands_for_any_letters(word: str, text: str) -> None:
    assert literal(word) == text.encode()


TABLE = {
    "words": {"thing": ["thing*"], "broken": ["broken"]},
    "frames": {},
    "rules": [{"label": "code_bug", "says": ["thing", "broken"]}],
    "errors": [],
    "harmless": [],
}


def _parsed(**changed: object) -> grammar.ErrorGrammar:
    return grammar.parsed("mine.toml", {**TABLE, **changed}, knowledge.load().labels)


def test_each_entry_of_a_rule_must_occur() -> None:
    layer = GeneralLayer(_parsed())
    for text, fits in (("ThingShop is broken", True), ("it is broken", False)):
        assert (layer.exception("XError", layer.classes_in(text), b"") is not None) is fits
    assert layer.line("things are broken") is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"colour": 1}, "unknown key colour"),
        ({"words": {"thing": ["Thing"]}}, "thing: 'Thing' is not a valid word; use lower-case"),
        ({"frames": {"here": ["Thing.py"]}}, "here: 'Thing.py' contains capital letters"),
        ({"rules": [{"label": "code_bug", "says": ["other"]}]}, "other is not a class"),
        ({"rules": [{"label": "code_bug", "at": ["thing"]}]}, "thing is not a class"),
        ({"rules": [{"label": "mine", "says": ["thing"]}]}, "'mine' in a rule is not a label"),
        ({"rules": [{"label": "code_bug"}]}, "a rule for code_bug has no requirements"),
        ({"rules": [{"label": "code_bug", "said": ["thing"]}]}, "unknown key said in a rule"),
        ({"errors": ["other"]}, "other is not a class"),
    ],
)
def test_a_wrong_grammar_is_refused(changed: dict[str, object], message: str) -> None:
    with pytest.raises(BadKnowledge, match=message.replace(".", r"\.")):
        _parsed(**changed)
