"""How much each rank prunes and lends: one file a rule."""
