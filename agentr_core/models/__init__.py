"""Chat models: in this process, on vLLM, behind any OpenAI-compatible server; and the batcher they
share.
"""
