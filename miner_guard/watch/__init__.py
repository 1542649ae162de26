"""Watchers: one file a concern of a running miner, with judge, words and level."""
