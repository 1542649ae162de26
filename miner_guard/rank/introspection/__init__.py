"""What a rank can tell about itself: stacks, collectives, placement, diagnosis."""
