"""Steps before the first launch: lock, state directory, preflight."""
