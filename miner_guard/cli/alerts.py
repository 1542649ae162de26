"""`miner-guard alerts test`: sends a test message to every target."""

from __future__ import annotations

from typing import Annotated

import typer

from miner_guard.cli.echo import echo
from miner_guard.cli.options import DEFAULT_NAME, Config, Name, State, open_context
from miner_guard.cli.working import Working
from miner_guard.exits import FAILED, USAGE, Refused
from miner_guard.record.redaction import Redactor
from miner_guard.record.words import counted


def command(
    what: Annotated[
        str, typer.Argument(metavar="test", help="Send a test message to every target.")
    ],
    config: Config = None,
    name: Name = DEFAULT_NAME,
    state_dir: State = None,
) -> None:
    """Send a test message. Exit 1: a target did not accept it."""
    from miner_guard.reporting.alert_monitor import send_test
    from miner_guard.uploads.repos import credentials

    if what != "test":
        raise Refused(f"alerts takes `test`, not {what!r}", USAGE)
    known = open_context(config, name, state_dir).settings.config
    settings = known.alerts
    if not settings.urls:
        unread = credentials.problem(known.repo)
        why = f"no targets, and {unread}" if unread else "no targets"
        raise Refused(
            f"{why}; set MINER_GUARD_ALERTS__URLS to a comma-separated list of Apprise URLs", USAGE
        )
    with Working(f"sending to {counted(len(settings.urls), 'target')}"):
        answer = send_test(settings)
    if not answer.known:
        words = Redactor(settings.urls).text(answer.reason or "")
        raise Refused(f"the test message did not reach every target: {words}", FAILED)
    echo(f"sent to {counted(answer.value, 'target')} in {answer.seconds:.1f} s")
