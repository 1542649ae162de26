"""The rules by which a subnet's validators accept uploads: pure functions in `rules.py`, numbers in
`profiles/*.toml`."""
