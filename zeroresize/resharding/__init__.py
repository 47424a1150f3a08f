"""Units change hands: what must travel, and how it does so with optimizer state, all or nothing."""
