"""Notice that a client left, and cancel its work. See README.md for the drop-in."""
