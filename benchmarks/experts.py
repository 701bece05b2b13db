"""A mixture of experts on 4 processes: experts apart, FSDP, copies, and other libraries' experts.

    python -m benchmarks.experts --out docs/results/experts.md
    python -m benchmarks.experts --rounds 3 --mbit 0         # to try it, without emulated nodes

torchtitan 0.3 (with spmd_types, tyro and docstring_parser) and transformers' expert parallelism
(with accelerate) take part where they are installed. Emulated nodes need root, ip and tc. Nothing
else should run meanwhile.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import typer
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks.common.machine import describe_machine
from benchmarks.common.page import write_page
from benchmarks.predicted.steps import random_rows
from benchmarks.published.cases import Machine
from benchmarks.published.measuring import Place, network_of
from benchmarks.published.namespaces import enter
from gridformer.config import RunConfig, parse_run
from gridformer.launch import launch
from gridformer.mesh.process_group import close_process_groups, init_process_groups
from gridformer.models.blocks import MixtureOfExperts
from gridformer.parallel import build_parallel
from gridformer.parallel.axes import build_axes
from gridformer.train.step import Stepper
from gridformer.utils.batch import Batch

N, BATCH, LENGTH, WARM_UPS, TOLERANCE = 4, 8, 128, 2, 1e-4
MODEL: dict[str, Any] = {
    **{"family": "llama", "n_layers": 2, "hidden_size": 256, "n_heads": 4, "ffn_size": 512},
    **{"n_experts": 8, "experts_per_token": 2, "vocab_size": 512, "max_seq_len": LENGTH},
    **{"tied_head": False, "init_std": 0.1},
}
APART = "gridformer's experts over dp"
LAYOUTS: dict[str, dict[str, Any]] = {
    APART: {"experts_over": ["dp"]},
    "gridformer's experts with FSDP": {"experts_over": ["dp"], "dp_mode": "fsdp"},
    "gridformer's FSDP": {"dp_mode": "fsdp"},
    "gridformer's copies": {},
}
CPU = torch.device("cpu")


def run_of(n: int = N, **layout: Any) -> RunConfig:
    """Returns the run on n replicas."""
    train = {"device": "cpu", "global_batch": BATCH}
    layout = {"dp": n, **layout}
    return parse_run({"model": MODEL, "layout": layout, "data": {"path": "."}, "train": train})


class Own:
    """gridformer's own passes, with its sums of gradients."""

    def __init__(self, run: RunConfig) -> None:
        axes = build_axes(run.layout, "cpu")
        self.model = build_parallel(run.model, run.layout, axes, 1, CPU)
        self.stepper, self.read = Stepper(self.model, run.train, axes, run.layout), random_rows(run)

    def step(self) -> Tensor:
        """Computes this process's part of the loss, and the summed gradients."""
        return self.stepper.repeat(0, self.read)[1]["tokens"] / (BATCH * LENGTH)

    def square(self) -> Tensor:
        """Returns this process's part of the squared norm of gradients."""
        return self.stepper.updates.squares()[0]


