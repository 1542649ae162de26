"""The real pm2 runs ecosystem.config.js: source 004's greps find what they should, and nothing is
left behind."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.servers.webhook import Webhook
from tests.support import requires
from tests.support.waiting import until

pytestmark = pytest.mark.slow

GREPS = ("GPU DIAGNOSTICS", "Step Time", "UPLOAD BLOCKED", "Outer Step:", "Successfully pushed")


class Pm2:
    """A separate pm2, with an edited copy of our ecosystem file."""

    def __init__(self, folder: Path) -> None:
        self.program = requires.tool("pm2")
        self.state = folder / "state"
        self.file = folder / "ecosystem.config.js"
        self.env = {
            **os.environ,
            "PM2_HOME": str(folder / "pm2"),
            "MINER_GUARD_STATE_DIR": str(self.state),
        }

    def edit(self, run: list[str]) -> None:
        """The one-line edit that a user makes. (`__dirname` is kept pointing at the repository.)"""
        text = (requires.REPO / "ecosystem.config.js").read_text()
        edited, lines = re.subn(
            r"(?m)^const RUN = .*$", lambda _: f"const RUN = {json.dumps(run)};", text
        )
        assert lines == 1
        self.file.write_text(edited.replace("__dirname", json.dumps(str(requires.REPO))))

    def __call__(self, *arguments: str) -> str:
        answer = subprocess.run(
            [self.program, *arguments],
            env=self.env,
            capture_output=True,
            text=True,
            timeout=120,
            cwd=self.file.parent,
        )
        assert answer.returncode == 0, answer.stdout + answer.stderr
        return answer.stdout

    def app(self) -> dict[str, object]:
        text = self("jlist")
        apps = json.loads(text[text.index("[") :])
        return dict(apps[0]["pm2_env"]) if apps else {}

    def logs(self) -> str:
        return self("logs", "miner", "--nostream", "--lines", "2000")

    def printed(self) -> str:
        """The text of the log file that `logs` reads, without starting a node process."""
        file = Path(self.env["PM2_HOME"]) / "logs" / "miner.log"
        return file.read_text() if file.exists() else ""

    def left(self) -> list[str]:
        """Command lines of this test's processes that are still running, except pm2's daemon."""
        marked = []
        for process in psutil.process_iter():
            try:
                if process.pid != os.getpid() and str(self.state) in process.environ().values():
                    marked.append(" ".join(process.cmdline()))
            except (psutil.Error, OSError):
                continue
        return [words for words in marked if words and "God Daemon" not in words]


@pytest.fixture
def pm2(tmp_path: Path) -> Iterator[Pm2]:
    instance = Pm2(tmp_path)
    yield instance
    subprocess.run([instance.program, "kill"], env=instance.env, capture_output=True, timeout=120)


@pytest.mark.timeout(500)
def test_start_grep_restart_stop_delete(pm2: Pm2) -> None:
    """Runs an endless demo with a slow step, and with its second upload allowed."""
    pm2.env["MINER_GUARD_GATE__MIN_INNER_STEP"] = "20"
    pm2.edit(["demo", "--steps", "100000", "--fault", "slow@30"])
    pm2("start", str(pm2.file))
    words = (*GREPS, "SLOW STEP")
    until(lambda: all(w in pm2.printed() for w in words), 240, "source 004's greps")
    logs = pm2.logs()
    assert [w for w in words if w not in logs] == []
    warnings = [line for line in logs.splitlines() if re.search("error|warning", line, re.I)]
    assert any("SLOW STEP" in line for line in warnings)
    assert not any("UPLOAD BLOCKED" in line for line in warnings), "it waits for step 20"

    pm2("restart", "miner")
    until(lambda: pm2.printed().count("GUARD STARTED") == 2, 60, "two starts in the log")
    assert "GUARD STOPPED: exit code 0, SIGINT" in pm2.printed()
    until(
        lambda: pm2.printed().rsplit("GUARD STARTED", 1)[1].count("Outer Step:") > 2,
        120,
        "steps after the restart",
    )

    pm2("stop", "miner")
    assert pm2.app()["status"] == "stopped"
    until(lambda: pm2.left() == [], 15, "nothing left running")
    pm2("delete", "miner")
    assert pm2.app() == {}


@pytest.mark.timeout(200)
def test_a_finished_miner_and_a_bad_setting_are_not_started_again(pm2: Pm2) -> None:
    pm2.env["MINER_GUARD_MINER__FINITE"] = "true"
    names = (
        "MINER_GUARD_ALERTS__URLS",
        "MINER_GUARD_ALERTS__HEARTBEAT_URL",
        "WANDB_PASSWORD",
        "HF_TOKEN",
        "A_WEBHOOK",
    )
    pm2.env.update({name: f"json://planted-{name}" for name in names})
    pm2.env["MINER_GUARD_REPO__CREDENTIALS"] = "env"
    pm2.edit(["run", "--", sys.executable, "-c", "print('work done')"])
    pm2("start", str(pm2.file))
    until(lambda: "GUARD STOPPED" in pm2.printed(), 60, "its end")
    until(lambda: pm2.app()["status"] == "stopped", 60, "stopped after it finished")
    assert (pm2.app()["exit_code"], pm2.app()["restart_time"]) == (63, 0)
    pm2("save", "--force")
    dump = (Path(pm2.env["PM2_HOME"]) / "dump.pm2").read_text()
    assert "planted-" not in dump, "filter_env keeps secrets out of pm2's dump"
    assert "MINER_GUARD_REPO__CREDENTIALS" in dump, (
        "what is a setting and no secret reaches the guard"
    )
    pm2("delete", "miner")
    pm2.env["MINER_GUARD_GATE__MIN_INNER_STEP"] = "minus one"
    pm2("start", str(pm2.file))
    until(lambda: pm2.app()["status"] == "stopped", 60, "stopped for its configuration")
    assert (pm2.app()["exit_code"], pm2.app()["restart_time"]) == (78, 0)
    assert "gate.min_inner_step = 'minus one' is not allowed" in pm2.logs()
    assert pm2.left() == []


MORTAL = """
import pathlib, time, miner_guard
guard = miner_guard.init()
for step in range(1, 81):
    time.sleep(0.1)
    guard.step(outer_step=1, inner_step=step, loss=3.0, lr=1e-4)
