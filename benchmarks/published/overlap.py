"""What hides messages of activations, on and off in turn, on an emulated cluster.

    python -m benchmarks.published.overlap [MBIT ...]

Four nodes of one process each hold the columns of sequence-parallel Megatron, with one sequence.
The same processes run a forward and a backward pass of the same layers with messages at once and
with chunks of tokens, gradients that are multiplied late, or both, in turn, so that what else the
machine does strikes both. The ratio is the median of the ratios of such pairs.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from benchmarks.published.namespaces import enter, network
from gridformer import comm
from gridformer.config import LayoutConfig, ModelConfig
from gridformer.launch import launch
from gridformer.mesh.axes import Axis
from gridformer.mesh.process_group import close_process_groups, init_process_groups
from gridformer.parallel import build_parallel
from gridformer.parallel.auto.cost import Choice
from gridformer.parallel.auto.heuristics import decide
from gridformer.parallel.auto.products import Work
from gridformer.parallel.axes import build_axes
from gridformer.parallel.tensor.summa import gathered_weights_scope

NODES, TOKENS, PAIRS = 4, 512, 15
MODEL = ModelConfig(
    family="llama", n_layers=2, hidden_size=256, n_heads=8, vocab_size=512, max_seq_len=TOKENS
)
LAYOUT = LayoutConfig(scheme="megatron", cols=NODES, sequence_parallel=True, keep_gathered="none")
# The number of chunks, and whether gradients are multiplied late.
HIDING = {"late gradients": (1, True), "4 chunks": (4, False), "both": (4, True)}


def passes(n: int, late: bool) -> Callable[[], float]:
    """Returns what runs a forward and a backward pass and returns its seconds."""
    torch.set_num_threads(1)
    axes = build_axes(LAYOUT, "cpu")
    choices = decide(MODEL, LAYOUT, Work(tokens=TOKENS, sequences=1))

    def cut(one: Choice) -> Choice:
        layer = one.product.section != "head"
        return replace(one, n_chunks=n, whole_backward=n > 1) if layer else one

    products = {name: cut(one) for name, one in choices.products.items()}
    cpu, chosen = torch.device("cpu"), replace(choices, products=products, late_gradients=late)
    model = build_parallel(MODEL, LAYOUT, axes, 1, cpu, choices=chosen)
    batch = torch.randint(0, 512, (1, TOKENS + 1), generator=torch.Generator().manual_seed(0))

    def run() -> float:
        comm.barrier((axes.world,))
        begin = time.perf_counter()
        with gathered_weights_scope(model):
            model.loss_sum(batch[:, :-1], batch[:, 1:]).backward()
        comm.barrier((axes.world,))
        model.zero_grad()
        return time.perf_counter() - begin

    return run


def worker(nodes: list[str], mbit: float) -> None:
    """The entrypoint of every process."""
    enter(nodes[int(os.environ["RANK"])])
    world = init_process_groups("cpu", NODES, 600.0)
    comm.barrier((Axis("world", NODES, world.rank),))
    at_once = passes(1, False)
    for name, how in HIDING.items():
        hidden = passes(*how)
        pairs = [(at_once(), hidden()) for _ in range(PAIRS + 2)][2:]
        before, now = (1e3 * statistics.median(one) for one in zip(*pairs))
        low, middle, high = statistics.quantiles([a / b for a, b in pairs], n=4)
        if world.rank == 0:
            print(
                f"{mbit:g} Mbit/s, {name}: {before:.0f} ms at once, {now:.0f} ms, "
                f"ratio {middle:.2f} (quartiles {low:.2f}, {high:.2f})",
                flush=True,
            )
    close_process_groups()


if __name__ == "__main__":
    for rate in map(float, sys.argv[1:] or ("200", "100")):
        with network(NODES, rate) as names:
            launch(worker, (names, rate), NODES)
