"""Regenerates docs/screens.md and its pictures from a real run of the demo: `make screens`, about
four minutes."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from miner_guard.record.store import RunReader
from miner_guard.state_dir import StateDir
from tests.support import requires
from tests.support.http_port import Port
from tests.support.waiting import until

DOCS = requires.REPO / "docs"
FAULTS = ("--steps", "240", "--fault", "slow@40", "--fault", "crash@60")

PAGE = """\
# What it looks like

A single run of the demo on two CPU cores produced all of this, with an injected slow step and an injected crash
(`miner-guard demo {faults}`, minimum inner step 20). `make screens` regenerates this page.

## `miner-guard top`

```
{top}
```

It fits any terminal and needs no colour (`NO_COLOR` and dumb terminals get none). Keys: `q` quits, `p` pauses, `n` shows the next
ranks. `miner-guard status` prints the same once, with the last warnings.

## The page

`miner-guard report -o page.html`: one file that needs nothing else. The same page is live at `/` of the HTTP port. State, figures,
loss, step time and ranks stand on the first screen; below are more curves, incidents, uploads, GPUs, costs and the runbook.

![The page](images/report.png)

On a phone, in dark mode:

![The page on a phone](images/report-phone.png)

Where `[http] token` is set, the live page asks for it once per tab:

![The live page asks for its token](images/live-token.png)
"""


def _ask(state: StateDir, *words: str) -> str:
    """A command's output; its exit code is ignored, because `costs` exits with 1 when over
    budget."""
    command = [Path(sys.executable).with_name("miner-guard"), *words, "--state-dir", state.root]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONUTF8": "1"}
    )
    return "\n".join(line.rstrip() for line in (done.stdout + done.stderr).strip().splitlines())


def _recovered(state: StateDir) -> bool:
    """Whether the miner is training again after the crash."""
    events = frozenset({"miner_restarting", "verdict_changed"})
    found = RunReader(state.db).events(events, limit=50, newest=True)
    crashed = any(hit.name == "miner_restarting" for hit in found)
    return crashed and found[-1].record().get("life") == "training"


def _pictures(page: Path, state: StateDir) -> None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=requires.tool("chromium"), args=["--no-sandbox"]
        )
        for name, width, height, scheme in (
            ("report", 1280, 800, "light"),
            ("report-phone", 390, 1500, "dark"),
        ):
            context = browser.new_context(
                viewport={"width": width, "height": height}, color_scheme=scheme
            )  # type: ignore[arg-type]
            shown = context.new_page()
            shown.goto(page.as_uri())
            shown.screenshot(path=DOCS / "images" / f"{name}.png")
        port = Port(state.root, "the token of the picture")
        shown = browser.new_page(viewport={"width": 700, "height": 120})
        shown.goto(port.url)
        shown.locator("form").wait_for()
        shown.screenshot(path=DOCS / "images" / "live-token.png")
        port.close()
        browser.close()


def main() -> None:
    """Run the demo, record it while it runs and afterwards, and write the page."""
    with tempfile.TemporaryDirectory() as folder:
        state = StateDir(Path(folder) / "state")
        command = [
            Path(sys.executable).with_name("miner-guard"),
            "demo",
            *FAULTS,
            "--state-dir",
            state.root,
        ]
        settings = {"MINER_GUARD_GATE__MIN_INNER_STEP": "20"}
        demo = subprocess.Popen(
            command, cwd=folder, env={**os.environ, **settings}, stdout=subprocess.DEVNULL
        )
        try:
            until(lambda: _recovered(state), 600, "training again")
            top = _ask(state, "top", "--once")
            if demo.wait(timeout=600):
                raise SystemExit(f"the demo ended with {demo.returncode}")
        finally:
            demo.terminate()
        text = PAGE.format(faults=" ".join(FAULTS), top=top)
        for place, shown in (
            (folder, ""),
            (sys.prefix, "/venv"),
            (str(requires.REPO), "/miner-guard"),
        ):
            text = text.replace(place, f"/home/me{shown}")
        (DOCS / "screens.md").write_text(text, encoding="utf-8")
        _ask(state, "report", "-o", str(Path(folder) / "page.html"))
        _pictures(Path(folder) / "page.html", state)


if __name__ == "__main__":
    main()
