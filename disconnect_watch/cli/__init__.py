"""The command line: ``serve``, ``gateway``, ``pd-proxy``, ``key``, ``stress`` and ``doctor``.

Exit codes: 0 after an orderly end, 1 if a stressed server failed a check or the doctor found
a problem, 2 for whatever prevents the command, 130 for a Ctrl-C before it served or in
mid-stress.
"""

from disconnect_watch.cli import (  # each adds its command
    doctor,
    gateway,
    key,
    pd_proxy,
    serve,
    stress,
)
from disconnect_watch.cli._app import app

__all__ = ["app", "doctor", "gateway", "key", "main", "pd_proxy", "serve", "stress"]


def main() -> None:
    """Entry point of the ``disconnect-watch`` script."""
    try:
        app(prog_name="disconnect-watch")
    except KeyboardInterrupt:
        raise SystemExit(130) from None
