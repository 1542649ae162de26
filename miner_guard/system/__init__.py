"""Facts about this machine and process, and safe access to them: clock, probes, processes, sockets.
Imports no other room."""
