"""An engine in a process of its own, and frontends in theirs, with one flag table.

A frontend hands its requests over by name of their flags, so that a cancel is one store in memory
that the engine reads anyway, in the queue, between two steps and between two layers. What must be
told goes over a Unix socket a frontend: whichever of the two processes ends, the kernel tells the
other at once, and nothing of it lies in a file system.
"""
