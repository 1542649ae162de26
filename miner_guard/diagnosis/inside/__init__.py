"""Scripts for the miner's own interpreter, which may lack this package: they need the standard
library and torch alone."""
