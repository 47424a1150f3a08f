"""Units change hands inside a tensor-parallel group: what travels, and the move itself."""
