"""When a change pays: the same rule for units, layers and strategies."""
