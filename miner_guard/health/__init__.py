"""What is sampled beside the miner (NVML, host, chain), and the snapshot made of it."""
