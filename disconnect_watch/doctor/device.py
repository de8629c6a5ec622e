"""The GPU and what the embedded engine would run on; torch is not imported."""

import ctypes

from disconnect_watch.doctor.finding import Finding, Status
from disconnect_watch.doctor.installed import version_of

__all__ = ["device_findings"]

_AREA = "device"


def device_findings() -> list[Finding]:
    """Of torch, and of CUDA's driver by its own word."""
    torch = version_of("torch")
    found = [
        Finding(_AREA, "torch", Status.OK, torch)
        if torch
        else Finding(
            _AREA,
            "torch",
            Status.NOTE,
            "not installed",
            "the embedded engine needs it: pip install 'disconnect-watch[engine]'",
        )
    ]
    value = _cuda()
    advice = "" if value else "the embedded engine runs on the CPU"
    status = Status.OK if value else Status.NOTE
    return [*found, Finding(_AREA, "CUDA", status, value or "no driver with a device", advice)]


def _cuda() -> str | None:
    """How many devices the driver has; None without a driver or a device.

    Source: CUDA Driver API, cuInit, cuDriverGetVersion, cuDeviceGetCount.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    count, release = ctypes.c_int(), ctypes.c_int()
    if (
        driver.cuInit(0)
        or driver.cuDriverGetVersion(ctypes.byref(release))
        or driver.cuDeviceGetCount(ctypes.byref(count))
        or not count.value
    ):
        return None
    major, minor = divmod(release.value, 1000)
    return f"{count.value} device(s), driver for CUDA {major}.{minor // 10}"
