"""The flight record: one file per rank, which the rank writes without system calls and any process
can read.

The rank imports the writer from here, the supervisor the reader. Standard library only.
"""
