"""What a subnet's validators accept: one pure rule per file, numbers in `profiles/*.toml`."""
