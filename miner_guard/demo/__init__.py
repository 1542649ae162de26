"""A small but real miner: FSDP2, a byte-level GPT, inner and outer steps, uploads, and fault
injection."""
