"""Facts about this machine and process, and safe access to them: clock, probes, processes, sockets.
Of the guard's other modules, this package imports only `state_dir`."""
