"""Counters, from which kernels and compiled code read what dropout masks depend on."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gridformer.config import LayoutConfig, ModelConfig
from gridformer.mesh import Axes
from gridformer.models import Model
from gridformer.models.blocks import DropoutRng, DropoutSite
from gridformer.parallel import build_parallel
from gridformer.utils import rng

CPU = torch.device("cpu")


def build(**changes: Any) -> Model:
    rates = {"dropout": 0.1, "attention_dropout": 0.1, **changes}
    config = ModelConfig(n_layers=2, hidden_size=8, n_heads=2, vocab_size=5, max_seq_len=4, **rates)
    return build_parallel(config, LayoutConfig(), Axes(), 7, CPU)


def whole_key(counter: Tensor) -> int:
    low, high, _, _ = counter.tolist()
    return int(low + (high << 32))


def test_a_counter_holds_the_key_and_the_first_sample() -> None:
    dropout_rng = DropoutRng(seed=3, step=5)
    dropout_rng.at(slice(2**40, 2**40 + 4))
    for block in (0, 3):
        counter = dropout_rng.counter(f"site{block}", block, CPU)
        assert whole_key(counter) == rng.key(3, 5, f"site{block}")
        assert counter[2:].tolist() == [2**40 - 4 * block, 0]
        assert counter.data_ptr() % 16 == 0, "else Triton compiles kernels again"


def test_a_model_lists_all_its_sites() -> None:
    model = build()
    found = [module.site for module in model.modules() if isinstance(module, DropoutSite)]
    assert len(found) == len(set(found)) == 1 + 3 * 2
    assert set(model.dropout_rng.sites) == set(found)
    assert set(build(dropout=0.0).dropout_rng.sites) == {f"layers.{i}.attention" for i in range(2)}
    assert not build(dropout=0.0, attention_dropout=0.0).dropout_rng.sites


class Copies(TorchDispatchMode):
    """Counts tensors that are made from numbers of the host."""

    n = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.n += func is torch.ops.aten.lift_fresh.default
        return func(*args, **(kwargs or {}))


def test_counters_of_all_sites_are_made_once_per_micro_batch() -> None:
    """Those of earlier micro-batches stay as they are, and a pipeline finds them again."""
    model = build()
    dropout_rng, sites = model.dropout_rng, [*model.dropout_rng.sites]
    seen: list[list[Tensor]] = []
    with Copies() as copies:
        for step, rows in ((0, slice(0, 2)), (0, slice(2, 4)), (0, slice(0, 2)), (1, slice(0, 2))):
            dropout_rng.step = step
            dropout_rng.at(rows)
            seen.append([dropout_rng.counter(site, 0, CPU) for site in sites])
    assert copies.n == 3
    one, other, again, later = seen
    assert all(a is b for a, b in zip(one, again))
    for a, b, c, site in zip(one, other, later, sites):
        assert whole_key(a) == whole_key(b) == rng.key(7, 0, site)
        assert whole_key(c) == rng.key(7, 1, site)
        assert [int(counter[2]) for counter in (a, b, c)] == [0, 2, 0]
        assert len({counter.data_ptr() for counter in (a, b, c)}) == 3


def test_a_gpu_gets_counters_from_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch refuses to pin what it makes from numpy's arrays, but pins copies."""
    done: list[str] = []

    def pinned(x: Tensor) -> Tensor:
        done.append("pinned")
        return x.clone()

    def copied(x: Tensor, device: torch.device, non_blocking: bool) -> Tensor:
        assert device.type == "cuda"
        assert non_blocking
        done.append("copied")
        return x

    monkeypatch.setattr(Tensor, "pin_memory", pinned)
    monkeypatch.setattr(Tensor, "to", copied)
    dropout_rng = DropoutRng(seed=3, step=5)
    dropout_rng.at(slice(4, 6))
    counter = dropout_rng.counter("site", 0, torch.device("cuda"))
    assert done == ["pinned", "copied"]
    assert whole_key(counter) == rng.key(3, 5, "site")
