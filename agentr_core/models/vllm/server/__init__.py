"""What vLLM's server imports: only the standard library, since its environment has no agentr."""
