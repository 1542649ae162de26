"""The flight record: one file per rank, written by the rank without system calls and readable by
any process.

The rank imports the writer from here, the supervisor the reader. Standard library only.
"""
