"""The event catalogue, the code that writes events as console lines and JSON lines, and the code
that reads them back."""
