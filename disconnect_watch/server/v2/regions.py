"""Triton's shared memory extensions. Of a GPU's memory there is none to share here."""

from disconnect_watch.server.documents import decode_object
from disconnect_watch.server.errors import ProtocolError, UnsupportedError
from disconnect_watch.server.v2.call import Answer, Call, json_answer
from disconnect_watch.server.v2.fields import as_string, as_unsigned

__all__ = ["cuda_register", "cuda_status", "register", "status", "unregister"]


async def status(call: Call) -> Answer:
    """The registered regions, or one of them."""
    regions = call.frontend.memory.status(call.path["region"])
    return json_answer(
        [
            {
                "name": region.name,
                "key": region.key,
                "offset": region.offset,
                "byte_size": region.size_bytes,
            }
            for region in regions
        ]
    )


async def register(call: Call) -> Answer:
    """Name a region of the client's."""
    memory = call.frontend.memory
    memory.require_allowed()
    name = call.path["region"]
    if name is None:
        raise ProtocolError("'region name' is necessary to register shared memory region")
    document = decode_object(bytes(await call.body()))
    for field in ("key", "byte_size"):
        if field not in document:
            raise ProtocolError(f"Shared memory register request has no '{field}' field")
    memory.register(
        name,
        as_string("key", document["key"]),
        as_unsigned("offset", document.get("offset", 0)),
        as_unsigned("byte_size", document["byte_size"]),
    )
    return Answer()


async def unregister(call: Call) -> Answer:
    """Forget a region, or all of them, once no request uses it."""
    call.frontend.memory.unregister(call.path["region"])
    return Answer()


async def cuda_status(call: Call) -> Answer:
    """None is ever registered."""
    call.frontend.memory.require_allowed()
    return json_answer([])


async def cuda_register(call: Call) -> Answer:
    """Refused, and so is to unregister."""
    raise UnsupportedError(
        "CUDA shared memory is not supported by this server: register system shared memory"
    )
