"""NVML's view of GPU memory: what this process and what the whole device use, right now.

CUDA numbers devices by ``CUDA_VISIBLE_DEVICES`` and speed, NVML by PCI bus, so an index of one is
never handed to the other: the UUID that torch reports decides, and without it the environment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["NvmlReading", "read_nvml"]

_FIELDS = ("process_bytes", "device_bytes")


@dataclass(kw_only=True, frozen=True)
class NvmlReading:
    """``process_bytes``: used by this process; ``device_bytes``: by everything on the device.

    A value that can't be had is ``None``, and ``unavailable`` says why under the field's name.
    """

    process_bytes: int | None = None
    device_bytes: int | None = None
    unavailable: dict[str, str] = field(default_factory=dict)


class _Unavailable(Exception):
    """The device can't be read; the message is the reason."""


def read_nvml(
    index: int,
    *,
    uuid: str | None = None,
    nvml: Any = None,
    environ: Mapping[str, str] = os.environ,
    pid: int | None = None,
) -> NvmlReading:
    """Memory of CUDA device ``index`` as NVML sees it. Never raises for a machine's shortcomings.

    ``uuid``: the device's, ``"GPU-..."``, as torch reports it. ``nvml``: the ``pynvml`` module or a
    stand-in; ``pid``: the process to look for, by default this one.
    """
    if nvml is None:
        try:
            import pynvml
        except ImportError:
            return _nothing("the package nvidia-ml-py is not installed")
        nvml = pynvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return _nothing(f"NVML can't be used here: {error}")
    try:
        handle = _handle(nvml, index, uuid, environ)
        return _read(nvml, handle, os.getpid() if pid is None else pid)
    except _Unavailable as reason:
        return _nothing(str(reason))
    finally:
        nvml.nvmlShutdown()


def _nothing(reason: str) -> NvmlReading:
    return NvmlReading(unavailable=dict.fromkeys(_FIELDS, reason))


def _handle(nvml: Any, index: int, uuid: str | None, environ: Mapping[str, str]) -> Any:
    """NVML's handle of CUDA device ``index``; raises ``_Unavailable`` where it can't be told."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and "MIG-" in visible:
        raise _Unavailable("CUDA_VISIBLE_DEVICES names a MIG slice; NVML counts the whole GPU")
    try:
        if uuid is not None:
            handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        else:
            handle = _handle_by_environment(nvml, index, visible, environ)
        if _in_mig_mode(nvml, handle):
            raise _Unavailable("the GPU is split by MIG; NVML counts the whole GPU")
    except nvml.NVMLError as error:
        raise _Unavailable(f"NVML doesn't find the device of this process: {error}") from error
    return handle


def _handle_by_environment(
    nvml: Any, index: int, visible: str | None, environ: Mapping[str, str]
) -> Any:
    num_devices = nvml.nvmlDeviceGetCount()
    tokens = (
        [str(i) for i in range(num_devices)]
        if visible is None
        else [token.strip() for token in visible.split(",") if token.strip()]
    )
    if index >= len(tokens):
        raise _Unavailable(f"CUDA_VISIBLE_DEVICES={visible!r} has no device {index}")
    token = tokens[index]
    if token.startswith("GPU-"):
        return _handle_by_uuid_prefix(nvml, token, num_devices)
    if num_devices > 1 and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        raise _Unavailable(
            "several GPUs, and CUDA's order of them isn't NVML's: set CUDA_DEVICE_ORDER=PCI_BUS_ID"
        )
    if not token.isdigit() or int(token) >= num_devices:
        raise _Unavailable(f"CUDA_VISIBLE_DEVICES={visible!r}: NVML has no device {token!r}")
    return nvml.nvmlDeviceGetHandleByIndex(int(token))


def _handle_by_uuid_prefix(nvml: Any, prefix: str, num_devices: int) -> Any:
    """CUDA accepts a shortened UUID where it is unambiguous."""
    handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(num_devices)]
    matching = [h for h in handles if _text(nvml.nvmlDeviceGetUUID(h)).startswith(prefix)]
    if len(matching) != 1:
        raise _Unavailable(f"{len(matching)} GPUs have a UUID that begins with {prefix!r}")
    return matching[0]


def _in_mig_mode(nvml: Any, handle: Any) -> bool:
    try:
        return bool(nvml.nvmlDeviceGetMigMode(handle)[0])
    except nvml.NVMLError:  # GPUs that know no MIG raise "not supported"
        return False


def _read(nvml: Any, handle: Any, pid: int) -> NvmlReading:
    unavailable: dict[str, str] = {}
    device_bytes = process_bytes = None
    try:
        device_bytes = int(nvml.nvmlDeviceGetMemoryInfo(handle).used)
    except nvml.NVMLError as error:
        unavailable["device_bytes"] = str(error)
    try:
        process_bytes = _process_bytes(nvml, handle, pid)
    except _Unavailable as reason:
        unavailable["process_bytes"] = str(reason)
    except nvml.NVMLError as error:
        unavailable["process_bytes"] = str(error)
    return NvmlReading(
        process_bytes=process_bytes, device_bytes=device_bytes, unavailable=unavailable
    )


def _process_bytes(nvml: Any, handle: Any, pid: int) -> int:
    for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
        if process.pid == pid:
            if process.usedGpuMemory is None:
                raise _Unavailable("the driver doesn't report memory by process")
            return int(process.usedGpuMemory)
    raise _Unavailable(
        f"NVML lists no process {pid} on this GPU (in a container, it lists the host's numbers)"
    )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
