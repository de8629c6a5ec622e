"""A peer that is gone without a word. Linux; needs no privilege."""

import ctypes
import socket

__all__ = ["vanish"]

_SO_ATTACH_FILTER = 26


class _Instruction(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_uint16),
        ("jt", ctypes.c_uint8),
        ("jf", ctypes.c_uint8),
        ("k", ctypes.c_uint32),
    )


class _Program(ctypes.Structure):
    _fields_ = (("len", ctypes.c_uint16), ("filter", ctypes.POINTER(_Instruction)))


def vanish(sock: socket.socket) -> None:
    """From now on a TCP socket neither hears nor answers, as if its host had lost its cable.

    A socket filter drops each segment before TCP sees it: ``BPF_RET | BPF_K``, 0 bytes. What
    the socket itself sends still goes out, the FIN of a close too: leave it open.

    Source: socket(7), SO_ATTACH_FILTER.
    """
    drop = _Instruction(0x06, 0, 0, 0)
    program = _Program(1, ctypes.pointer(drop))
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, bytes(program))
