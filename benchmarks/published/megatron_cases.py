"""The runs of Narayanan et al. 2021 on A100s, and what is predicted for each."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.planner.deepspeed import as_deepspeed
from benchmarks.planner.pricing import cluster_of, price, record
from benchmarks.planner.rows import SELENE, Row, gpt
from gridformer.plan.prediction import Prediction

PAPER = "Narayanan et al. 2021 (Megatron-LM), arXiv 2104.04473, tables 1, 2, figures 12, 13, 18"
SEQ, VOCAB = 2048, 51200
GPT3, GPT_530B, GPT_1T = (96, 12288, 96), (105, 20480, 128), (128, 25600, 160)
GPT_162B = (32, 20480, 128)


@dataclass(frozen=True)
class Case:
    """A run of the paper.

    Attributes:
        name: How tables call it.
        sizes: Layers, hidden size and heads.
        batch: The global batch.
        micro: Sequences in a micro-batch.
        layout: Fields of the layout besides `micro_batches`.
        published: TFLOP/s of each device, with what is recomputed; 0 if the text has no number.
    """

    name: str
    sizes: tuple[int, int, int]
    batch: int
    micro: int
    layout: dict[str, Any] = field(default_factory=dict)
    published: float = 0.0

    def row(self) -> Row:
        micro_batches = self.batch // self.micro // self.layout.get("dp", 1)
        layout = {"scheme": "megatron", "devices_per_node": 8, **self.layout}
        if layout.get("cols", 1) == 1:
            layout["scheme"] = "single"
        layout["micro_batches"] = micro_batches
        train = {"global_batch": self.batch, "dtype": "float16", "recompute": "full"}
        run = gpt((*self.sizes, SEQ, VOCAB), layout, train)
        return Row(self.name, SELENE, self.published, "hardware TFLOP/s", run, PAPER)

    def flops(self) -> float:
        """Returns the operations of a step by the paper's equation 3, which are what it divides.

        They include a second forward pass of all layers.
        """
        n, h, _ = self.sizes
        rest = 1 + SEQ / (6 * h) + VOCAB / (16 * n * h)
        return 96 * self.batch * SEQ * n * h * h * rest


@dataclass(frozen=True)
class Result:
    """A case and its prediction."""

    case: Case
    found: Prediction
    devices: int

    @property
    def tflops(self) -> float:
        """TFLOP/s of each device, counted as the paper counts them."""
        return self.case.flops() / self.found.step_s / self.devices / 1e12

    @property
    def bubble(self) -> float:
        """The time in which the slowest rank waits for other ranks, relative to the rest."""
        return self.found.bubble_s / (self.found.step_s - self.found.bubble_s)


def run(case: Case) -> Result:
    """Predicts a case."""
    row = case.row()
    recorded = record(row)
    return Result(case, price(recorded, cluster_of(row)), row.run.layout.n_processes)


def run_as_deepspeed(case: Case) -> Result:
    """Predicts a case of ZeRO-3 with the messages of DeepSpeed of 2021, which are simulated."""
    row = case.row()
    recorded = record(row)
    then = replace(recorded, recorded=as_deepspeed(recorded.recorded, cluster_of(row)))
    named = replace(case, name=f"{case.name}, as DeepSpeed of 2021 (simulated)")
    return Result(named, price(then, cluster_of(row)), row.run.layout.n_processes)


# --------------------------------------------------------------------------- the experiments


def _ptdp(name: str, sizes: tuple[int, int, int], pp: int, dp: int, batch: int, published: float,
          k: int) -> Case:  # fmt: skip
    layout = {"cols": 8, "pp": pp, "dp": dp, "stages_per_rank": k}
    return Case(name, sizes, batch, 1, layout, published)


def _zero3(name: str, sizes: tuple[int, int, int], dp: int, micro: int, batch: int,
           published: float) -> Case:  # fmt: skip
    return Case(name, sizes, batch, micro, {"dp": dp, "dp_mode": "fsdp"}, published)


def scale() -> list[Case]:
    """Returns the runs at scale of which the text or a table gives the rate."""
    return [
        _ptdp("175B, 8 x 12 stages, 384 devices", GPT3, 12, 4, 1536, 153, 2),
        _ptdp("175B, 8 x 12 stages, 1,536 devices", GPT3, 12, 16, 1536, 141, 2),
        _ptdp("530B, 8 x 35 stages, 560 devices", GPT_530B, 35, 2, 2240, 171, 1),
        _ptdp("530B, 8 x 35 stages, 2,240 devices", GPT_530B, 35, 8, 2240, 159, 1),
        _ptdp("1T, 8 x 64 stages, 3,072 devices", GPT_1T, 64, 6, 3072, 163, 2),
        _zero3("175B, ZeRO-3, 384 devices", GPT3, 384, 4, 1536, 144),
        _zero3("175B, ZeRO-3, 1,536 devices", GPT3, 1536, 1, 1536, 44),
        _zero3("530B, ZeRO-3, 640 devices", GPT_530B, 640, 4, 2560, 138),
        _zero3("530B, ZeRO-3, 2,240 devices", GPT_530B, 2240, 1, 2240, 48),
    ]


def tensor_or_pipeline() -> dict[int, list[Case]]:
    """Returns the layouts of 162.2B on 64 devices, by batch."""
    return {
        batch: [
            Case(f"{pp} x {64 // pp}", GPT_162B, batch, 1, {"cols": 64 // pp, "pp": pp})
            for pp in (2, 4, 8, 16, 32)
        ]
        for batch in (32, 128)
    }


def schedules() -> dict[int, dict[str, Case]]:
    """Returns the schedules of 175B on 96 devices, by batch."""
    base = {"cols": 8, "pp": 12}
    kinds = {
        "one stage a rank": base,
        "two, whole tensors": {**base, "stages_per_rank": 2, "scatter_gather": False},
        "two, scatter/gather": {**base, "stages_per_rank": 2},
    }
    return {
        batch: {kind: Case(kind, GPT3, batch, 1, layout) for kind, layout in kinds.items()}
        for batch in (12, 36, 60)
    }


def stages() -> dict[int, list[Case]]:
    """Returns the pipelines with three layers of h=20480 a stage, by batch."""
    return {
        batch: [
            Case(f"{pp}", (3 * pp, 20480, 128), batch, 1, {"cols": 8, "pp": pp})
            for pp in (1, 2, 4, 8)
        ]
        for batch in (8, 128)
    }
