"""Published measurements that nothing is fitted to, and what the planner predicts for them.

Where the published code did something that gridformer does not, there are two rows: one simulates
what that code did, on the record of gridformer's, and one is gridformer's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from benchmarks.planner import torchtitan
from benchmarks.planner.deepspeed import as_deepspeed
from benchmarks.planner.pricing import RecordedRow, cluster_of, predicted, price, record
from benchmarks.planner.rows import FRONTERA, H100, SELENE, Row, Value, calibration_rows, gpt
from benchmarks.published import megatron_cases as megatron
from benchmarks.published import super as super_
from gridformer.cluster.file import load_cluster

DGX2H = "dgx2h-v100"
V1 = "https://nv-adlr.github.io/MegatronLMV1, table 1"
SCALING = "Shoeybi et al. 2019 (Megatron-LM), figure 5"
README = "https://github.com/NVIDIA/Megatron-LM, README of release 0.7"
# Groups of rows, which the means may leave out.
OPTIMUS, SUPER, SUPER_OWN = "Optimus", "SUPER, heads one by one", "SUPER, heads in one product"
V100, WEAK = "Megatron-LM 1.0 on V100", "Megatron-LM 2019, weak scaling"
THREE_D, BEST = "Megatron-LM 2021 on A100", "Megatron-LM 2021, best layout"
ZERO, ZERO_OWN = "ZeRO-3 as DeepSpeed of 2021", "ZeRO-3, gridformer's"
GPT3, TITAN = "Megatron-LM on H100", "torchtitan on H100"
OWN = (SUPER_OWN, ZERO_OWN)  # rows of gridformer's own code beside a simulation of the published
CLEAR = 1.05  # a published gap from which on there is a winner


@dataclass(frozen=True)
class Found:
    """A published number and what is predicted for it.

    Attributes:
        group: What it belongs to.
        name: How the table calls it.
        cluster: The machine.
        published: The published number, or what won.
        unit: What it is.
        predicted: The predicted number, or what wins.
        source: Where it was published.
        right_winner: Whether the published winner is predicted; None if the row has none.
        note: What one should know about the comparison.
    """

    group: str
    name: str
    cluster: str
    published: float | str
    unit: str
    predicted: float | str
    source: str
    right_winner: bool | None = None
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """What is predicted over what was published; None if they are no numbers."""
        if isinstance(self.published, str) or isinstance(self.predicted, str):
            return None
        return self.predicted / self.published


def held_out(tell: Callable[[Found], None] = lambda _: None) -> list[Found]:
    """Predicts all rows, in the order of their groups.

    Args:
        tell: Is called with each row as soon as it is predicted.
    """
    found: list[Found] = []
    megatron_rows = _megatron_v1, weak_scaling, _at_scale, _best, _gpt3
    for rows in (_optimus, _super, *megatron_rows, _torchtitan):
        for one in rows():
            tell(one)
            found.append(one)
    return found


def same_winner(published: float, found: float) -> bool | None:
    """Returns whether two ratios have the same winner; None if the published one has none."""
    if 1 / CLEAR < published < CLEAR:
        return None
    return (published > 1) == (found > 1)


def _priced(recorded: RecordedRow) -> float:
    return predicted(recorded, cluster_of(recorded.row))


def _optimus() -> list[Found]:
    rows = {row.name: row for row in calibration_rows(FRONTERA)}
    times = [_priced(record(rows[f"{scheme} / 64"], False)) for scheme in ("megatron", "optimus")]
    return [
        Found(
            OPTIMUS,
            "Optimus against Megatron, 64 devices, inference",
            FRONTERA,
            1.78,
            "times faster",
            times[0] / times[1],
            "Xu et al. 2021 (Optimus), abstract",
            same_winner(1.78, times[0] / times[1]),
            "the paper's forward times were taken without waiting for the device",
        )
    ]


def _super() -> list[Found]:
    found = []
    for group, layout, note in (
        (
            SUPER,
            super_.as_published(4),
            "simulated: SUPER launched every head's kernels by themselves",
        ),
        (
            SUPER_OWN,
            super_.sub_graphs(4),
            "other code: all heads of a device in one product, in both",
        ),
    ):
        for model, published in super_.PUBLISHED.items():
            cluster = load_cluster(super_.LASSEN)
            runs = [super_.run_of(model, one, 4) for one in (super_.replicas(4), layout)]
            times = [super_.seconds(run, cluster, group == SUPER) for run in runs]
            found.append(
                Found(
                    group,
                    f"{model}, 4-way D&SP against data parallelism",
                    super_.LASSEN,
                    published,
                    "times faster",
                    times[0] / times[1],
                    super_.PAPER,
                    same_winner(published, times[0] / times[1]),
                    note,
                )
            )
    return found


def _megatron_row(
    name: str, sizes: tuple[int, int, int], value: Value, published: float, **layout: int
) -> Row:
    """Returns a row of a GPT-2 with s=1024 in 16 bits with full recomputation, as in 2019."""
    layers, hidden, heads = sizes
    # Also on one device, where the published program was the same with a group of one.
    placed = {"scheme": "megatron", "devices_per_node": 16, **layout}
    run = gpt(
        (layers, hidden, heads, 1024, 51200),
        placed,
        {"global_batch": 8 * layout.get("dp", 1), "recompute": "full", "dtype": "float16"},
    )
    return Row(name, DGX2H, published, value, run, V1)


def _megatron_v1() -> list[Found]:
    rows = (
        _megatron_row("1.2B on 1 device", (40, 1536, 16), "s/iteration", 1.288),
        _megatron_row("4.2B on 4 devices", (64, 2304, 24), "s/iteration", 1.357, cols=4),
    )
    note = "sequences of 1,024 assumed"
    return [
        Found(V100, row.name, DGX2H, row.published, row.value, _priced(record(row)), V1, None, note)
        for row in rows
    ]


# Layers, hidden size and heads of the models of the weak scaling, whose heads are 96 wide, by the
# number of devices that tensor parallelism takes; and the published percentages of the rate of 1.2B
# on one device, with that many devices and with 64 times as many.
WEAK_SIZES = {1: ("1.2B", (40, 1536, 16)), 2: ("2.5B", (54, 1920, 20)),
              4: ("4.2B", (64, 2304, 24)), 8: ("8.3B", (72, 3072, 32))}  # fmt: skip
WEAK_PUBLISHED = {1: (100, 96), 2: (95, 83), 4: (82, 79), 8: (77, 74)}


def weak_scaling() -> list[Found]:
    """Predicts the weak scaling of Shoeybi et al. 2019: model parallel, and with 64 replicas."""
    rates: dict[tuple[int, int], float] = {}
    for replicas in (1, 64):
        for cols, (name, sizes) in WEAK_SIZES.items():
            row = _megatron_row(name, sizes, "hardware TFLOP/s", 1, cols=cols, dp=replicas)
            rates[cols, replicas] = _priced(record(row))
    found = []
    for (cols, replicas), rate in rates.items():
        if cols * replicas == 1:
            continue  # what the others are relative to
        published = WEAK_PUBLISHED[cols][replicas > 1]
        name = WEAK_SIZES[cols][0]
        found.append(
            Found(
                WEAK,
                f"{name} on {cols * replicas} devices against 1.2B on one",
                DGX2H,
                float(published),
                "% of its rate a device",
                100 * rate / rates[1, 1],
                SCALING,
            )
        )
    return found


def _at_scale() -> list[Found]:
    """Returns tensor and pipeline parallelism against ZeRO-3, with 175B to 1T parameters."""
    own: list[Found] = []
    three_d: list[Found] = []
    simulated: list[Found] = []
    rivals: dict[tuple[str, bool], tuple[float, float]] = {}
    for case in megatron.scale():
        row = case.row()
        recorded = record(row)
        found = megatron.Result(case, price(recorded, cluster_of(row)), row.run.layout.n_processes)
        size = case.name.partition(",")[0]
        # Rivals have the same number of devices, but for 560 against 640 in one pair.
        place = size, found.devices > 1000
        if "ZeRO-3" not in case.name:
            rivals[place] = case.published, found.tflops
            three_d.append(_rate(THREE_D, found, None, ""))
            continue
        then = replace(recorded, recorded=as_deepspeed(recorded.recorded, cluster_of(row)))
        as_then = replace(found, found=price(then, cluster_of(row)))
        against, predicted_there = rivals[place]
        for group, one, several, note in (
            (
                ZERO,
                as_then,
                simulated,
                "simulated: a message a matrix, none hidden, and copies for each rank",
            ),
            (ZERO_OWN, found, own, "other code: hides its messages behind computation"),
        ):
            right = same_winner(against / case.published, predicted_there / one.tflops)
            several.append(_rate(group, one, right, note))
    return [*three_d, *simulated, *own]


def _rate(group: str, one: megatron.Result, right: bool | None, note: str) -> Found:
    case = one.case
    return Found(
        group, case.name, SELENE, case.published, "TFLOP/s", one.tflops, megatron.PAPER, right, note
    )


def _best() -> list[Found]:
    found = []
    for batch, cases in megatron.tensor_or_pipeline().items():
        results = [megatron.run(case) for case in cases]
        best = max(results, key=lambda one: one.tflops).case.name
        name = f"162.2B on 64 devices, batch {batch}, stages x tensor-parallel devices"
        found.append(Found(BEST, name, SELENE, "8 x 8", "", best, megatron.PAPER, best == "8 x 8"))
    return found


def _gpt3() -> list[Found]:
    """Returns the strong scaling of GPT-3, which takes 1,152 sequences a step on all devices."""
    found = []
    for devices, published in ((96, 47.0), (4608, 42.0)):
        dp = devices // 32
        layout = {
            "scheme": "megatron",
            "cols": 4,
            "pp": 8,
            "stages_per_rank": 12,
            "dp": dp,
            "dp_mode": "fsdp",
            "reshard": "step",
            "micro_batches": 1152 // dp,
            "sequence_parallel": True,
            "devices_per_node": 8,
        }
        train = {"global_batch": 1152, "dtype": "bfloat16"}
        run = gpt((96, 12288, 96, 2048, 131072), layout, train)
        row = Row(f"GPT-3 on {devices}", H100, published, "MFU", run, README, fused_attention=True)
        found.append(
            Found(
                GPT3,
                f"GPT-3 175B on {devices:,} devices",
                H100,
                published,
                "% of the peak",
                _priced(record(row)),
                README,
                None,
                "tensor-parallel size 4, 8 stages in 12 parts and s=2048 are assumed",
            )
        )
    return found


def _torchtitan() -> list[Found]:
    """Returns Llama 3.1 8B in eager mode, with FSDP on 8 and 128 devices."""
    note = "recomputation by operator, put together from two modes; see below"
    where, unit = torchtitan.MACHINE.stem, "tokens/s a device"
    source, cluster, found = torchtitan.SOURCE, load_cluster(torchtitan.MACHINE), []
    for n, published in torchtitan.PUBLISHED.items():
        name, rate = f"Llama 3.1 8B, FSDP, eager, {n} devices", torchtitan.Traced(n).rate(cluster)
        found.append(Found(TITAN, name, where, published, unit, rate, source, None, note))
    return found
