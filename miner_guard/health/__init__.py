"""Samplers (NVML, host, chain), the snapshot made of them, and who reads it: report, bundle, metrics, alerts."""
