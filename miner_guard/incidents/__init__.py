"""What a log says went wrong: patterns, causes and fixes as data, and root-cause order."""
