"""Splitpool: one LLM, two kinds of work, two vLLM pools, one address."""
