"""The gate, the repos it watches, the publisher and the ledger."""
