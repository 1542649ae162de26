"""The flight record of a rank: one file per rank, written in the rank without a system call, read
by anybody.

Both sides import this room: the rank its writer, the supervisor its reader. Standard library only.
"""
