"""Where the work runs, and how a cancel reaches it."""

from disconnect_watch.backends.base import Backend, OutputStream, Tensor, Viewable

__all__ = ["Backend", "OutputStream", "Tensor", "Viewable"]
