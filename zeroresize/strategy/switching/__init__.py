"""What a switch of strategies sends, and how it is carried out."""
