"""Episodes of an evaluation, the revision test, and scores with intervals."""
