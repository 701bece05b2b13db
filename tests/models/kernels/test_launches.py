"""How many kernels a layer launches on a GPU with dropout, padding and learned biases.

They are counted on fake tensors, which need neither a GPU nor Triton.
"""

from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gridformer.config import LayoutConfig, ModelConfig
from gridformer.memory.estimate import estimate_rank
from gridformer.mesh import Axes
from gridformer.models import Model
from gridformer.models.blocks import DropoutRng
from gridformer.models.blocks.attention import AttentionHeads
from gridformer.models.kernels import library
from gridformer.parallel import build_parallel
from gridformer.parallel.data import buckets
from gridformer.record import Kernel, trace_rank
from gridformer.record.device import fake_gpu
from gridformer.record.kernels import launched_work
from tests.support.fake_gpu import InProcess, fake_tensors
from tests.support.marks import full_unless
from tests.support.multirank.memory import a_run

# How often a layer, or one of each stack, drops hidden states and attends.
OF_A_LAYER = {"gpt2": (2, 1), "llama": (2, 1), "bert": (2, 1), "t5": (5, 3), "transformer": (5, 3)}


class Launches(TorchDispatchMode):
    """Counts the kernels that operators launch. Views and empty tensors need none."""

    def __init__(self) -> None:
        super().__init__()
        self.of: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name.partition("::")[2]
        views = any(x.alias_info and not x.alias_info.is_write for x in func._schema.returns)
        if func.namespace != "prim" and not (views or "empty" in name or name == "_unsafe_view"):
            self.of[name] += 1
            if name.startswith("attention") and args[6 + name.endswith("backward")] is not None:
                self.of["hash_keys"] += 1  # of dropout
            if name == "attention_backward":  # of queries, of keys and values, of the bias
                self.of[name] += 2 if args[-1] else 1
        return func(*args, **(kwargs or {}))


def flash(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: None, is_causal: bool, scale: float
) -> Tensor:
    """Attention without dropout as CUDA runs it; torch does not know that the device has it."""
    found = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, scale=scale)
    out: Tensor = found[0]
    return out


def small(**values: Any) -> ModelConfig:
    return ModelConfig(**values, n_heads=2, hidden_size=64, max_seq_len=16, vocab_size=50)


def on_gpu(config: ModelConfig) -> Model:
    how = fake_gpu(), "bfloat16"
    return build_parallel(config, LayoutConfig(), Axes(), 1, *how, filled=False)


def launches(
    family: str, rate: float, fused: bool = True, padded: bool = False, n_layers: int = 1
) -> Counter[str]:
    """Return the kernels of a forward and a backward pass through a model's layers."""
    config = small(family=family, n_layers=n_layers, dropout=rate, attention_dropout=rate)
    with fake_tensors(), fake_gpu(), Launches() as seen:
        model = on_gpu(config)
        model.uses_kernels(fused)
        tokens = torch.zeros(4, 16, dtype=torch.int64)
        batch = {"tokens": tokens, "source": tokens}
        if padded:
            batch |= {"valid": tokens > 0, "source_valid": tokens > 0}
        with patch.object(F, "scaled_dot_product_attention", flash):
            seen.of.clear()
            hidden = model.run(batch).hidden
            assert hidden is not None
            hidden.sum().backward()
        return seen.of


def of_a_layer(family: str, rate: float, fused: bool = True) -> Counter[str]:
    """Return the kernels of a layer: those that a model of two has more than a model of one."""
    one, two = (launches(family, rate, fused, n_layers=n) for n in (1, 2))
    return two - one


@pytest.mark.parametrize("family", full_unless(("gpt2", "t5").__contains__, OF_A_LAYER))
def test_dropout_launches_few_kernels_more(gpu: InProcess, family: str) -> None:
    """A dropout is one kernel in each direction, and one of probabilities is none."""
    without, with_it = (gpu(of_a_layer, family, rate) for rate in (0.0, 0.1))
    n_dropouts, n_attentions = OF_A_LAYER[family]
    assert with_it["masked"] == 2 * n_dropouts
    assert with_it["attention"] == n_attentions
    assert with_it.total() <= 1.15 * without.total()
    if family == "gpt2":  # the others have the same operators, which take long to count
        plain = gpu(of_a_layer, family, 0.1, False)
        assert plain.total() > 5 * without.total()


