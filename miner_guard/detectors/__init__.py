"""Pure, streaming detectors: they take records and return findings, without I/O or a clock, in O(1)
memory."""
