"""Hooks an unmodified miner."""
