"""What a step takes under strategies, and the strategies under which it takes least."""
