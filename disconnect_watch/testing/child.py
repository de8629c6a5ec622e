"""A process that holds a client's end of a connection, and can be killed."""

import socket
import subprocess

__all__ = ["hand_to_child"]

#: Seconds after which a forgotten one ends by itself.
_LIFE = "60"


def hand_to_child(sock: socket.socket) -> subprocess.Popen[bytes]:
    """Hand a socket to a new process; ours is closed.

    Returns:
        The process, which the caller kills and waits for.
    """
    fd = sock.fileno()
    child = subprocess.Popen(["sleep", _LIFE], pass_fds=[fd])
    # Popen returned, so exec has happened, and the child holds the one open end.
    sock.close()
    return child
