"""Models whose work changes while they are trained: one file for each case."""
