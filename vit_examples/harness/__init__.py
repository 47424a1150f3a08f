"""What the example programs share around their training; ``lm_examples`` uses it as well as ``vit_examples``."""
