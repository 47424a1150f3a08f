"""Who is slow, since when, by how much, why, and what it costs: from plain numbers, alike on all ranks."""
