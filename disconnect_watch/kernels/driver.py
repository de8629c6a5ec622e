"""The CUDA driver by way of cuda-bindings, loaded when it is first asked for.

Nothing here is compiled against CUDA, and nothing is imported on a machine without it.
"""

from functools import cache
from typing import Any

from disconnect_watch.errors import DisconnectWatchError

__all__ = ["DriverError", "UnavailableError", "check", "load_driver"]


class UnavailableError(DisconnectWatchError):
    """The machine lacks what this way needs; the message names it."""


class DriverError(DisconnectWatchError):
    """A call into the CUDA driver failed."""


@cache
def load_driver() -> Any:
    """Return the module ``cuda.bindings.driver``, with the driver initialised.

    Raises:
        UnavailableError: the bindings or the driver are not there.
    """
    try:
        from cuda.bindings import driver
    except ImportError:
        raise UnavailableError(
            "cuda-bindings is not installed: pip install 'disconnect-watch[gpu]'"
        ) from None
    try:
        (status,) = driver.cuInit(0)
    except Exception as error:  # its own classes differ between versions
        raise UnavailableError(f"the CUDA driver cannot be loaded: {error}") from None
    if status != driver.CUresult.CUDA_SUCCESS:
        raise UnavailableError(f"the CUDA driver does not start: {status.name}")
    return driver


def check(driver: Any, tried: str, result: tuple[Any, ...]) -> Any:
    """Unpack what a call of the driver gave: nothing, a value, or several.

    Raises:
        DriverError: its status is not success.
    """
    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        raise DriverError(f"{tried}: {status.name}")
    return values[0] if len(values) == 1 else tuple(values)
