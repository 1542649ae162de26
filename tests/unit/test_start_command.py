"""The command that starts this guard again, as a person on call would type it."""

from __future__ import annotations

import pytest

from miner_guard.guard.engines import start_command

_PM2 = {"pm_id": "0", "pm_exec_path": "/usr/bin/miner-guard", "name": "sn38 miner"}
_SYSTEMD = {"NOTIFY_SOCKET": "/run/systemd/notify"}
_ARGV = ["/opt/venv/bin/miner-guard", "run", "--name", "a b", "--", "torchrun", "m.py"]


@pytest.mark.parametrize(
    ("env", "cgroup", "command"),
    [
        (_PM2, "0::/\n", "pm2 restart 'sn38 miner'"),
        ({**_PM2, "name": ""}, "0::/\n", "pm2 restart 0"),
        (
            _SYSTEMD,
            "0::/system.slice/miner-guard.service\n",
            "systemctl restart miner-guard.service",
        ),
        (
            _SYSTEMD,
            "0::/user.slice/user-1000.slice/user@1000.service/app.slice/mg@1.service\n",
            "systemctl --user restart mg@1.service",
        ),
        (
            {},
            "0::/system.slice/cron.service\n",
            "cd '/home/me/my miner' && miner-guard run --name 'a b' -- torchrun m.py",
        ),
    ],
)
def test_it_is_the_service_managers_or_the_command_line(
    env: dict[str, str], cgroup: str, command: str
) -> None:
    """At four in the morning, "start the guard" is not enough, and `systemctl restart cron` is
    wrong."""
    assert start_command(env, _ARGV, cgroup, "/home/me/my miner") == command


def test_a_guard_run_as_a_module_is_started_as_a_module() -> None:
    argv = ["/opt/miner_guard/__main__.py", "run", "--", "true"]
    assert start_command({}, argv, "0::/\n", "/x") == "cd /x && python -m miner_guard run -- true"
