"""Interfaces to the running guard for operators and service managers."""
