"""Our protocol for uvicorn with an open receive window, by an import string."""

from disconnect_watch.adapters.uvicorn import http_tools

HttpTools = http_tools(unblind=1 << 20)
