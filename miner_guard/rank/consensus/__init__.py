"""Gives all ranks the same answer to a question."""
