"""What a server and a worker process say to each other.

Messages are msgpack arrays, one a packet of a SEQPACKET socket, the first element its
kind. Small tensors lie in the message, large ones in the arena. Both sides also tell of
the other's blocks that they are done with, in the last element of every message.

    server → worker                      worker → server
    INIT      what to run                READY     the configuration, or an error
    EXECUTE   batches of requests        DONE      an answer a request, and times
    END       finalize and exit          RESPONSE  one answer of a sender
                                         LOG       level, text

On a second socket, CALL asks for another model's work and REPLY gives its responses.
"""

from enum import IntEnum
from typing import Any

import msgspec

from disconnect_watch.backends.infer import Code, InferError, InferTensor
from disconnect_watch.backends.python_model.arena import Arena

__all__ = [
    "CODES",
    "MAX_PACKET_BYTES",
    "Kind",
    "decode",
    "encode",
    "pack_error",
    "pack_tensor",
    "packed_alone",
    "unpack_error",
    "unpack_tensor",
]

#: Of one tensor in a message. Two copies through the kernel cost less than a block of the
#: arena up to about here (bench/worker.py).
MAX_INLINE_BYTES = 16384
#: Longer messages go through the arena, too; below what a socket buffer holds by default.
MAX_PACKET_BYTES = 98304

#: In the order of Triton's error codes.
CODES = tuple(Code)


class Kind(IntEnum):
    """What a message is."""

    INIT = 0
    EXECUTE = 1
    END = 2
    READY = 3
    DONE = 4
    RESPONSE = 5
    LOG = 6
    CALL = 7
    REPLY = 8
    #: The message itself is in the arena: offset, size.
    ELSEWHERE = 9


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder()


def encode(arena: Arena, kind: Kind, *body: Any) -> bytes:
    """One packet.

    Raises:
        OverflowError: an integer has more than 64 bits.
        MemoryError: the arena has no room for it.
    """
    packet = _encoder.encode((kind, *body, arena.drain_returned()))
    if len(packet) > MAX_PACKET_BYTES:
        where: tuple[Any, ...] = (Kind.ELSEWHERE, arena.put(packet), len(packet), [])
        return _encoder.encode(where)
    return packet


def decode(arena: Arena, packet: Any) -> list[Any]:
    """Kind and body of a packet; what it says of our own blocks is done."""
    message: list[Any] = _decoder.decode(packet)
    if message[0] == Kind.ELSEWHERE:
        message = _decoder.decode(arena.borrow(message[1], message[2]).data)
    returned = message.pop()
    if returned:
        arena.take_back(returned)
    return message


def packed_alone(part: Any) -> Any:
    """A part of a message that is packed now, so that what is wrong with it is known now.

    Raises:
        OverflowError: see ``encode``.
    """
    return msgspec.Raw(_encoder.encode(part))


def pack_tensor(tensor: InferTensor, arena: Arena) -> tuple[Any, ...]:
    """A tensor as a part of a message.

    Raises:
        MemoryError: the arena has no room for it.
    """
    data = tensor.data
    size = len(data)
    if size <= MAX_INLINE_BYTES:
        return tensor.name, tensor.datatype, tensor.shape, data, 0, 0, 0
    found = arena.find(data)
    if found is None:
        offset = block = arena.put(data)
    else:
        block, offset = found
    return tensor.name, tensor.datatype, tensor.shape, None, offset, size, block


def unpack_tensor(packed: list[Any], arena: Arena) -> InferTensor:
    """The tensor of a message; one in the arena stays there for as long as it is used."""
    name, datatype, shape, data, offset, size, block = packed
    if data is None:
        data = arena.borrow(offset, size, block=block).data
    return InferTensor(name, datatype, tuple(shape), data)


def pack_error(error: InferError) -> tuple[int, str]:
    """An error as a part of a message."""
    return CODES.index(error.code), error.message


def unpack_error(packed: list[Any]) -> InferError:
    """The error of a message."""
    return InferError(CODES[packed[0]], packed[1])
