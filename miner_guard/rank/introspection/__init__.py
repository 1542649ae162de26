"""What a rank can report about itself: stacks, collectives, placement, diagnosis."""
