"""Explains the errors in a log: patterns, causes and fixes as data, and root-cause order."""
