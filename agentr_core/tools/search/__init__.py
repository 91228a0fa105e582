"""The search tool: corpora and their indexes, a server for them, and clients with a cache."""
