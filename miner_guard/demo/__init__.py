"""A small real miner: FSDP2, a byte-level GPT, inner and outer steps, uploads; and faults on
request."""
