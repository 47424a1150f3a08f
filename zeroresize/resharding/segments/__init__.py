"""Segments of a model are searched, agreed on and checked before their units are divided."""
