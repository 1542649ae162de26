"""The rules by which a subnet's validators accept uploads: one pure rule per file, numbers in
`profiles/*.toml`."""
