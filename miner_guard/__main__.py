"""`python -m miner_guard` is `miner-guard`."""

from miner_guard.cli.main import main

main()
