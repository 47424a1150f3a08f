"""Training under strategies that are switched by the lengths of sequences."""
