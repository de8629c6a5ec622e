"""What ``pip install disconnect-watch`` adds to a plain ``vllm serve``, if it is asked for.

    DISCONNECT_WATCH_VLLM=1 vllm serve MODEL

vLLM loads this in each of its processes, by the entry point ``vllm.general_plugins``. Where the
variable is not set, or says no, it does nothing and imports nothing. Else the API server watches
its clients by our uvicorn protocol, and names the flag of each request to the engine, which looks
at it: see ``adapters.vllm`` and ``backends.hooks.vllm``.
"""

import os
import signal
import sys
import threading

from disconnect_watch.vllm_variable import ENGINE, VARIABLE

__all__ = ["register"]

_NO = {"", "0", "false", "no", "off"}
#: vLLM looks into a model's class in a process of its own, which serves nobody.
_INSPECTION = "vllm.model_executor.models.registry"


def register() -> None:
    """Do so, once a process. What cannot be understood ends vLLM before it serves.

    Raises:
        ValueError: the variable's value is neither a yes nor a no nor options.
    """
    value = os.environ.get(VARIABLE, "")
    if value.lower() in _NO or _runs(_INSPECTION):
        return
    from disconnect_watch.backends.hooks import vllm as engine

    if value.lower() == ENGINE:
        _end_with_parent()
    else:
        from disconnect_watch.adapters import vllm as frontend

        frontend.install(value)
    engine.install()


def _end_with_parent() -> None:
    """Have this process end when the one that spawned it is gone, however that went.

    vLLM's engine serves its server's next requests, and never hears that there will be none.
    """
    import multiprocessing  # a vLLM has it loaded

    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def wait() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="disconnect-watch-parent", daemon=True).start()


def _runs(module: str) -> bool:
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec is not None and spec.name == module
