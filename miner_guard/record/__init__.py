"""The record of a run: its vocabulary, the one file that holds it, the log, and what keeps secrets
out of both."""
