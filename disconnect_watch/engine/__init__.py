"""The embedded engine: continuous batching over a paged cache, and requests that can be cancelled.

Needs the ``engine`` extra (torch, safetensors, tokenizers).
"""
