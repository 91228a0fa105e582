"""vLLM servers: starting, watching and querying them."""
