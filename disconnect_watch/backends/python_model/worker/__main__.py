"""One worker process: ``python -m disconnect_watch.backends.python_model.worker FDS``.

It makes one instance of a model and executes batches for it until its server says END or
is gone. It asks nobody for that: the sockets, the memory and the flags come as open fds.
"""

import json
import os
import select
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

from disconnect_watch import _core
from disconnect_watch.backends.python_model.arena import Arena
from disconnect_watch.backends.python_model.messages import Kind
from disconnect_watch.backends.python_model.worker.auto_config import ModelConfig
from disconnect_watch.backends.python_model.worker.calls import Caller, install
from disconnect_watch.backends.python_model.worker.link import Link
from disconnect_watch.backends.python_model.worker.loading import describe, load_class
from disconnect_watch.backends.python_model.worker.logger import Logger
from disconnect_watch.backends.python_model.worker.runner import Runner

#: Seconds that a model has to end after its server is gone; then it is ended.
ORPHAN_GRACE = 5.0


def main() -> None:
    """Serve one instance."""
    # A Ctrl-C is for the server, which ends its workers when it has no use for them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sock, calls = (socket.socket(fileno=int(fd)) for fd in sys.argv[1:3])
    arena_fd, flags_fd = map(int, sys.argv[3:5])
    flags = _core.Flags(flags_fd)
    arena = Arena(is_server=False, memfd=arena_fd)
    for fd in (arena_fd, flags_fd):
        os.close(fd)
    caller = Caller(calls, arena, "")
    link = Link(sock, arena, flags, caller)
    has_ended = threading.Event()
    threading.Thread(
        target=_watch_server, args=(sock.fileno(), link, has_ended), name="orphan", daemon=True
    ).start()
    try:
        _serve(link, caller)
    finally:
        has_ended.set()


def _watch_server(fd: int, link: Link, has_ended: threading.Event) -> None:
    """End this process soon after its server is gone, whatever the model is busy with."""
    poller = select.poll()
    poller.register(fd, 0)  # a hang-up is always told
    poller.poll()
    link.is_server_gone.set()
    if not has_ended.wait(ORPHAN_GRACE):
        os._exit(1)


def _serve(link: Link, caller: Caller) -> None:
    message = link.receive()
    if message is None:
        return
    assert message[0] == Kind.INIT
    setup: dict[str, Any] = message[1]
    Logger.sink = lambda level, text: link.send(Kind.LOG, level, text)
    caller.directory = setup["directory"]
    install(caller)
    try:
        model, config = _make(setup, link)
    except Exception as error:
        link.send(Kind.READY, None, describe(error))
        return
    runner = Runner(
        model,
        link,
        name=setup["name"],
        version=setup["version"],
        instance=setup["instance"],
        is_decoupled=bool(config.get("model_transaction_policy", {}).get("decoupled")),
    )
    link.send(Kind.READY, None, None)
    while (message := link.receive()) is not None and message[0] != Kind.END:
        batches = message.pop()
        del message
        for packed in batches:
            runner.execute(packed)
            packed.clear()
    if hasattr(model, "finalize"):
        try:
            model.finalize()
        except Exception as error:
            print(f"finalize of {setup['instance']} failed: {describe(error)}", file=sys.stderr)


def _make(setup: dict[str, Any], link: Link) -> tuple[Any, dict[str, Any]]:
    """The model, initialized, and the configuration that it was initialized with."""
    kind = load_class(Path(setup["directory"]), setup["filename"])
    config: dict[str, Any] = json.loads(setup["config"])
    if setup["auto_complete"]:
        if hasattr(kind, "auto_complete_config"):
            completed = kind.auto_complete_config(ModelConfig(setup["config"]))
            config = completed.as_dict()
        # The server completes and checks it, and says what it is from now on.
        link.send(Kind.READY, json.dumps(config), None)
        message = link.receive()
        if message is None or message[0] != Kind.INIT:
            raise SystemExit
        config = json.loads(message[1]["config"])
    model = kind()
    if hasattr(model, "initialize"):
        model.initialize(
            {
                "model_config": json.dumps(config),
                "model_instance_kind": setup["kind"],
                "model_instance_name": setup["instance"],
                "model_instance_device_id": setup["device"],
                "model_repository": setup["repository"],
                "model_version": str(setup["version"]),
                "model_name": setup["name"],
            }
        )
    if not hasattr(model, "execute"):
        raise AttributeError(f"model '{setup['name']}' has no method 'execute'")
    return model, config


if __name__ == "__main__":
    main()
