"""Tools that an agent may call while it reasons: a Python interpreter and a search engine."""
