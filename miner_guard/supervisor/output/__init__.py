"""The miner's output: read from its pipes and passed on unchanged."""
