"""Reads the miner's output from its pipes and passes it on unchanged."""
