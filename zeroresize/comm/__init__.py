"""What ranks tell each other: training's collectives, and the numbers that decisions follow from."""
