"""The process that supervises the miner: child process, relay, watchdog, restarts, scheduler.
Imports no torch."""
