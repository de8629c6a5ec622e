"""Several frontends before one engine: a supervisor, and a process for each of them.

The supervisor makes the flag table and listens; every frontend inherits both, so that a cancel in
any of them is a store in the memory that the engine reads, and a connection that waits when a
frontend is killed is taken by another. It does no request's work: it starts what has ended again,
takes flags back, and passes on what frontends ask each other, which is what a client may ask any
of them about.
"""
