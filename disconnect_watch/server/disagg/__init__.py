"""Prefill and decode on different nodes: what the frontend of a node adds, and the proxy before it.

A request goes to a prefill node as its client wrote it, with one more header, and to a decode node
with what the first one answered in another. So each endpoint that generates can be parted, and is
answered in its own form by the decode node; the proxy understands none of them.
"""
