"""Models and data for training by micro-batches of samples of different lengths (DynaPipe)."""
