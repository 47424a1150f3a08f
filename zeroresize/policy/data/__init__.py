"""How global batches are divided over ranks, and when that pays."""
