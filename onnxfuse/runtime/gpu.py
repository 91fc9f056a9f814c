"""What GPU there is, asked of the driver, without any GPU package."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR


@dataclass(frozen=True)
class Gpu:
    """One device: name, architecture (90 for compute capability 9.0) and the CUDA version of the driver."""

    name: str
    sm: int
    driver_cuda: str


@functools.cache
def devices() -> tuple[Gpu, ...]:
    """The GPUs that the CUDA driver sees; none if there is no driver."""
    driver = _driver()
    if driver is None:
        return ()
    version, count = ctypes.c_int(), ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(version))
    if driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return ()
    found = []
    for index in range(count.value):
        device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        name = ctypes.create_string_buffer(256)
        if driver.cuDeviceGet(ctypes.byref(device), index) != 0:
            continue
        driver.cuDeviceGetName(name, len(name), device)
        driver.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, device)
        driver.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, device)
        cuda = f"{version.value // 1000}.{version.value % 1000 // 10}"
        found.append(Gpu(name.value.decode(errors="replace"), major.value * 10 + minor.value, cuda))
    return tuple(found)


def _driver() -> ctypes.CDLL | None:
    for name in ("libcuda.so.1", "nvcuda.dll"):
        try:
            driver = ctypes.CDLL(name)
        except OSError:
            continue
        if driver.cuInit(0) == 0:
            return driver
    return None
