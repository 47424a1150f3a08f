"""Which samples make which micro-batch, and in which order pipelines run them (DynaPipe); pure numbers."""
