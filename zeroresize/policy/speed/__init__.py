"""How fast a part of a rank's step is, from what it took: one meter for units, strategies and who is watched."""
