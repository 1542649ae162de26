"""The process that owns the miner. It starts the guard, which does everything else."""