def rows_here() -> Batch:
    """Returns this process's part of the batch."""
    first = dist.get_rank() * BATCH // N
    return random_rows(run_of(1))(slice(first, first + BATCH // N))


class Torchtitan:
    """gridformer's model with torchtitan's mixtures: 2 experts here, others' by its all-to-all."""

    def __init__(self) -> None:
        from torchtitan.distributed.utils import set_spmd_backend

        set_spmd_backend("default")
        self.model = Own(run_of(1)).model.train()
        mesh = init_device_mesh("cpu", (N,), mesh_dim_names=("ep",))
        for layer in self.model.modules():
            if isinstance(mixture := getattr(layer, "mlp", None), MixtureOfExperts):
                layer.mlp = titan_mixture(mixture, mesh)
        named = [*self.model.named_parameters()]
        self.mine: list[Any] = [p for name, p in named if "routed_experts" in name]
        self.common: list[Any] = [p for name, p in named if "routed_experts" not in name]
        self.batch = rows_here()

    def step(self) -> Tensor:
        self.model.zero_grad()
        loss = self.model.losses(self.batch)["tokens"] / (BATCH * LENGTH)
        loss.backward()
        grads = [p.grad for p in self.common]
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat)
        parts = flat.split([grad.numel() for grad in grads])
        torch._foreach_copy_(grads, [part.view_as(g) for part, g in zip(parts, grads)])
        return loss.detach()

    def square(self) -> Tensor:
        counted = self.mine + (self.common if dist.get_rank() == 0 else [])
        return torch.stack([p.grad.square().sum() for p in counted]).sum()


def titan_mixture(plain: MixtureOfExperts, mesh: DeviceMesh) -> nn.Module:
    """Returns torchtitan's mixture of equal weights, without its casts to bfloat16."""
    from torchtitan.models.common import moe, token_dispatcher
    from torchtitan.models.common.linear import Linear

    class Wide(moe.GroupedExperts):
        def forward(self, x: Tensor, counts: Tensor) -> Tensor:
            ends = counts.cumsum(0, dtype=torch.int32)
            w1, w2, w3 = (w.transpose(1, 2) for w in (self.w1_EFD, self.w2_EDF, self.w3_EFD))
            up = F.silu(torch._grouped_mm(x, w1, offs=ends)) * torch._grouped_mm(x, w3, offs=ends)
            return torch._grouped_mm(up, w2, offs=ends)

    h, e, f = plain.router.config.hidden_size, MODEL["n_experts"], MODEL["ffn_size"]
    k, gate = MODEL["experts_per_token"], Linear.Config(in_features=h, out_features=e)
    inner = moe.GroupedExperts.Config(dim=h, hidden_dim=f, num_experts=e // N)
    dispatcher = token_dispatcher.AllToAllTokenDispatcher.Config(num_experts=e, top_k=k)
    routed = moe.RoutedExperts.Config(inner_experts=inner, token_dispatcher=dispatcher)
    router = moe.TokenChoiceTopKRouter.Config(
        num_experts=e, gate=gate, top_k=k, score_func="softmax", route_norm=True
    )
    made = moe.MoE.Config(
        num_experts=e, load_balance_coeff=None, routed_experts=routed, router=router
    ).build()
    made.routed_experts.token_dispatcher.wire_meshes(ep_mesh=mesh)
    made.routed_experts.inner_experts.__class__ = Wide
    experts, rank = plain.experts, dist.get_rank()
    pairs = {"w1_EFD": experts.gate, "w3_EFD": experts.up, "w2_EDF": experts.down}
    for name, ours in pairs.items():
        theirs = ours.weight.detach().chunk(N)[rank].transpose(1, 2).contiguous()
        setattr(made.routed_experts.inner_experts, name, nn.Parameter(theirs))
    made.router.gate.weight = nn.Parameter(plain.router.weight.detach().t().contiguous())
    return made


class Transformers:
    """transformers' model of the same weights: FSDP2, and its all-to-all of tokens to experts."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.distributed import DistributedConfig

        how = DistributedConfig(fsdp_size=N, ep_size=N, ep_implementation="all_to_all")
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, distributed_config=how
        )
        self.batch = rows_here()

    @staticmethod
    def write(folder: Path) -> None:
        """Writes gridformer's weights as a Hugging Face folder."""
        from safetensors.torch import save_file

        from benchmarks.gpu.sides import causal_model, hugging_face_state

        run = run_of(1)
        state = hugging_face_state(Own(run).model, run.model)
        causal_model(run.model).config.save_pretrained(folder)
        tensors = {name: x.detach().contiguous().clone() for name, x in state.items()}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    def step(self) -> Tensor:
        self.model.zero_grad()
        logits = self.model(self.batch["tokens"], use_cache=False).logits.flatten(0, 1)
        loss = F.cross_entropy(logits, self.batch["targets"].flatten())
        loss.backward()
        return loss.detach() / N  # FSDP2 takes means over devices

    def square(self) -> Tensor:
        grads = [p.grad.to_local() for p in self.model.parameters()]
        return torch.stack([grad.square().sum() for grad in grads]).sum()


def worker(rounds: int, folder: Path, places: list[Place] | None) -> None:
    """The entrypoint of every process: checks all sides, and runs them in turns."""
    if places:
        enter(*places[int(os.environ["RANK"])])
    torch.set_num_threads(1)
    world = init_process_groups("cpu", N, 600.0)
    sides: dict[str, Any] = {name: Own(run_of(**layout)) for name, layout in LAYOUTS.items()}
    if find_spec("torchtitan"):
        sides["torchtitan's experts with copies"] = Torchtitan()
    if find_spec("accelerate"):
        sides["transformers' experts with FSDP2"] = Transformers(folder)
    one = Own(run_of(1))
    want = torch.stack((one.step(), one.square().sqrt()))
    for name, side in sides.items():
        got = torch.stack((side.step().double(), side.square().double()))
        dist.all_reduce(got)
        got[1] = got[1].sqrt()
        if not torch.allclose(got, want, TOLERANCE, 0):
            raise RuntimeError(f"{name}: loss and norm {got.tolist()}, not {want.tolist()}")
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(WARM_UPS + rounds):
        for name, side in sides.items():
            dist.barrier()
            began = time.perf_counter()
            side.step()
            dist.barrier()
            times[name] += [time.perf_counter() - began] * (number >= WARM_UPS)
    if world.rank == 0:
        (folder / "times.json").write_text(json.dumps(times), encoding="utf-8")
    close_process_groups()


def table(times: dict[str, list[float]]) -> str:
    """Returns the medians of steps, with quartiles, and of their ratios to the first side."""
    lines = ["| | a step, ms (quartiles) | times the first (quartiles) |", "|---|---:|---:|"]
    for name, some in times.items():
        ratios = [mine / first for mine, first in zip(some, times[APART])]
        cells = [_quartiles([1000 * s for s in some], ".1f"), _quartiles(ratios, ".2f")]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def conclusion(times: dict[str, list[float]]) -> str:
    """Says who is slower or faster than the first side in three quarters of the rounds."""
    words = {"slower": list[str](), "not told apart": list[str](), "faster": list[str]()}
    for name, some in [*times.items()][1:]:
        low, middle, high = _quarters([mine / first for mine, first in zip(some, times[APART])])
        kind = "slower" if low > 1 else "faster" if high < 1 else "not told apart"
        words[kind].append(f"{name} ({middle:.2f}x)")
    told = "; ".join(f"{kind}: {', '.join(names) or 'none'}" for kind, names in words.items())
    return f"beside a step of {APART}, {told}"


def _quarters(values: Sequence[float]) -> list[float]:
    return statistics.quantiles(values, n=4)


def _quartiles(values: Sequence[float], how: str) -> str:
    low, middle, high = _quarters(values)
    return f"{middle:{how}} ({low:{how}}, {high:{how}})"


def main(
    out: Annotated[Path | None, typer.Option(help="The page to write; else it is printed.")] = None,
    rounds: Annotated[int, typer.Option(min=2, help="Steps of each side.")] = 21,
    mbit: Annotated[float, typer.Option(help="Mbit/s of emulated nodes; 0: none of them.")] = 200,
) -> None:
    """Measure, and write the page."""
    with tempfile.TemporaryDirectory(prefix="gridformer-experts-") as name:
        folder, found = Path(name), {}
        if find_spec("accelerate"):
            Transformers.write(folder)
        machines = {"Processes of one machine": 0.0, f"4 nodes, {mbit:g} Mbit/s": mbit}
        for title, rate in [*machines.items()][: 2 if mbit else 1]:
            with network_of(Machine(N, 1, rate)) if rate else nullcontext() as places:
                launch(worker, (rounds, folder, places), N)
            found[title] = json.loads((folder / "times.json").read_text(encoding="utf-8"))
            print(f"{title}\n{table(found[title])}", file=sys.stderr, flush=True)
    about = describe_machine("benchmarks.experts")
    head = (
        f"{about['date']}: {about['cpu']}, {about['cores']} cores, torch {about['torch']}, gloo, "
        f"commit {about['commit'] or 'unknown'}: `{about['command']}`{about['busy']}."
    )
    said = "\n".join(f"- {title}: {conclusion(times)}." for title, times in found.items())
    tables = [part for title, times in found.items() for part in (f"## {title}", table(times))]
    write_page(["# Mixtures of experts beside other libraries'", said, head, *tables, _HOW], out)


_HOW = f"""\
A llama of {MODEL["n_layers"]} layers with h=256, 8 experts of inner width 512, of which a token
passes 2, and a vocabulary of 512, in float32; 4 processes with {BATCH // N} of {BATCH} sequences of
{LENGTH} tokens each, and one thread each. A step is a forward pass, a backward pass, and the sums
of gradients, without an update of parameters, from one barrier to the next. All sides are in the
same processes and take turns. Before, losses and norms of gradients were equal to those of one
process within {TOLERANCE:g}. Weights and tokens are random, so tokens are nearly balanced. Sides
are called slower or faster if they were in three quarters of the rounds.

With experts over dp, a process has 2 experts of each layer, and copies of the rest; with FSDP, it
has parts of the rest. Without, it has copies or parts of everything. torchtitan's side is
gridformer's model with torchtitan's router, all-to-all dispatcher and grouped experts (without its
casts to bfloat16), and one all-reduce of all other gradients after the backward pass. transformers'
side is its own model, whose other parameters FSDP2 shards, with `DistributedConfig(fsdp_size=4,
ep_size=4)`. Megatron-Core 0.16 cannot run here: its `MoEAlltoAllTokenDispatcher` creates a
`torch.cuda.Stream` when it is built."""


if __name__ == "__main__":
    typer.run(main)
