"""Writes the guard's files in its state directory, through a separate process."""
