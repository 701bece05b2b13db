"""Peak speeds by the names that CUDA gives to devices."""

from __future__ import annotations

import pytest

from gridformer.train.flops import peak_tflops

DENSE = {  # bfloat16, or float16 on GPUs without it
    "NVIDIA GB200": 2500.0,
    "NVIDIA B200": 2250.0,
    "NVIDIA GH200 480GB": 989.5,
    "NVIDIA H200": 989.5,
    "NVIDIA H200 NVL": 835.5,
    "NVIDIA H100 80GB HBM3": 989.5,
    "NVIDIA H100 PCIe": 756.5,
    "NVIDIA H100 NVL": 835.5,
    "NVIDIA A100-SXM4-40GB": 312.0,
    "NVIDIA A100 80GB PCIe": 312.0,
    "NVIDIA A10": 125.0,
    "Tesla V100-SXM2-32GB": 125.0,
    "Tesla V100-PCIE-16GB": 112.0,
    "Tesla V100S-PCIE-32GB": 130.0,
    "Tesla T4": 65.0,
    "Quadro RTX 5000": 89.2,
}
OLD = ("V100", "T4", "Quadro")


@pytest.mark.parametrize("name", DENSE)
def test_each_device_has_its_own_peak(name: str) -> None:
    old = any(part in name for part in OLD)
    assert peak_tflops(name, "float16") == DENSE[name]
    assert peak_tflops(name, "bfloat16") == (None if old else DENSE[name])
    plain, tf32 = (peak_tflops(name, "float32", allowed) for allowed in (False, True))
    assert plain is not None
    assert tf32 is not None
    assert plain < DENSE[name] / 4
    assert tf32 == plain if old else plain < tf32 < DENSE[name] * 0.51


@pytest.mark.parametrize(
    "name", ["NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA A10G", "NVIDIA RTX 5000 Ada", "a CPU"]
)
def test_other_devices_have_none(name: str) -> None:
    assert peak_tflops(name, "float16") is None
