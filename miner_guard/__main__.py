"""Makes `python -m miner_guard` the same as `miner-guard`."""

from miner_guard.cli.main import main

main()
