"""Operations of a step by formula, compared with those that a step runs, as torch counts them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from gridformer.config import DataConfig, LayoutConfig, ModelConfig, RunConfig, TrainConfig
from gridformer.mesh import Axes
from gridformer.parallel import build_parallel
from gridformer.record.batch import rows_like
from gridformer.train.console import _speed
from gridformer.train.flops import StepFlops, Utilization, peak_tflops
from gridformer.train.step import Stepper
from tests.support.marks import full_unless

aten = torch.ops.aten
SIZES: dict[str, Any] = {
    "n_layers": 2, "hidden_size": 12, "n_heads": 3, "head_dim": 5, "ffn_size": 20,
    "vocab_size": 17, "max_seq_len": 16,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "gpt2, labels": {"n_labels": 3},
    "gpt2, fine-tuned": {"n_labels": 3, "token_head": False},
    "bert": {"family": "bert"},
    "bert, labels": {"family": "bert", "n_labels": 3, "sentence_pair": False},
    "bert, pre-norm, alone": {"family": "bert", "norm_position": "pre", "sentence_pair": False},
    "t5": {"family": "t5", "n_decoder_layers": 3},
    "transformer": {"family": "transformer", "n_decoder_layers": 1},
    "transformer, pre-norm": {"family": "transformer", "norm_position": "pre"},
    "llama": {"family": "llama", "n_heads": 6, "n_kv_heads": 2, "head_dim": 4, "tied_head": False},
    "mixture": {
        "family": "llama", "head_dim": 4, "n_layers": 3, "n_experts": 5, "experts_per_token": 2,
        "expert_size": 7, "shared_size": 6, "dense_layers": 1,
    },
}  # fmt: skip
GROUPED = (torch.ops.gridformer.grouped_product, torch.ops.gridformer.grouped_sum)
HOW = ("none", "selective", "full", "except_attention")
QUICK = {
    *(("gpt2", "selective"), ("bert", "full"), ("gpt2, labels", "none")),
    *(("t5", "full"), ("transformer", "none"), ("bert, pre-norm, alone", "full")),
    ("llama", "full"),
    *(("gpt2", "except_attention"), ("mixture", "full")),
}


class Counter(TorchDispatchMode):
    """Counts the operations of products and attention.

    torch's own counter does not know attention on CPU. What a fused kernel recomputes in its
    backward pass is not counted, as there are kernels that keep the scores.
    """

    total = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        if packet in flop_registry:
            self.total += flop_registry[packet](*args, **(kwargs or {}), out_val=out)
        elif packet == aten._scaled_dot_product_flash_attention_for_cpu:
            self.total += attention(*args[:3])
        elif packet == aten._scaled_dot_product_flash_attention_for_cpu_backward:
            self.total += 2 * attention(*args[1:4])
        elif packet in GROUPED:  # rows [S, K], and matrices [E, K, N] or rows [S, N]
            self.total += 2 * args[0].numel() * args[1].shape[-1]
        return out


def attention(q: Tensor, k: Tensor, v: Tensor) -> int:
    """Several heads of q may share one of k and v."""
    b, n = q.shape[:2]
    count: int = sdpa_flop_count(q.shape, (b, n, *k.shape[2:]), (b, n, *v.shape[2:]))
    return count


def run_of(model: dict[str, Any], **train: Any) -> RunConfig:
    config = ModelConfig(**{**SIZES, **model})
    data: dict[str, Any] = {"seq_len": 8, "source_len": 11 if config.two_stacks else 0}
    if not config.token_head:
        data["task"] = "classify"
    return RunConfig(
        model=config,
        data=DataConfig(path=Path("none"), **data),
        layout=LayoutConfig(micro_batches=2),
        train=TrainConfig(**{"global_batch": 4, "loss_chunk_tokens": 6, **train}),
    )


def counted(run: RunConfig) -> int:
    model = build_parallel(run.model, LayoutConfig(), Axes(), 1, torch.device("cpu"))
    stepper = Stepper(model, run.train, Axes(), run.layout)
    with Counter() as counter:
        stepper(0, lambda rows: rows_like(run, rows))
    return counter.total


@pytest.mark.parametrize(
    ("model", "recompute"),
    full_unless(QUICK.__contains__, [(model, how) for model in MODELS for how in HOW], unpack=True),
)
def test_a_step_takes_the_operations_of_its_formula(model: str, recompute: str) -> None:
    """The source is longer than the target, and heads are wider than h / n."""
    run = run_of(MODELS[model], recompute=recompute)
    flops = StepFlops.of(run)
    assert flops.model == counted(run.model_copy(update={"train": run_of({}).train}))
    if recompute == "none":
        assert flops.hardware == flops.model
    # On CPU a learned bias needs the unfused path.
    elif model != "t5" or recompute == "full":
        assert flops.hardware == counted(run) > flops.model


def test_attention_dropout_recomputes_less() -> None:
    """The probabilities are computed again, but not their product with the values."""
    run = run_of({"attention_dropout": 0.1}, recompute="selective")
    assert StepFlops.of(run).hardware == counted(run)


def test_the_known_size_of_a_step() -> None:
    """Narayanan et al. 2021, equation 3, which counts recomputation of everything."""
    run = run_of({"n_layers": 24, "hidden_size": 1024, "n_heads": 16, "vocab_size": 50257,
                  "max_seq_len": 1024, "head_dim": 0, "ffn_size": 0}, recompute="full")  # fmt: skip
    run = run.model_copy(update={"data": DataConfig(path=Path("none"), seq_len=1024)})
    b, s, n, h, v = 4, 1024, 24, 1024, 50257
    want = 96 * b * s * n * h**2 * (1 + s / (6 * h)) + 6 * b * s * h * v
    assert StepFlops.of(run, stops_early=False).hardware == want


def test_utilization_is_that_of_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = LayoutConfig(scheme="megatron", cols=4)
    run = run_of({}, recompute="full", dtype="bfloat16").model_copy(update={"layout": layout})
    flops = StepFlops.of(run)
    on_cpu = Utilization.of(run, torch.device("cpu"), True).metrics(0.5)
    assert on_cpu == {
        "model_tflops": pytest.approx(flops.model / 0.5 / 4 / 1e12),
        "hardware_tflops": pytest.approx(flops.hardware / 0.5 / 4 / 1e12),
    }
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    on_gpu = Utilization.of(run, torch.device("cuda", 0), True).metrics(0.5)
    assert on_gpu["mfu"] == pytest.approx(on_gpu["model_tflops"] / 989.5)
    assert on_gpu["hfu"] == pytest.approx(on_gpu["hardware_tflops"] / 989.5)
    assert on_gpu["hfu"] > on_gpu["mfu"]
    train = run.train.model_copy(update={"peak_tflops": 2.0})
    told = run.model_copy(update={"train": train})
    for device in (torch.device("cpu"), torch.device("cuda", 0)):
        found = Utilization.of(told, device, True).metrics(0.5)
        assert found["mfu"] == pytest.approx(on_cpu["model_tflops"] / 2.0)


def test_float32_is_compared_with_the_peak_of_its_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 PCIe")
    for tf32, want in ((False, 51.0), (True, 378.0)):
        assert Utilization.of(run_of({}, tf32=tf32), torch.device("cuda", 0), True).peak == want


def test_what_the_terminal_says() -> None:
    speed = {"model_tflops": 312.4, "hardware_tflops": 312.4}
    assert _speed(speed, "process") == "312 TFLOP/s per process"
    speed |= {"mfu": 0.3157, "hfu": 0.3157}
    assert _speed(speed, "GPU") == "312 TFLOP/s per GPU (MFU 31.6%)"
    speed["hfu"] = 0.4
    assert _speed(speed, "GPU") == "312 TFLOP/s per GPU (MFU 31.6%, HFU 40.0%)"


PEAKS: dict[str, float | None] = {  # bfloat16, or float16 on GPUs without it
    "NVIDIA GB200": 2500.0, "NVIDIA B200": 2250.0, "NVIDIA GH200 480GB": 989.5,
    "NVIDIA H200": 989.5, "NVIDIA H200 NVL": 835.5, "NVIDIA H100 80GB HBM3": 989.5,
    "NVIDIA H100 PCIe": 756.5, "NVIDIA H100 NVL": 835.5, "NVIDIA A100-SXM4-40GB": 312.0,
    "NVIDIA A100 80GB PCIe": 312.0, "NVIDIA A10": 125.0, "Tesla V100-SXM2-32GB": 125.0,
    "Tesla V100-PCIE-16GB": 112.0, "Tesla V100S-PCIE-32GB": 130.0, "Tesla T4": 65.0,
    "Quadro RTX 5000": 89.2,
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb": None, "NVIDIA A10G": None, "NVIDIA RTX 5000 Ada": None,
}  # fmt: skip


@pytest.mark.parametrize("name", PEAKS)
def test_each_device_has_its_own_peak(name: str) -> None:
    peak, old = PEAKS[name], any(part in name for part in ("V100", "T4", "Quadro"))
    assert peak_tflops(name, "float16") == peak
    assert peak_tflops(name, "bfloat16") == (None if old else peak)
    plain, tf32 = (peak_tflops(name, "float32", allowed) or 0.0 for allowed in (False, True))
    if peak is not None:
        assert 0.0 < plain < peak / 4
        assert tf32 == plain if old else plain < tf32 < peak * 0.51
