"""Checks before a launch and across ranks, and the samplers of GPUs and host."""
