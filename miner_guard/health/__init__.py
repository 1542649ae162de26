"""Samplers: NVML, host, chain; and the snapshot made of them."""
