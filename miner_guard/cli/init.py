"""`miner-guard init`: guard.toml and ecosystem.config.js for a given command, filled from the
command, the miner's `.env` and its wallet; then an audit says what validators would say."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Optional

import typer

from miner_guard.cli import command
from miner_guard.cli.options import DEFAULT_NAME, Config, Name, State, choose_state, open_context
from miner_guard.cli.output import echo, working
from miner_guard.exits import FAILED, UNAVAILABLE, USAGE, Refused
from miner_guard.record.status_document import NO_JUDGE
from miner_guard.state_dir import write_atomic

_NUMBERS = {
    "--neuron.local_batch_size_train": "batch_size",
    "--neuron.local_batch_size_train_effective": "effective_batch_size",
    "--neuron.upload_steps": "upload_steps",
}
"""Arguments of subnet 38's miner that supply values for `[miner]`."""


@command(
    "Run",
    "miner-guard init --name miner -- torchrun --nproc_per_node=4 neurons/miner.py",
    "miner-guard init --ops ./ops",
)
def init(
    cmd: Annotated[
        Optional[list[str]],
        typer.Argument(
            metavar="-- CMD…", help="The command that starts the miner.", show_default=False
        ),
    ] = None,
    name: Name = DEFAULT_NAME,
    directory: Annotated[Path, typer.Option("--dir", help="Folder to write to.")] = Path(),
    ops: Annotated[
        Optional[Path],
        typer.Option(
            metavar="DIR",
            help="Only write the on-call files to DIR: runbook, systemd unit, dashboards, alerts.",
        ),
    ] = None,
    config: Config = None,
    state_dir: State = None,
) -> None:
    """Write guard.toml and ecosystem.config.js for a miner's command; never overwrites a file."""
    if ops is not None:
        _write_ops(ops)
        return
    files = (directory / (config or "guard.toml"), directory / "ecosystem.config.js")
    if not cmd:
        raise Refused(
            (
                "no command; write it after --, as in `miner-guard init -- torchrun … "
                "neurons/miner.py`"
            ),
            USAGE,
        )
    choose_state(name, state_dir)
    settings = [] if config is None else ["-c", str(config)]
    texts = {
        files[0]: guard_toml(cmd, directory),
        files[1]: ecosystem(cmd, name, [*settings, *_place(DEFAULT_NAME, state_dir)]),
    }
    if taken := [str(path) for path in texts if path.exists() or path.is_symlink()]:
        raise Refused(
            f"{' and '.join(taken)} already exist{'s' if len(taken) == 1 else ''}; nothing was "
            f"written. Move or delete {'it' if len(taken) == 1 else 'them'}, or pass --dir",
            FAILED,
        )
    try:
        for path, text in texts.items():
            write_atomic(path, text, 0o666)
    except OSError as error:
        raise Refused(f"{directory} cannot be written: {error.strerror}", FAILED) from error
    for path in texts:
        echo(f"wrote {path}")
    _audit(files[0])
    echo("next: run `miner-guard doctor`, then `pm2 start ecosystem.config.js`")
    if place := shlex.join(_place(name, state_dir)):
        echo(f"later: `miner-guard status {place}`; the other commands take {place} too")


def _audit(file: Path) -> None:
    """Say what a validator would say of the published files, or which setting is missing."""
    from miner_guard.uploads.audit import audit_repo
    from miner_guard.validators.profiles import profile_of

    before = Path.cwd()
    os.chdir(file.parent)  # where `.env` is, and where pm2 starts the guard
    try:
        settings = open_context(Path(file.name), DEFAULT_NAME, None).settings.config
        profile = profile_of(settings.miner)
        judged = profile is None or profile.judges
        if settings.repo.kind == "none" and judged:
            echo(f"next: set [repo] in {file}, so that the guard can verify and audit uploads")
            return
        with working("reading chain and repo"):
            report = audit_repo(settings)
        for words in (*report.network, report.event().text if judged else report.detail):
            echo(words)
    finally:
        os.chdir(before)


