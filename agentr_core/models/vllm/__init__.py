"""vLLM servers that are started, watched and asked from here."""
