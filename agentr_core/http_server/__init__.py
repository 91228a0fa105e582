"""The shared parts of our HTTP servers: which requests they answer, and how they listen."""
