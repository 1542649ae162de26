"""Recorded runs: what reached the guard's watchers, and the facts that followed from it.

`record.py` makes a recording, `replay.py` feeds it to the watchers of the code at hand, and
`test_replay.py` compares the facts. After an intended change, `python -m tests.replay.replay`
writes the new facts; explain each difference in the commit.
"""
