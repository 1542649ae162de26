"""Commands: one file each, thin."""
