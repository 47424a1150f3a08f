"""What the example programs share around their training: configurations, checkpoints, the output folder, the ranks."""
