"""The probe that reads the published repo's state:
`python -m miner_guard.uploads.repos.state_probe`, see `miner_guard.system.probe`."""

from __future__ import annotations

import dataclasses

from miner_guard.config import RepoSettings
from miner_guard.system import probe
from miner_guard.uploads.repos import open_repo
from miner_guard.uploads.repos.base import RepoError
from miner_guard.validators.layout import Layout


def main() -> None:
    """Reply with the fields of `Published`."""
    request = probe.request()
    settings, layout = RepoSettings(**request["repo"]), Layout(**request["layout"])
    try:
        probe.reply(dataclasses.asdict(open_repo(settings).state(layout)))
    except RepoError as error:
        probe.reply(error=str(error))


if __name__ == "__main__":
    main()
