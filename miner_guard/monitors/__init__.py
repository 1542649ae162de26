"""Monitors: each covers one concern and connects a pure package to the running supervisor. Never
imports the supervisor."""
