"""The cells: what is tried with FSDP2, on how many processes, and the work of one process."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from benchmarks.fsdp2 import sides
from benchmarks.fsdp2.problem import TOLERANCE, Method, model_of
from benchmarks.fsdp2.trained import Trained, differences
from benchmarks.schemes.traffic import torch_traffic
from gridformer.config import Family, LayoutConfig, ModelConfig
from gridformer.mesh.process_group import close_process_groups, init_process_groups
from gridformer.utils.batch import Batch

TIMEOUT_S = 40.0
ONCE = Method()
# bfloat16 rounds at other places on the two sides: FSDP2 computes norms in bfloat16, too.
BFLOAT16 = {"loss": 2e-2, "norm": 1e-1}

Build = Callable[[ModelConfig, LayoutConfig, Method], Trained]


@dataclass(frozen=True)
class Cell:
    """One thing that is tried.

    Attributes:
        name: What it is, unique.
        layout: The layout.
        method: How the model is trained.
        family: The model.
        how: How FSDP2 is put around the model.
    """

    name: str
    layout: dict[str, Any]
    method: Method = ONCE
    family: Family = "gpt2"
    how: Literal["layout", "as stored", "styles", "dtensor", "dtensor, torch's clip", "early"] = (
        "layout"
    )

    @property
    def plan(self) -> LayoutConfig:
        layout = {"micro_batches": self.method.micro_batches, **self.layout}
        return LayoutConfig.model_validate(layout)


def _early(config: ModelConfig, layout: LayoutConfig, method: Method) -> Trained:
    found = sides.on_layout(config, layout, method)
    found.__class__ = sides.Prefetching
    return found


BUILDS: dict[str, Build] = {
    "layout": sides.on_layout,
    "as stored": partial(sides.on_layout, contiguous=False),
    "styles": sides.by_styles,
    "dtensor": partial(sides.by_dtensor, by_torch=False),
    "dtensor, torch's clip": partial(sides.by_dtensor, by_torch=True),
    "early": _early,
}

MEGATRON = {"scheme": "megatron", "cols": 2, "dp": 2}
OPTIMUS = {"scheme": "optimus", "rows": 2, "cols": 1, "dp": 2}
SUPER = {"scheme": "subgraph", "branches": 2, "dp": 2}
PIPELINE = {"pp": 2, "dp": 2}
LAYERS, LATER = Method(clip_by="layer"), Method(3)
INSIDE = replace(LAYERS, in_backward=True)

CELLS = [
    *(Cell(f"replicas over {n}", {"dp": n}) for n in (2, 3, 4)),
    Cell("replicas over 2, T5", {"dp": 2}, family="t5"),
    Cell("replicas over 3, T5", {"dp": 3}, family="t5"),
    Cell("3 micro-batches, gradients travel once", {"dp": 4}, LATER),
    Cell("3 micro-batches, T5", {"dp": 4}, LATER, "t5"),
    Cell("parameters stay gathered for a step", {"dp": 4}, Method(3, reshards=False)),
    Cell("layers recomputed", {"dp": 4}, Method(3, again=True)),
    Cell("clipping by layer", {"dp": 4}, LAYERS),
    Cell("updates in the backward pass", {"dp": 4}, INSIDE),
    Cell("updates in the backward pass, T5", {"dp": 4}, INSIDE, "t5"),
    Cell("gathers in bfloat16", {"dp": 4}, Method(3, dtype="bfloat16")),
    Cell("Megatron, torch's styles", MEGATRON, how="styles"),
    Cell("Megatron, DTensor", MEGATRON, LATER, how="dtensor"),
    Cell("Megatron, DTensor, torch's clipping", MEGATRON, how="dtensor, torch's clip"),
    Cell("Megatron, blocks as they are stored", MEGATRON, how="as stored"),
    Cell("Megatron, blocks stored by rows", MEGATRON, LATER),
    Cell("Megatron, sequence parallel", {**MEGATRON, "sequence_parallel": True}, LATER),
    Cell("Megatron, T5", MEGATRON, LATER, "t5"),
    Cell("Megatron, updates in the backward pass", MEGATRON, INSIDE),
    Cell("Optimus, blocks as they are stored", OPTIMUS, how="as stored"),
    Cell("Optimus, blocks stored by rows", OPTIMUS, LATER),
    Cell("Optimus, T5", OPTIMUS, LATER, "t5"),
    Cell("Optimus, weights gathered early", OPTIMUS, how="early"),
    Cell("D&SP, common layers over all replicas", SUPER, LATER),
    Cell("pipeline, tied table", PIPELINE, LATER),
]


def compare(name: str, folder: Path) -> None:
    """Runs a cell in this process and writes what it has found, or the error, to a file."""
    torch.set_num_threads(1)
    (cell,) = (cell for cell in CELLS if cell.name == name)
    world = init_process_groups("cpu", cell.plan.n_processes, TIMEOUT_S)
    found: dict[str, Any] = {}
    try:
        found = _compared(cell)
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"
    (folder / f"{world.rank}.json").write_text(json.dumps(found), encoding="utf-8")
    if "error" not in found:
        close_process_groups()


def _compared(cell: Cell) -> dict[str, Any]:
    config = model_of(cell.family)
    plain = Method(clip_by=cell.method.clip_by, dtype=cell.method.dtype)
    want = sides.one_device(config, plain).train()
    side = BUILDS[cell.how](config, cell.plan, cell.method)
    replicas = set(cell.layout) == {"dp"}
    messages = _count_messages(side) if replicas else {}
    got = side.train()
    worst = differences(got, want, side.shards)
    limits = BFLOAT16 if cell.method.dtype == "bfloat16" else dict.fromkeys(worst, TOLERANCE)
    passed = all(worst[what] <= limit for what, limit in limits.items())
    if replicas:  # gradients travel once a step, whatever the micro-batches
        units = sum(isinstance(module, FSDPModule) for module in side.model.modules())
        passed = passed and messages["reduce_scatter"] == units
    return {"passed": passed, "worst": {what: worst[what] for what in limits}, "messages": messages}


def _count_messages(side: Trained) -> dict[str, int]:
    """Returns a dictionary that each step fills with its messages, by kind."""
    found: dict[str, int] = {}
    gradients = side.gradients

    def counted(batch: Batch, count: Tensor) -> Tensor:
        with torch_traffic() as traffic:
            total = gradients(batch, count)
        found.clear()
        found.update(traffic.count)
        return total

    side.gradients = counted  # type: ignore[method-assign]
    return found
