"""Chat models: in this process, on vLLM, or behind any OpenAI-compatible server; and the batcher
that they share.
"""
