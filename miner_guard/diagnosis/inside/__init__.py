"""Runs in the miner's own interpreter, which may lack this package: scripts of the standard library
and torch alone."""
