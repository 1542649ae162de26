"""Other people's trainers under `--attach auto`: the table of docs/trainers.md."""
