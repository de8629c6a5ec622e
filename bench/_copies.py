"""How often the bytes of a tensor are copied on its way, in the server and in its workers.

``c/copies.c`` counts what ``memcpy`` and ``memmove`` do with a page or more. The kernel's own
copies, from the socket and to it, are not among them.
"""

import socket
import struct
import tempfile
from pathlib import Path

from bench._build import build_library
from bench._frontend_asked import LARGE_BYTES, large_request, read_reply
from bench._requests import Server

__all__ = ["count_copies"]

COUNT = struct.Struct("=Q")


def count_copies(repository: Path, models: dict[str, str], num_requests: int) -> dict[str, float]:
    """Copies of each byte of a 16 MiB tensor there and back, by what was asked.

    Args:
        models: the model of each.
    """
    copies = {}
    with tempfile.NamedTemporaryFile() as file:
        file.write(bytes(COUNT.size))
        file.flush()
        under = (
            "env",
            f"LD_PRELOAD={build_library('copies')}",
            f"COPIES_FILE={file.name}",
        )
        with Server(
            module="bench._frontend_server", under=under, options=("--repository", str(repository))
        ) as server:
            for name, model in models.items():
                request = large_request(model)
                with socket.create_connection(("127.0.0.1", server.ports["frontend"])) as client:
                    for round_ in range(num_requests + 1):
                        if round_ == 1:  # what is done once is done
                            before = _read(file.name)
                        client.sendall(request)
                        read_reply(client)
                copies[name] = (_read(file.name) - before) / num_requests / LARGE_BYTES
    return copies


def _read(path: str) -> int:
    (count,) = COUNT.unpack(Path(path).read_bytes())
    assert isinstance(count, int)
    return count
