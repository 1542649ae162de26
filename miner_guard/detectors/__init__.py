"""Pure, streaming judgements: they take records and return findings, with no I/O, no clock and O(1)
memory."""
