"""What operators launch, and which bytes they move, compared with counts by hand."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gridformer.config import parse_run
from gridformer.models.kernels.grouped import grouped_product, grouped_sum
from gridformer.plan.predict import record_run
from gridformer.record.events import Kernel
from gridformer.record.kernels import launched_work

T, V, H = 6, 1000, 8
LOGITS = torch.zeros(T, V)
TABLE = torch.zeros(V, H)
PLACES = torch.arange(T)  # of 8 bytes each
ROWS = torch.zeros(T, H)


class Launches(TorchDispatchMode):
    """Collects what each operator inside launches."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Kernel] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        work = launched_work(func, args, kwargs or {}, out, "cpu")
        self.found += [work] if work is not None else []
        return out


def column() -> Tensor:
    return PLACES.unsqueeze(1)


def updated() -> Tensor:
    weight = ROWS.clone().requires_grad_()
    weight.grad = torch.ones_like(weight)
    torch.optim.AdamW([weight], fused=True).step()
    return weight


@pytest.mark.parametrize(
    ("run", "op", "n_bytes"),
    [
        # A few elements of a large tensor: read, and written.
        (lambda: LOGITS.scatter_(1, column(), 1.0, reduce="add"), "scatter_", T * (8 + 2 * 4)),
        (
            lambda: LOGITS.scatter_add_(1, column(), ROWS[:, :1].contiguous()),
            "scatter_add_",
            T * (8 + 4 + 2 * 4),
        ),
        (lambda: TABLE.index_add_(0, PLACES, ROWS), "index_add_", T * (8 + 3 * 4 * H)),
        # A few elements are read.
        (lambda: LOGITS.gather(1, column()), "gather", T * (8 + 2 * 4)),
        (lambda: F.embedding(PLACES, TABLE), "embedding", T * (8 + 2 * 4 * H)),
        # The weight and two moments are read and written, its gradient and the step are read.
        (updated, "_fused_adamw_", 4 * (7 * T * H + 1)),
        # All of it is.
        (lambda: LOGITS.exp_(), "exp_", 2 * 4 * T * V),
        (lambda: LOGITS.amax(1), "amax", 4 * T * (V + 1)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bytes_are_those_that_an_operator_touches(
    run: Callable[[], Tensor], op: str, n_bytes: int
) -> None:
    with Launches() as launches:
        run()
    (work,) = [one for one in launches.found if one.op == op]
    assert (work.kind, work.bytes) == ("memory", n_bytes)


def test_a_loss_reads_the_logarithms_of_its_targets_alone() -> None:
    with Launches() as launches:
        F.nll_loss(LOGITS, PLACES, reduction="sum")
    (work,) = [one for one in launches.found if one.op == "nll_loss_forward"]
    assert T * (8 + 4) <= work.bytes <= T * (8 + 4) + 2 * 4  # and two results


def test_products_of_groups_are_recorded_as_if_all_groups_were_equal() -> None:
    """7 rows of 3 elements, which 4 experts multiply by [3, 5], and sums over their rows."""
    x, y, w = torch.zeros(7, 3), torch.zeros(7, 5), torch.zeros(4, 3, 5)
    ends = torch.tensor([2, 2, 5, 7], dtype=torch.int32)
    with Launches() as launches:
        grouped_product(x, w, ends)
        grouped_sum(x, y, ends)
    product, total = launches.found
    flop, n_bytes = 2 * 7 * 3 * 5, 4 * (7 * 3 + 4 * 3 * 5 + 7 * 5) + 4 * 4
    assert (product.shape, product.flop, product.bytes) == ((4, 2, 5, 3), flop, n_bytes)
    assert (total.shape, total.flop, total.bytes) == ((4, 3, 5, 2), flop, n_bytes)


@pytest.mark.parametrize(
    ("settings", "op", "hides"),
    [
        (("model.family=gpt2",), "sdpa", 1),
        (("model.family=gpt2", "model.attention_dropout=0.1"), "attention", 1),
        (("model.family=llama", "model.window=16"), "attention", 16),
        (("model.family=bert",), "sdpa", 0),
    ],
)
def test_both_directions_of_attention_say_what_a_mask_hides(
    settings: tuple[str, ...], op: str, hides: int
) -> None:
    sizes = {"n_layers": 1, "hidden_size": 64, "n_heads": 4, "max_seq_len": 64, "vocab_size": 256}
    model = {"family": settings[0].partition("=")[2], **sizes}
    train = {"global_batch": 2, "dtype": "bfloat16"}
    run = parse_run({"model": model, "data": {"path": "."}, "train": train}, [*settings])
    (trace,) = record_run(run).traces
    kernels = (one for one in trace.unfolded() if isinstance(one, Kernel))
    found = [one for one in kernels if one.kind == "attention"]
    shape = (2, 4, 64, 64, 16, hides)
    assert [(one.op, one.shape) for one in found] == [(op, shape), (f"{op}_backward", shape)]
