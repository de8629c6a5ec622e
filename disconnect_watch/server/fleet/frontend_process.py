"""A frontend's process: ``python -m disconnect_watch.server.fleet.frontend_process FD FD``."""

import dataclasses

from disconnect_watch.backends.remote_engine.client import RemoteEngine
from disconnect_watch.engine import CheckpointError
from disconnect_watch.server.fleet.peers import FleetPeers, SharedStore
from disconnect_watch.server.fleet.processes import begin, refuse
from disconnect_watch.server.guard import Gatekeeper
from disconnect_watch.server.run import serve

__all__ = ["main"]


def main() -> None:
    """Serve until a signal, or until the supervisor is gone."""
    start, control, links = begin()
    setup, engine = start.setup.frontend, start.setup.engine
    options = setup.options
    try:
        remote = RemoteEngine.from_pretrained(
            engine.path, name=engine.name, chat_template=engine.chat_template
        )
        if setup.trace_config:
            from disconnect_watch.server.spans import tracer_provider

            options = dataclasses.replace(options, tracing=tracer_provider(setup.trace_config))
    except (CheckpointError, ValueError, OSError) as error:
        refuse(control, str(error))
    peers = FleetPeers(remote)
    with start.sockets() as sockets:
        serve(
            remote,
            **sockets,
            options=options,
            open_peers=lambda: peers.opened(control, links),
            gatekeeper=Gatekeeper(
                setup.keys,
                has_admin_port="admin_port" in sockets,
                admin_token=setup.admin_token,
            ),
            store=SharedStore(peers),
            announce=lambda _: peers.tell_ready(),
        )


if __name__ == "__main__":
    main()
