"""What the stages of a pipeline do in a step, by instructions: planned, simulated, proven and carried out."""
