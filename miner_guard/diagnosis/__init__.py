"""Startup diagnosis: of one GPU, of the node, and across ranks."""
