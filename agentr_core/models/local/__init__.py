"""Transformers models in this process: loading, decoding, caches of keys and values."""
