"""GPU instruments with stand-ins for torch.cuda and NVML: nothing here needs a GPU."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from streambp.bench.memory import limit_budget, measure_cuda, read_nvml

MIB = 2**20


class FakeCuda:
    """An allocator that counts, reserves in steps of 4 MiB and caches what is freed."""

    def __init__(self, total_mib=100):
        self.total_mib = total_mib
        self.allocated = self.reserved = 0
        self.peak_allocated = self.peak_reserved = 0
        self.synchronized = 0
        self.fraction = None

    def allocate(self, num_bytes):
        self.allocated += num_bytes
        self.reserved = max(self.reserved, -(-self.allocated // (4 * MIB)) * 4 * MIB)
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def free(self, num_bytes):
        self.allocated -= num_bytes

    def synchronize(self, index):
        self.synchronized += 1

    def empty_cache(self):
        self.reserved = -(-self.allocated // (4 * MIB)) * 4 * MIB

    def reset_peak_memory_stats(self, index):
        self.peak_allocated, self.peak_reserved = self.allocated, self.reserved

    def max_memory_allocated(self, index):
        return self.peak_allocated

    def max_memory_reserved(self, index):
        return self.peak_reserved

    def get_device_properties(self, index):
        return SimpleNamespace(total_memory=self.total_mib * MIB, uuid="aaaa")

    def set_per_process_memory_fraction(self, fraction, index):
        self.fraction = (fraction, index)


def step_of(cuda, forward_mib, backward_mib):
    def step(around):
        with around("forward"):
            cuda.allocate(forward_mib * MIB)
        with around("backward"):
            cuda.allocate(backward_mib * MIB)
            cuda.free((forward_mib + backward_mib) * MIB)

    return step


@pytest.fixture
def model():
    module = nn.Linear(MIB // 4, 1, bias=False)
    module.weight.grad = torch.zeros_like(module.weight)
    return module


def test_allocator_peaks_by_phase_and_reset_between_runs(model):
    cuda = FakeCuda()
    cuda.allocate(2 * MIB)  # the weight and its gradient
    memory = measure_cuda(model, None, step_of(cuda, 10, 3), index=0, cuda=cuda)
    assert memory["peak_by_phase_bytes"] == {"forward": 12 * MIB, "backward": 15 * MIB}
    assert memory["peak_phase"] == "backward"
    assert memory["peak_allocated_bytes"] == 15 * MIB
    assert memory["peak_reserved_bytes"] == 16 * MIB
    assert memory["weights_bytes"] == memory["gradients_bytes"] == MIB
    assert memory["activation_peak_bytes"] == 13 * MIB
    smaller = measure_cuda(model, None, step_of(cuda, 1, 1), index=0, cuda=cuda)
    assert smaller["peak_allocated_bytes"] == 4 * MIB
    assert smaller["peak_reserved_bytes"] == 4 * MIB


def test_every_missing_number_has_its_reason(model):
    cuda = FakeCuda()
    memory = measure_cuda(model, None, step_of(cuda, 1, 1), index=0, cuda=cuda)
    assert {name for name, value in memory.items() if value is None} == set(memory["unavailable"])
    assert all(memory["unavailable"].values())


def test_budget_is_a_fraction_of_the_device():
    cuda = FakeCuda(total_mib=4096)
    limit_budget(1.0, 3, cuda)
    assert cuda.fraction == (0.25, 3)
    with pytest.raises(ValueError, match=r"budget_gib=8: GPU 3 has 4\.00 GiB"):
        limit_budget(8, 3, cuda)


class FakeNvml:
    """Two GPUs, PCI order B then A; device memory 7 MiB x (index + 1), this process 5 MiB."""

    class NVMLError(Exception):
        pass

    def __init__(self, *, uuids=("GPU-bbbb", "GPU-aaaa"), pid=42, process_bytes=5 * MIB, mig=0):
        self.uuids, self.pid, self.process_bytes, self.mig = uuids, pid, process_bytes, mig
        self.open = 0

    def nvmlInit(self):
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlDeviceGetCount(self):
        return len(self.uuids)

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid not in self.uuids:
            raise self.NVMLError("Not Found")
        return self.uuids.index(uuid)

    def nvmlDeviceGetUUID(self, handle):
        return self.uuids[handle]

    def nvmlDeviceGetMigMode(self, handle):
        if self.mig is None:
            raise self.NVMLError("Not Supported")
        return (self.mig, self.mig)

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(used=7 * MIB * (handle + 1))

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        other = SimpleNamespace(pid=1, usedGpuMemory=MIB)
        return [other, SimpleNamespace(pid=self.pid, usedGpuMemory=self.process_bytes)]


def device_read(nvml, index=0, uuid=None, **environ):
    """Index of the NVML device that was read, or the reason why none was."""
    reading = read_nvml(index, uuid=uuid, nvml=nvml, environ=environ, pid=42)
    assert nvml.open == 0
    if reading.device_bytes is None:
        assert reading.process_bytes is None
        return reading.unavailable["device_bytes"]
    assert reading.process_bytes == 5 * MIB and not reading.unavailable
    return reading.device_bytes // (7 * MIB) - 1


def test_process_and_device_are_separate_numbers():
    reading = read_nvml(0, uuid="GPU-aaaa", nvml=FakeNvml(), environ={}, pid=42)
    assert (reading.process_bytes, reading.device_bytes) == (5 * MIB, 14 * MIB)


def test_the_uuid_decides_whatever_the_order():
    assert device_read(FakeNvml(), index=0, uuid="GPU-aaaa") == 1
    assert device_read(FakeNvml(), index=0, uuid="GPU-aaaa", CUDA_VISIBLE_DEVICES="1") == 1
    assert "Not Found" in device_read(FakeNvml(), uuid="GPU-cccc")


@pytest.mark.parametrize(
    ("visible", "index", "device"),
    [(None, 1, 1), ("1", 0, 1), ("1,0", 1, 0), ("0, 1", 1, 1), ("GPU-aa,GPU-bbbb", 0, 1)],
)
def test_visible_devices_map_in_pci_order(visible, index, device):
    environ = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    if visible is not None:
        environ["CUDA_VISIBLE_DEVICES"] = visible
    assert device_read(FakeNvml(), index, **environ) == device


def test_several_gpus_in_an_unknown_order_are_not_guessed():
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in device_read(FakeNvml())
    assert device_read(FakeNvml(uuids=("GPU-aaaa",))) == 0


@pytest.mark.parametrize("visible", ["", "1", "-1", "7"])
def test_devices_that_are_not_there(visible):
    reason = device_read(
        FakeNvml(), 1, CUDA_VISIBLE_DEVICES=visible, CUDA_DEVICE_ORDER="PCI_BUS_ID"
    )
    assert "has no device" in reason
    if visible == "7":
        assert "NVML has no device '7'" in device_read(
            FakeNvml(), 0, CUDA_VISIBLE_DEVICES=visible, CUDA_DEVICE_ORDER="PCI_BUS_ID"
        )


def test_ambiguous_uuid_prefix():
    assert "2 GPUs have a UUID" in device_read(FakeNvml(), CUDA_VISIBLE_DEVICES="GPU-")


def test_mig_is_not_the_whole_gpu():
    assert "MIG" in device_read(FakeNvml(), CUDA_VISIBLE_DEVICES="MIG-1234")
    assert "MIG" in device_read(FakeNvml(mig=1), uuid="GPU-aaaa")
    assert device_read(FakeNvml(mig=None), uuid="GPU-aaaa") == 1


def test_no_library():
    class NoLibrary(FakeNvml):
        def nvmlInit(self):
            raise self.NVMLError("NVML Shared Library Not Found")

    reading = read_nvml(0, nvml=NoLibrary(), environ={})
    assert reading.process_bytes is None and reading.device_bytes is None
    assert set(reading.unavailable) == {"process_bytes", "device_bytes"}
    assert "Shared Library Not Found" in reading.unavailable["device_bytes"]


def test_no_permission_loses_only_what_is_forbidden():
    class NoPermission(FakeNvml):
        def nvmlDeviceGetComputeRunningProcesses(self, handle):
            raise self.NVMLError("Insufficient Permissions")

    reading = read_nvml(0, uuid="GPU-aaaa", nvml=NoPermission(), environ={})
    assert reading.device_bytes == 14 * MIB and reading.process_bytes is None
    assert reading.unavailable == {"process_bytes": "Insufficient Permissions"}


def test_process_unknown_or_without_a_number():
    unknown = read_nvml(0, uuid="GPU-aaaa", nvml=FakeNvml(pid=7), environ={}, pid=42)
    assert unknown.process_bytes is None and "no process 42" in unknown.unavailable["process_bytes"]
    silent = read_nvml(0, uuid="GPU-aaaa", nvml=FakeNvml(process_bytes=None), environ={}, pid=42)
    assert silent.process_bytes is None and "driver" in silent.unavailable["process_bytes"]


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    assert "nvidia-ml-py" in read_nvml(0).unavailable["device_bytes"]
