"""The HTTP frontend. Needs the ``server`` extra."""

from disconnect_watch.ports import bind
from disconnect_watch.server.app import create_app, create_metrics_app
from disconnect_watch.server.frontend import Frontend
from disconnect_watch.server.metrics import Metrics
from disconnect_watch.server.options import FrontendOptions
from disconnect_watch.server.run import ServeOptions, serve

__all__ = [
    "Frontend",
    "FrontendOptions",
    "Metrics",
    "ServeOptions",
    "bind",
    "create_app",
    "create_metrics_app",
    "serve",
]
