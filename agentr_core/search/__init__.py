"""Monte Carlo tree search as functions over plain data."""
