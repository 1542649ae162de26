"""The miner's environment: the guard's, minus pm2's variables, plus those that the hook needs."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata

from miner_guard import attach
from miner_guard.checks.request import interpreter_of, value_of
from miner_guard.config import Config
from miner_guard.config.loading import PREFIX, SECRET
from miner_guard.keeper.link import KEEPER_FD
from miner_guard.rank.environment import RANK_ABOVE
from miner_guard.rank.wire import WIRE
from miner_guard.state_dir import MARKER, RANK_SETTINGS, STATE_DIR, StateDir, finite
from miner_guard.system.processes import HELPER

_RANK_SECTIONS = ("gate", "gpu", "hang", "costs")

_OF_THE_GUARD = {
    HELPER,
    KEEPER_FD,
    RANK_ABOVE,
    "NOTIFY_SOCKET",
    "WATCHDOG_USEC",
    "WATCHDOG_PID",
    "LISTEN_FDS",
    "LISTEN_PID",
    "LISTEN_FDNAMES",
    *(PREFIX + dotted.upper().replace(".", "__") for dotted in SECRET),
}
"""Variables that the guard withholds from the miner: if it had them, the miner would notify systemd
in the guard's place, or could leak keys."""

_PM2_TEXT = """
args autorestart autostart automation axm_actions axm_dynamic axm_monitor axm_options command
created_at cwd env error_file exec_interpreter exec_mode exit_code filter_env force increment_var
instance_var instances interpreter km_link kill_retry_time kill_timeout listen_timeout
max_memory_restart max_restarts merge_logs min_uptime monitoring name namespace node_args
node_version out_file pid_file pm2_env pmx prev_restart_delay restart_delay restart_time script
source_map_support status stop_exit_codes treekill unique_id unstable_restarts update_time
username vizion vizion_running versioning version wait_ready watch windowsHide
exp_backoff_restart_delay log_date_format time disable_logs log_type cron_restart pm_err_log_path
pm_out_log_path exit_timeout
"""
_PM2_NAMES = frozenset(_PM2_TEXT.split())
"""Variables that pm2 7 sets for the processes it starts."""


def under_pm2(env: Mapping[str, str]) -> bool:
    """Return True if pm2 started this process."""
    return "pm_id" in env and "pm_exec_path" in env


def without_pm2(env: Mapping[str, str]) -> dict[str, str]:
    """`env` without pm2's variables. With `NODE_CHANNEL_FD`, for example, a Node process in the
    miner would write to pm2's socket."""
    if not under_pm2(env):
        return dict(env)
    return {
        name: value
        for name, value in env.items()
        if name not in _PM2_NAMES
        and not name.startswith(("pm_", "PM2_", "NODE_APP_INSTANCE", "NODE_CHANNEL_", "axm_"))
    }


def of_miner(
    env: Mapping[str, str],
    config: Config,
    state: StateDir,
    *,
    command: Sequence[str],
    run_id: str,
    launch: int,
    wire: str,
) -> dict[str, str]:
    """The complete environment of the miner that `command` starts, for launch number `launch`
    (counting from 0). `wire` leads ranks to the guard."""
    inherited = {
        name: value for name, value in without_pm2(env).items() if name not in _OF_THE_GUARD
    }
    settings = {name: dataclasses.asdict(getattr(config, name)) for name in _RANK_SECTIONS}
    # Do not buffer output, so that lines reach the log immediately and a kill loses none of them.
    inherited.setdefault("PYTHONUNBUFFERED", "1")
    # After a hang, torch's Flight Recorder shows which rank was late for a collective, with gloo
    # too.
    beside = os.path.dirname(interpreter_of(command, inherited)) == os.path.dirname(sys.executable)
    for name in _flight_recorder_sizes(ours=beside):
        inherited.setdefault(name, "2000")
    at_least, _, at_most = (value_of(command, "--nnodes") or "").partition(":")
    if at_most not in ("", at_least):
        # With the store that torchrun shares with its ranks, a node that joins later waits 60 s
        # for an address that nobody publishes again (pytorch/pytorch#135712); then both fail.
        inherited.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    return {
        **attach.environment(config.miner.attach, inherited),
        MARKER: run_id,
        STATE_DIR: str(state.root),
        WIRE: wire,
        RANK_SETTINGS: json.dumps(finite({**settings, "launch": launch}), separators=(",", ":")),
    }


def _flight_recorder_sizes(*, ours: bool) -> tuple[str, ...]:
    """The variables that switch on torch's Flight Recorder.

    torch before 2.9 reads only the old name; later versions warn about the old name in each rank.
    Returns both names if the version of the miner's torch is unknown: the miner runs in a different
    environment from the guard's (`ours` is false), or the guard's environment has no torch.
    """
    version = _torch_version() if ours else None
    old = version is None or version < (2, 9)
    new_name = "TORCH_FR_BUFFER_SIZE"
    return (new_name, "TORCH_NCCL_TRACE_BUFFER_SIZE") if old else (new_name,)


@functools.lru_cache(maxsize=1)
def _torch_version() -> tuple[int, int] | None:
    """Major and minor version of the torch installed for this interpreter; None if torch is not
    installed or its version is unreadable."""
    try:
        major, minor, *_ = metadata.version("torch").split(".")
        return int(major), int(minor)
    except (metadata.PackageNotFoundError, ValueError):
        return None
