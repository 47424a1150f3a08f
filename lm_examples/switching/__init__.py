"""Training under strategies that are switched by the lengths of sequences; see ``lm_examples/train_strategies.py``."""
