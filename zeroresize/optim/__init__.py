"""What balancing needs of optimizers."""
