"""The page that shows what runs now, and what comes of those who leave."""

from disconnect_watch.server.live.hub import LiveHub

__all__ = ["LiveHub"]
