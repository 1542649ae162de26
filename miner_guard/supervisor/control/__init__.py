"""Interfaces to the running guard for people and service managers."""
