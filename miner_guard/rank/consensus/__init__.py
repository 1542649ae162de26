"""Questions that every rank must answer identically."""
