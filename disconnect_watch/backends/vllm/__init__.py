"""vLLM's ``AsyncLLM`` as a backend: our endpoints and our aborts before its engine."""

import os

# Its loggers are then as all others of this process: their lines are those of the frontend's log,
# which keeps no account of where in the source they come from, as vLLM's own format needs.
os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")

from disconnect_watch.vllm_variable import ENGINE, VARIABLE

# Before vLLM loads its plugins, which a process that it forks has of this one.
os.environ.setdefault(VARIABLE, ENGINE)

from disconnect_watch.backends.vllm.backend import VllmBackend
from disconnect_watch.backends.vllm.params import engine_args

__all__ = ["VllmBackend", "engine_args"]
