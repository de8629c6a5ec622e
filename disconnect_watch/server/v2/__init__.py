"""KServe v2 over HTTP, with Triton's extensions: everything below ``/v2``.

A request goes from bytes to arrays and back through plain functions: ``parse`` makes an
``InferRequest`` of a body, ``render`` a body of an ``InferResponse``; a tensor that comes
or goes in binary is a view of the body or of the model's memory all along.
"""
