"""Judges curves after the run: all values are available, so each step is compared with those before
and after it."""
