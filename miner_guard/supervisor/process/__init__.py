"""The miner's process tree: start it, find it, end it, and leave no orphan."""
