"""What goes over a connection between two nodes: frames with a length and a checksum.

A frame is a head of 12 bytes in network order (what it is, three bytes of 0, the length of what
follows, the checksum), and what follows. The checksum is CRC-32 over head and all, itself left
out. TCP's own is 16 bits, and blocks of a model that arrive changed are seen by nobody.
"""

import json
import struct
import zlib
from enum import IntEnum
from typing import Any, NamedTuple

from disconnect_watch.disagg.channel import Channel
from disconnect_watch.disagg.errors import PeerLostError

__all__ = ["CHUNK_BYTES", "Frame", "FrameKind", "expect", "receive", "send", "send_data"]

#: Of a block, in one frame.
CHUNK_BYTES = 1 << 18
#: Nobody has more to say; so much is received at the word of a stranger.
MAX_BYTES = 1 << 20

_HEAD = struct.Struct("!B3xI")
_SUM = struct.Struct("!I")
#: Of which block, from 0 in the order of the tokens, and from which byte of it.
_PLACE = struct.Struct("!II")


class FrameKind(IntEnum):
    """What a frame is; in brackets who sends it: the prefill (P) or the decode node (D)."""

    HELLO = 1  #: (both) versions, and who one is
    REFUSED = 2  #: (P) why not
    RELEASE = 3  #: (D) a transfer or request
    RELEASED = 4  #: (P) what that has done
    EXTEND = 5  #: (D) a lease
    EXTENDED = 6  #: (P) whether it is there
    PULL = 7  #: (D) a transfer, and how many frames may come at once
    ACCEPTED = 8  #: (P) the pull has begun
    DATA = 9  #: (P) a piece of a block; over TCP
    CREDIT = 10  #: (D) so many more frames may come; also a sign of life
    CANCELLED = 11  #: (P) the transfer was released: stop
    DONE = 12  #: (D) all of it is here, or it has stopped
    FINISHED = 13  #: (P) whether it is good


class Frame(NamedTuple):
    """One frame; ``body`` is what JSON it holds, ``data`` the bytes behind the place of a DATA."""

    kind: FrameKind
    body: dict[str, Any]
    place: tuple[int, int] = (0, 0)
    data: memoryview = memoryview(b"")


def send(channel: Channel, kind: FrameKind, /, **body: Any) -> None:
    """Send a frame of anything but DATA."""
    _send(channel, kind, json.dumps(body).encode())


def send_data(channel: Channel, index: int, offset: int, data: memoryview) -> None:
    """Send a piece of a block: of which, and from which byte of it."""
    _send(channel, FrameKind.DATA, _PLACE.pack(index, offset), data)


def _send(channel: Channel, kind: FrameKind, *parts: "bytes | memoryview") -> None:
    head = _HEAD.pack(kind, sum(len(part) for part in parts))
    checksum = zlib.crc32(head)
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    channel.send(head + _SUM.pack(checksum), *parts)


def receive(channel: Channel) -> Frame:
    """Receive the next frame.

    Raises:
        PeerLostError: what comes is none, or another than was sent.
    """
    head = channel.recv(_HEAD.size + _SUM.size)
    number, num_bytes = _HEAD.unpack_from(head)
    (checksum,) = _SUM.unpack_from(head, _HEAD.size)
    if num_bytes > MAX_BYTES or number not in FrameKind._value2member_map_:
        raise PeerLostError(f"receive: frame {number} of {num_bytes} bytes: not our protocol")
    payload = channel.recv(num_bytes)
    if zlib.crc32(payload, zlib.crc32(head[: _HEAD.size])) != checksum:
        raise PeerLostError(f"receive: frame {number} of {num_bytes} bytes: wrong checksum")
    kind = FrameKind(number)
    if kind is FrameKind.DATA and num_bytes >= _PLACE.size:
        return Frame(kind, {}, _PLACE.unpack_from(payload), memoryview(payload)[_PLACE.size :])
    try:
        body = json.loads(payload)
    except ValueError as error:
        raise PeerLostError(f"receive: frame {number}: no JSON") from error
    if not isinstance(body, dict):
        raise PeerLostError(f"receive: frame {number}: no JSON object")
    return Frame(kind, body)


def expect(channel: Channel, *kinds: FrameKind) -> Frame:
    """Receive the next frame, which must be one of those.

    Raises:
        PeerLostError: it is another.
    """
    frame = receive(channel)
    if frame.kind not in kinds:
        raise PeerLostError(f"receive: {frame.kind.name} where {kinds[0].name} was due")
    return frame
