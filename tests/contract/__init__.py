"""Compares the names that people grep, script and configure with a committed listing."""
