"""A small GPT whose work changes while it is trained in a pipeline, on Python's own source files."""
