"""Questions that every rank must answer alike."""
