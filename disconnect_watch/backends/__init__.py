"""Where the work runs, and how a cancel reaches it."""

from disconnect_watch.backends.base import Backend, Tensor

__all__ = ["Backend", "Tensor"]
