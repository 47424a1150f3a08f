"""Which strategies a job changes to while ranks are slow."""
