"""GPUs by name and by numbers, and what is refused."""

import pytest

from streambp.sim.gpus import Gpu, gpu_named, gpu_names, resolve_gpu
from streambp.sim.settings import Assumptions
from streambp.sim.workspaces import cublas_workspace_bytes

NUMBERS = {
    "name": "mine",
    "memory_bytes": 10 * 2**30,
    "sm": 90,
    "bandwidth_bytes_per_s": 1e12,
    "peak_bf16_flops_per_s": 1e14,
    "peak_fp32_flops_per_s": 1e13,
}


def test_every_configured_gpu_loads_and_is_plausible():
    assert {"a800_80gb", "a100_40gb", "h100_80gb", "h200_141gb", "b200"} <= set(gpu_names())
    for name in gpu_names():
        gpu = gpu_named(name)
        assert gpu.name == name
        assert 0.9 * gpu.memory_bytes < gpu.usable_bytes < gpu.memory_bytes
        assert gpu.peak_fp32_flops_per_s < gpu.peak_bf16_flops_per_s


def test_a_gpu_by_numbers_and_a_known_one_changed():
    assert resolve_gpu(NUMBERS).usable_bytes == int(10 * 2**30 * 0.98)
    changed = resolve_gpu({"name": "a100_80gb", "usable_fraction": 0.5})
    assert changed.usable_bytes == gpu_named("a100_80gb").memory_bytes // 2


def test_a_known_gpu_with_another_number_is_not_labelled_as_the_known_one():
    known = gpu_named("a100_80gb")
    assert resolve_gpu({**known.to_dict(), "memory_bytes": known.memory_bytes}) == known
    changed = resolve_gpu({**known.to_dict(), "memory_bytes": 50_000_000_000, "sm": 90})
    assert changed.name == "a100_80gb with memory_bytes=50000000000, sm=90"


def test_a_name_of_its_own_does_not_take_the_default_gpus_numbers():
    composed = {**gpu_named("a100_80gb").to_dict(), "name": "mine", "memory_bytes": 5e10}
    missing = (
        r"gpu\.name='mine': gpu\.sm, gpu\.bandwidth_bytes_per_s, gpu\.peak_bf16_flops_per_s, "
        r"gpu\.peak_fp32_flops_per_s are not given.*gpu=a100_80gb gpu\.memory_bytes=5e\+10"
    )
    with pytest.raises(ValueError, match=missing):
        resolve_gpu(composed)
    with pytest.raises(ValueError, match=r"of h100_80gb"):
        resolve_gpu({**gpu_named("h100_80gb").to_dict(), "name": "mine", "memory_bytes": 5e10})
    assert resolve_gpu({**composed, **NUMBERS}).name == "mine"


@pytest.mark.parametrize(
    ("gpu", "message"),
    [
        ("a100_80", "gpu='a100_80' is unknown: did you mean a100_80gb"),
        ({"name": "a99"}, "gpu='a99' is unknown"),
        ({**NUMBERS, "sm": 75}, "gpu.sm=75"),
        ({**NUMBERS, "memory": 1}, "gpu.memory=1: no such field"),
        ({**NUMBERS, "memory_bytes": -1}, "gpu.memory_bytes=-1"),
        ({**NUMBERS, "usable_fraction": 2}, "gpu.usable_fraction=2"),
        ({**NUMBERS, "usable_fraction": "abc"}, "gpu.usable_fraction='abc': must be a number"),
        ({"name": "a100_80gb", "usable_fraction": True}, "gpu.usable_fraction=True"),
        ({**NUMBERS, "bandwidth_bytes_per_s": float("inf")}, "gpu.bandwidth_bytes_per_s=inf"),
        ({**NUMBERS, "prefer_cudnn_attention": "yes"}, "gpu.prefer_cudnn_attention='yes'"),
        ({**NUMBERS, "name": 5}, "gpu.name=5"),
        ({"name": "mine", "sm": 90}, "gpu.bandwidth_bytes_per_s"),
    ],
)
def test_what_cannot_be_a_gpu_is_refused_by_name(gpu, message):
    with pytest.raises(ValueError, match=message):
        resolve_gpu(gpu)


def test_another_name_for_the_default_gpus_numbers_is_not_believed():
    renamed = {**gpu_named("a100_80gb").to_dict(), "name": "a99"}
    with pytest.raises(ValueError, match=r"gpu\.name='a99' is unknown"):
        resolve_gpu(renamed)


def test_cudnn_is_first_on_the_data_centre_gpus_that_prefer_it():
    assert gpu_named("h100_80gb").cudnn_attention_first
    assert gpu_named("b200").cudnn_attention_first
    assert not gpu_named("a800_80gb").cudnn_attention_first
    assert not Gpu(**NUMBERS, prefer_cudnn_attention=False).cudnn_attention_first


def test_cublas_workspaces_grow_with_sm90():
    assert sum(cublas_workspace_bytes(80)) == 2 * 8_519_680
    assert sum(cublas_workspace_bytes(90)) == 64 * 2**20


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"maks": "none"}, "device.assumptions.maks"),
        ({"mask": "causal"}, "device.assumptions.mask='causal'"),
        ({"outputs_kept": 1}, "device.assumptions.outputs_kept=1"),
    ],
)
def test_assumptions_are_checked(values, message):
    with pytest.raises(ValueError, match=message):
        Assumptions.from_mapping(values)