secret = pathlib.Path(".env").read_text().split("'")[-2]
raise RuntimeError("CUDA error: an illegal memory access was encountered by " + secret)
"""
PRINTED = "printed-7be2-by-the-miner"
PLANTED = "planted-c9f1"


@pytest.mark.timeout(300)
def test_alert_addresses_of_the_miners_env_file_reach_their_targets_and_nothing_else(
    pm2: Pm2, webhook: Webhook, tmp_path: Path
) -> None:
    """The setup: `init`, two lines of guard.toml, and secrets in .env. One of the two alert targets
    is dead."""
    guard = requires.tool("miner-guard")
    ps: list[str] = []
    webhook.on_post = lambda: ps.append(subprocess.check_output(["ps", "axeww"], text=True))
    (tmp_path / "train.py").write_text(MORTAL)
    subprocess.run(
        [guard, "init", "--name", "miner", "--", sys.executable, "train.py"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        timeout=60,
    )
    settings = (tmp_path / "guard.toml").read_text()
    for line in ('credentials = "dotenv"', 'preset = "overnight"'):
        assert settings.count(f"# {line}\n") == 1
        settings = settings.replace(f"# {line}\n", f"{line}\n")
    (tmp_path / "guard.toml").write_text(settings)
    secrets = {name: f"{PLANTED}-{name}" for name in ("hook", "dead", "beat", "token")}
    (tmp_path / ".env").write_text(
        f"MINER_GUARD_ALERTS__URLS=json://{webhook.address}/{secrets['hook']},json://127.0.0.1:1/{secrets['dead']}\n"
        f"export MINER_GUARD_ALERTS__HEARTBEAT_URL='http://{webhook.address}/{secrets['beat']}'\n"
        f"MINER_GUARD_HTTP__TOKEN={secrets['token']}\nEXCHANGE_PASSPHRASE='{PRINTED}'\n"
    )
    pm2.env |= {
        "MINER_GUARD_HTTP__PORT": "0",
        "MINER_GUARD_HEALTH__SNAPSHOT_EVERY_S": "1",
        "MINER_GUARD_RESTART__MAX_RESTARTS": "1",
        # Longer than alerts are gathered: the first message goes out while the miner is down.
        "MINER_GUARD_RESTART__BACKOFF_S": "5",
    }
    pm2("start", str(pm2.file))
    until(lambda: "GUARD STOPPED" in pm2.printed(), 120, "the guard's end")
    until(lambda: pm2.app()["status"] == "stopped", 60, "pm2's notice of it")
    assert pm2.app()["exit_code"] == 75
    titles = " ".join(body["title"] for body in webhook.bodies)
    assert "miner: " in titles
    assert "RESTARTING: INCIDENT cuda_illegal_memory_access: " in titles, "the cause leads"
    assert "CRASH LOOP" in titles
    assert {path for path, _ in webhook.posted} == {f"/{secrets['hook']}"}
    assert set(webhook.beats) == {f"/{secrets['beat']}"}
    assert "alert not sent: target" in pm2.logs(), "the dead target is named by its kind alone"
    pm2("save", "--force")
    listings = [pm2("describe", "miner"), pm2("jlist"), pm2("prettylist"), pm2("env", "0"), *ps]
    subprocess.run(
        [guard, "report", "--bundle", "-o", "help.tar.gz", "--state-dir", pm2.state],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        timeout=60,
    )
    with tarfile.open(tmp_path / "help.tar.gz") as bundle:
        bundle.extractall(tmp_path / "bundle", filter="data")
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != ".env"]
    assert {"miner.log", "guard.jsonl", "dump.pm2", "pm2.log"} <= {path.name for path in files}
    assert [path for path in files if PLANTED.encode() in path.read_bytes()] == []
    assert [path.name for path in files if PRINTED.encode() in path.read_bytes()] == [
        "miner.log"
    ], "relayed as it is"
    assert "SECRET EXPOSED" in pm2.logs()
    assert [text for text in listings if PLANTED in text] == []
