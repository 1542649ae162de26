"""The miner's process tree: start it, find it, end it, leave no orphans."""
