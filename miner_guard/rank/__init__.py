"""The hook, which runs INSIDE each rank. It uses only the standard library and torch; it never
blocks, raises, synchronises the GPU or uses the network."""
