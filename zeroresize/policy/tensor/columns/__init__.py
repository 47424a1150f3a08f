"""Which columns of a layer a rank prunes or lends."""
