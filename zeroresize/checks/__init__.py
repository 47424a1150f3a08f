"""Whether parallel training computes what the undivided model computes."""
