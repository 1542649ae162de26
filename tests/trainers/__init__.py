"""Runs other people's trainers under `--attach auto`, for the table in docs/trainers.md."""
