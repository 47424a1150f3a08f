"""How long a rank is busy, what balancing would cost it, and which columns matter."""
