"""What was decided, as data: for the group, for a rank, for a layer."""
