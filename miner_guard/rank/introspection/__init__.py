"""Lets a rank report about itself: stacks, collectives, placement of the model, diagnosis."""
