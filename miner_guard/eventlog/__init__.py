"""The event catalogue; how a finding becomes a console line and a JSON line, and how it is read
back."""
