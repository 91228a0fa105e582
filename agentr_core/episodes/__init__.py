"""Playing: one conversation, one episode, the way back to a state, and many episodes at once."""
