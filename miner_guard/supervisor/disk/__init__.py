"""What the guard writes into its state directory, through a process of its own."""
