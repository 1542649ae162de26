"""One concern beside the miner each; connects a pure room to the running supervisor. Never imports
the supervisor."""
