"""The command line: ``disconnect-watch serve``, ``gateway``, ``key``, ``stress`` and ``doctor``.

Exit codes: 0 after an orderly end, 1 if a stressed server failed a check or the doctor found
a problem, 2 for whatever prevents the command, 130 for a Ctrl-C before it served or in
mid-stress.
"""

from disconnect_watch.cli import doctor, gateway, key, serve, stress  # each adds its command
from disconnect_watch.cli._app import app

__all__ = ["app", "doctor", "gateway", "key", "main", "serve", "stress"]


def main() -> None:
    """Entry point of the ``disconnect-watch`` script."""
    try:
        app(prog_name="disconnect-watch")
    except KeyboardInterrupt:
        raise SystemExit(130) from None
