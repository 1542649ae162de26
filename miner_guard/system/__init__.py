"""Facts about this machine and process, and safe access to them: clock, probes, processes, sockets.
Of the guard's other packages it imports only `state_dir`."""
