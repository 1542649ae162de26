"""The event catalogue, and how a finding becomes a console line and a JSON line, and is read
back."""
