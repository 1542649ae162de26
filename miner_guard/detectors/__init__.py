"""Pure, streaming judgements: records in, findings out; no I/O, no clock, O(1) memory."""
