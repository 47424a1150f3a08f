"""What strategies cost, and the search for the best ones."""
