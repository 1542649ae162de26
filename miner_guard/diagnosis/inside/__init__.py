"""Scripts for the miner's own interpreter, which may lack this package: they need only the standard
library and torch."""
