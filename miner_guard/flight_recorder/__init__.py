"""The flight record of a rank: one file per rank, which the rank writes without system calls and
any process can read.

Both sides import this room: the rank its writer, the supervisor its reader. Standard library only.
"""
