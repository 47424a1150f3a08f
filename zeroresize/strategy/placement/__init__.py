"""What each rank holds of the model under a strategy, and with which ranks it works."""
