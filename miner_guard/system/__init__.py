"""Clocks, probes, processes, sockets and other access to the operating system. The only other guard
module that this package imports is `state_dir`."""
