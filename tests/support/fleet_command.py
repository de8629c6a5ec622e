"""The command, with an engine that a test can hold: see ``fleet_engine``."""

from disconnect_watch.cli import main
from disconnect_watch.server.fleet import supervisor

if __name__ == "__main__":
    supervisor.ENGINE_MODULE = "tests.support.fleet_engine"
    main()
