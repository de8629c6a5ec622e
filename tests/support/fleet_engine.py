"""The engine's process of a fleet, held and let go by a test through a Unix socket.

``h`` holds it in the next step, in front of its second layer, which it answers with ``a`` at once
and with ``h`` when it is there; ``o`` lets it go.
"""

import os
import socket
import threading

from disconnect_watch.backends.engine import EngineBackend
from disconnect_watch.server.fleet.engine_process import main
from tests.support.gate import Gate

__all__ = ["PATH"]

#: Of the environment: the socket that a test listens on.
PATH = "FLEET_GATE"


def prepare(backend: EngineBackend) -> None:
    """Put a gate into the engine, and obey the test from now on."""
    gate = Gate(layer=1, after_steps=1 << 60)
    backend.engine.layer_hook = gate.on_layer
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(os.environ[PATH])
    threading.Thread(target=obey, args=(sock, gate), daemon=True).start()


def obey(sock: socket.socket, gate: Gate) -> None:
    """Do as the test says until it is gone."""
    with sock:
        while word := sock.recv(1):
            if word == b"h":
                gate.hold()
                sock.sendall(b"a")
                gate.wait()
                sock.sendall(b"h")
            else:
                gate.open()
        gate.open()


if __name__ == "__main__":
    main(prepare)
