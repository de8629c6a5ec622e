"""Pages of this process that a CUDA device reads and writes where they lie."""

from typing import Any

from disconnect_watch.kernels.driver import UnavailableError, check

__all__ = ["RegisteredPages"]


class RegisteredPages:
    """Host memory under registration with the driver: pinned, and mapped for every device.

    Args:
        driver: from ``load_driver``.
        address: of the first byte; with ``size_bytes`` it covers whole pages.
        size_bytes: how many.
        device_index: the device that must be able to do this.

    Attributes:
        device_address: what a kernel of that device is given. Equal to ``address`` on most
            machines, but not on all.

    Raises:
        UnavailableError: the device cannot map host memory, or no context is current.
        DriverError: the driver refused; pages that are registered already are refused, too.

    Source: CUDA driver API, "Memory Management": cuMemHostRegister, cuMemHostGetDevicePointer.
    """

    def __init__(self, driver: Any, address: int, size_bytes: int, *, device_index: int) -> None:
        self._driver = driver
        self._address = 0
        for attribute in ("CAN_MAP_HOST_MEMORY", "HOST_REGISTER_SUPPORTED"):
            key = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{attribute}")
            asked = driver.cuDeviceGetAttribute(key, device_index)
            if not check(driver, f"ask device {device_index} for {attribute}", asked):
                raise UnavailableError(f"device {device_index} has no {attribute}")
        if not int(check(driver, "find the current context", driver.cuCtxGetCurrent())):
            raise UnavailableError("no CUDA context is current: use the device once before")
        flags = driver.CU_MEMHOSTREGISTER_PORTABLE | driver.CU_MEMHOSTREGISTER_DEVICEMAP
        tried = f"register {size_bytes} bytes of host memory"
        check(driver, tried, driver.cuMemHostRegister(address, size_bytes, flags))
        self._address = address
        try:
            found = driver.cuMemHostGetDevicePointer(address, 0)
            self.device_address = int(check(driver, "find registered memory", found))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Unregister; no kernel may be using the pages. Idempotent."""
        address, self._address = self._address, 0
        if address:
            check(self._driver, "unregister memory", self._driver.cuMemHostUnregister(address))
