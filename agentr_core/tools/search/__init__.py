"""The search tool: retrieval from a corpus, a server for it, and clients with a cache."""