@pytest.mark.parametrize("family", ["gpt2", "bert", "t5"])
@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_attention_stays_one_kernel(gpu: InProcess, family: str, rate: float) -> None:
    """Padding, dropout and a learned bias do not break attention up into operators."""
    seen = gpu(launches, family, rate, True, True)
    n_attentions = {"gpt2": 1, "bert": 1, "t5": 3}[family]
    n_biased = 2 if family == "t5" else 0
    assert seen["attention"] == n_attentions
    assert seen["attention_backward"] == 2 * n_attentions + n_biased
    unfused = {"_softmax", "bmm", "baddbmm", "_scaled_dot_product_flash_attention"}
    assert not unfused & seen.keys()


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "torch"])
def test_the_estimate_of_memory_knows(fused: bool) -> None:
    """On GPUs nothing of the size of the scores is kept or made, however many tokens there are."""
    kernels = "fused" if fused else "torch"
    s = 256
    model = {"max_seq_len": s, "n_layers": 2, "attention_dropout": 0.1, "dropout": 0.1}
    train = {"global_batch": 4, "device": "cuda", "kernels": kernels}
    found = estimate_rank(a_run({}, model, train), 0)
    scores = 4 * 4 * a_run({}, model, train).model.n_heads * s * s  # float32
    assert (found.peak < scores) == fused
    on_cpu = estimate_rank(a_run({}, model, {**train, "device": "cpu"}), 0)
    assert on_cpu.peak > 2 * scores


def kernels_of_a_segment(dtype: torch.dtype) -> list[Kernel]:
    """Return attention's kernels of the last 512 of 2048 positions, forward and backward."""
    found: list[Kernel] = []

    class Recorded(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            work = launched_work(func, args, kwargs or {}, out, fake_gpu().type)
            found.extend([work] if work is not None else [])
            return out

    config = ModelConfig(n_layers=1, hidden_size=256, n_heads=4)
    heads = AttentionHeads(config, "x", DropoutRng(), scaled=True)
    with fake_tensors(), fake_gpu():
        q, k, v = (torch.zeros(2, n, s, 64, dtype=dtype) for n, s in ((4, 512), *[(2, 2048)] * 2))
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        with Recorded():
            heads._attend(q, k, v, True, None, first_query=1536).sum().backward()
    return found


def test_a_segment_of_queries_is_one_kernel_without_a_mask(gpu: InProcess) -> None:
    """In float64, which no such kernel takes, it is computed for some queries at a time."""
    found = gpu(kernels_of_a_segment, torch.bfloat16)
    attention = [one for one in found if one.kind == "attention"]
    shape, flop = (2, 4, 512, 2048, 64, 1), 4 * 2 * 4 * 512 * 2048 * 64
    assert [(one.op, one.shape, one.flop) for one in attention] == [
        ("sdpa", shape, flop),
        ("sdpa_backward", shape, 2 * flop),
    ]
    inputs = 2 * (2 * 4 * 512 * 64) + 2 * 2 * (2 * 2 * 2048 * 64)
    sums = 4 * 2 * 4 * 512  # one number for each query
    assert attention[0].bytes == inputs + 2 * (2 * 4 * 512 * 64) + sums
    assert not {"arange", "where", "ones", "tril"} & {one.op for one in found}
    parts = [one for one in gpu(kernels_of_a_segment, torch.float64) if one.kind == "product"]
    keys = {size for one in parts for size in one.shape[1:] if size > 512}
    assert keys == {1536 + 256, 2048}


@pytest.mark.parametrize(
    ("capability", "triton", "runs"),
    [((8, 0), True, True), ((7, 5), True, False), ((9, 0), False, False)],
)
def test_kernels_need_a_gpu_and_a_working_triton(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], triton: bool, runs: bool
) -> None:
    cuda, cpu = torch.device("cuda", 3), torch.device("cpu")
    monkeypatch.setattr(library, "_RUN", {})
    monkeypatch.setattr(library, "triton_works", lambda: triton)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert library.available(cuda, torch.bfloat16) == runs
    assert not library.available(cuda, torch.float64)
    assert not library.available(cpu, torch.float32)
    assert {cuda: runs} == library._RUN  # compiled code reads it


def test_triton_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "find_spec", lambda name: name)
    monkeypatch.setattr(library.Path, "exists", lambda path: True)
    monkeypatch.delenv("CC", raising=False)
    for found, works in (("clang", True), ("icc", False)):
        monkeypatch.setattr(
            library.shutil, "which", lambda name, found=found: name if name == found else None
        )
        assert library.triton_works.__wrapped__() == works
    monkeypatch.setenv("CC", "icc")
    assert library.triton_works.__wrapped__()


