"""Samples taken alongside the miner (NVML, host, chain), and the snapshot built from them."""