def _write_ops(folder: Path) -> None:
    import shutil

    from miner_guard.show.runbook import FILE, installed

    source = installed()
    if source is None:
        raise Refused(
            "this installation has no ops/ files; install miner-guard from a wheel or from source",
            UNAVAILABLE,
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise Refused(f"{folder} exists and is not an empty folder; choose another", USAGE)
    try:
        shutil.copytree(source, folder, dirs_exist_ok=True)
    except (OSError, shutil.Error) as error:
        raise Refused(f"{folder} cannot be written: {error}", FAILED) from error
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        echo(f"wrote {path}")
    echo(f"next: {folder / FILE} explains what to do about each event")


def guard_toml(cmd: Sequence[str], folder: Path = Path()) -> str:
    """Return the text of guard.toml. It sets the values known from the command line, from `.env` in
    `folder` and from the wallet, and comments out the values that a person must supply."""
    from miner_guard.validators.profiles import load_profile

    profile = _profile(cmd)
    judged = profile is None or load_profile(profile).judges
    sections = {
        "MINER": _miner(cmd),
        "REPO": _repo(folder) if judged else [f"# {NO_JUDGE}."],
        "CHAIN": _chain(cmd),
        "GPU": [_gpu(cmd)],
    }
    return _fill("guard.toml", {name: "\n".join(rows) for name, rows in sections.items()})


def ecosystem(cmd: Sequence[str], name: str, flags: Sequence[str] = ()) -> str:
    """Return the text of ecosystem.config.js; `flags` go to `miner-guard run`."""
    guard = Path(sys.executable).with_name("miner-guard")
    values = {"RUN": ["run", *flags, "--", *cmd], "PYTHON": sys.executable, "GUARD": str(guard)}
    # The template puts the name in quotes.
    quoted = json.dumps(name)[1:-1]
    return _fill(
        "ecosystem.config.js", {**{k: json.dumps(v) for k, v in values.items()}, "NAME": quoted}
    )


def _place(name: str, state_dir: str | None) -> list[str]:
    """Return the flag that points the other commands at this guard; empty if they find the guard
    without a flag."""
    if state_dir is not None:
        return ["--state-dir", str(Path(state_dir).absolute())]
    return [] if name == DEFAULT_NAME else ["--name", name]


def _fill(template: str, values: dict[str, str]) -> str:
    text = (resources.files("miner_guard.cli") / "templates" / template).read_text(encoding="utf-8")
    return re.sub(r"@([A-Z]+)@", lambda match: values[match[1]], text)


def _miner(cmd: Sequence[str]) -> list[str]:
    rows, profile = [], _profile(cmd)
    if profile is not None:
        attach = "sn38" if profile == "sn38" else "log"
        rows += [f'profile = "{profile}"', f'attach = "{attach}"']
    else:
        rows += [
            '# profile = "sn38"',
            "# If the miner does not call the hook, attach to it without changing its code:",
            '# attach = "auto"',
        ]
    for argument, key in _NUMBERS.items():
        value = _value(cmd, argument)
        rows.append(f"{key} = {value}" if _is_number(value) else f"# {key} = 1")
    rows += ["# If exit code 0 means that the miner has finished its work:", "# finite = true"]
    return rows


_CLIENTS = {"main_pool.py": "iota", "main_pool": "iota", "run-manager": "psyche"}
"""Programs of the networks' own clients, and the profile of each."""


def _profile(cmd: Sequence[str]) -> str | None:
    """The profile of the network whose client the command starts; None for any other program."""
    paths = [Path(word) for word in cmd]
    if any(path.parts[-2:] == ("neurons", "miner.py") for path in paths):
        return "sn38"
    return next((_CLIENTS[path.name] for path in paths if path.name in _CLIENTS), None)


def _repo(folder: Path) -> list[str]:
    """The bucket that subnet 38's miner names in its `.env`, which also has the keys."""
    from miner_guard.config import RepoSettings
    from miner_guard.uploads.repos import credentials
    from miner_guard.uploads.repos.base import RepoError

    file = folder / ".env"
    try:
        keys = credentials.find(RepoSettings(credentials="dotenv", credentials_file=str(file)))
    except RepoError:
        keys = {}
    bucket = keys.get("R2_BUCKET_NAME", "")
    settings = {
        "kind": "s3",
        "bucket": bucket or "llama-4b-ws-4-007",
        "credentials": "dotenv",
        "credentials_file": ".env",
    }
    return [f"{'' if bucket else '# '}{key} = {json.dumps(text)}" for key, text in settings.items()]


def _chain(cmd: Sequence[str]) -> list[str]:
    network = _value(cmd, "--subtensor.chain_endpoint") or _value(cmd, "--subtensor.network")
    # bittensor's own default.
    network = network or ("finney" if _profile(cmd) in ("sn38", "iota") else "")
    netuid, hotkey = _value(cmd, "--netuid"), _hotkey(cmd)
    if _profile(cmd) == "iota":
        netuid = "9"
    return [
        f"network = {json.dumps(network)}" if network else '# network = "finney"',
        f"netuid = {netuid}" if _is_number(netuid) else "# netuid = 38",
        f"hotkey = {json.dumps(hotkey)}" if hotkey else '# hotkey = "5…"',
    ]


def _hotkey(cmd: Sequence[str]) -> str:
    """The public address of the wallet's hotkey, the only field that is read; empty if there is
    none."""
    folder = _value(cmd, "--wallet.path") or os.environ.get("BT_WALLET_PATH", "")
    named = _value(cmd, "--wallet.name", "--wallet")
    name = named or os.environ.get("BT_WALLET_NAME", "default")
    wallet = Path(folder or "~/.bittensor/wallets").expanduser() / name / "hotkeys"
    hotkey = _value(cmd, "--wallet.hotkey", "--hotkey") or "default"
    try:
        text = (wallet / hotkey).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
    address = re.search(r'"ss58Address": *"(5\w{47})"', text)
    return address[1] if address else ""


def _gpu(cmd: Sequence[str]) -> str:
    ranks = _value(cmd, "--nproc-per-node")
    return f"# expect = {ranks if _is_number(ranks) else 4}"


def _value(cmd: Sequence[str], *arguments: str) -> str:
    """The value of the last of these arguments; empty if the command has none."""
    from miner_guard.checks.request import value_of

    return value_of(cmd, *arguments) or ""


def _is_number(value: str) -> bool:
    """Return True if TOML parses `value` as a whole number."""
    return re.fullmatch("0|[1-9][0-9]{0,14}", value) is not None
