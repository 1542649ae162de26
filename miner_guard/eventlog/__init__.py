"""The event catalogue, the code that writes findings as console lines and JSON lines, and the code
that reads them back."""
