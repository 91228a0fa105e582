"""Transformers models on this machine: loading, decoding, and caches of keys and values."""
