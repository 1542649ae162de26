"""The gate, the repos that it watches, their audit, and the chain."""
