"""What happens before a launch: lock, state directory, preflight."""
