"""The parallel linear layers, whose products follow a plan."""
