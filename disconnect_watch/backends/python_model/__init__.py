"""Models written in Python for Triton, each instance in a process of its own."""
