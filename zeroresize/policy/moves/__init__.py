"""When a change pays: the same rule for units, layers, strategies and fewer ranks."""
