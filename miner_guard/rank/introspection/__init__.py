"""Lets a rank report about itself: stacks, collectives, model placement, diagnosis."""
