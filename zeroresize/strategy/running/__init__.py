"""How the sequences of a step run under a strategy."""