def of_the_loss(chunk_tokens: int) -> Counter[str]:
    """Return the kernels of the head and the loss of a small model in bfloat16."""
    with fake_tensors(), fake_gpu(), Launches() as seen:
        model = on_gpu(small(n_layers=1))
        model.loss_chunk_tokens = chunk_tokens
        hidden = torch.zeros(4, 16, 64, dtype=torch.bfloat16, requires_grad=True)
        targets = torch.zeros(4, 16, dtype=torch.int64)
        seen.of.clear()
        losses = model.losses_of(hidden, {"tokens": targets, "targets": targets})
        losses["tokens"].backward()
    return seen.of


def test_a_chunk_adds_to_the_gradient_of_the_table_where_it_multiplies(gpu: InProcess) -> None:
    """Without this, each chunk would cast the gradient of the table, and add it in two kernels."""
    four, eight = gpu(of_the_loss, 16), gpu(of_the_loss, 8)
    assert four["add_product"] == 3  # the first chunk begins the sum
    assert eight["add_product"] == 7
    assert eight["mm"] - four["mm"] == 4 * 2  # logits, and the gradient of the hidden states
    assert "add_product" not in gpu(of_the_loss, 0)


def backward_of(layout: dict[str, Any], m: int) -> tuple[Counter[str], list[int]]:
    """Return what the backward passes of a layer launch, and the bytes of zeros that they make.

    Matrices travel alone, as those of a large layer do.
    """
    model = {"n_layers": 1, "hidden_size": 80, "n_heads": 4, "max_seq_len": 8}
    train = {"global_batch": 12 * m, "dtype": "bfloat16", "compile": False}
    run = a_run({**layout, "micro_batches": m}, model, train)
    with patch.object(buckets, "BUCKET_BYTES", 20_000):
        trace = trace_rank(run, 0, kernels=True)
    kernels = [one for one in trace.unfolded() if isinstance(one, Kernel)]
    back = [one for one in kernels if one.place.backward and "layers.0." in one.place.module]
    zeros = [one.bytes for one in back if one.op == "new_zeros"]
    return Counter(one.op for one in back), zeros


@pytest.mark.parametrize(
    ("layout", "how"),
    [
        ({}, "add_product"),
        ({"scheme": "megatron", "cols": 2}, "add_product"),
        ({"scheme": "megatron", "cols": 2, "sequence_parallel": True}, "add_product"),
        ({"scheme": "subgraph", "branches": 2}, "add_product"),
        ({"scheme": "optimus", "rows": 2, "cols": 2}, "add_"),
    ],
    ids=str,
)
def test_a_product_adds_to_the_gradients_of_earlier_micro_batches(
    gpu: InProcess, layout: dict[str, Any], how: str
) -> None:
    """Without this, each of them would cast the gradients of all weights, and then add them."""
    (one, _), (four, _) = gpu(backward_of, layout, 1), gpu(backward_of, layout, 4)
    weights = 4
    if how == "add_product":
        assert four["add_product"] - one["add_product"] == 3 * weights
        assert four["mm"] + four["add_product"] == 4 * one["mm"]
    else:
        casts, adds = (four[op] - one[op] for op in ("_to_copy", "add_"))
        assert casts <= 3 * one["_to_copy"], "weights are cast where they are added"
        assert adds >= 3 * weights


@pytest.mark.parametrize("mode", ["zero1", "fsdp"])
@pytest.mark.parametrize("m", [1, 2])
def test_a_gradient_that_travels_alone_is_not_copied_to_pad_it(
    gpu: InProcess, mode: str, m: int
) -> None:
    """80 and 320 rows do not divide over 3 replicas; biases are copied to messages of zeros."""
    _, zeros = gpu(backward_of, {"dp": 3, "dp_mode": mode}, m)
    assert max(zeros) < 80 * 320 * 4


def before_the_first_product(layout: dict[str, Any], m: int) -> int:
    """Return how many kernels a step of m micro-batches launches before it computes anything."""
    model = {"n_layers": 2, "max_seq_len": 8}
    run = a_run({**layout, "micro_batches": m}, model, {"global_batch": 4 * m})
    kernels = [one for one in trace_rank(run, 0, kernels=True).events if isinstance(one, Kernel)]
    return [kernel.kind for kernel in kernels].index("product")


@pytest.mark.parametrize(
    "layout", [{}, {"scheme": "optimus", "rows": 2, "cols": 2}, {"pp": 2}], ids=str
)
def test_no_micro_batch_makes_a_step_begin_later(gpu: InProcess, layout: dict[str, Any]) -> None:
    few, many = (gpu(before_the_first_product, layout, m) for m in (2, 8))
    assert many == few
