"""Runs INSIDE each rank: standard library and torch only; never blocks, raises, syncs the GPU or
uses the network."""
