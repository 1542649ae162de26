"""Snapshots: keep this rank's share of the state in memory for the next launch."""
