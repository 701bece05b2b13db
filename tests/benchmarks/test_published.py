"""The emulated cluster's groups, its layouts, and what it says where it cannot run."""

from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.predicted.machine import demo_runs
from benchmarks.predicted.report import Row, error_lines, mean_error
from benchmarks.published import grids, optimus, scaling
from benchmarks.published import megatron_cases as megatron
from benchmarks.published import super as super_
from benchmarks.published.cases import MODELS, Layout, Machine
from benchmarks.published.comparisons import bubble, comparisons
from benchmarks.published.emulate import cluster_of
from benchmarks.published.lbann import of_lbann
from benchmarks.published.measuring import Kept, groups_of, patterns, sharers_of
from benchmarks.published.plan import PLAN, RACKS

from gridformer.calibrate.device import Measurements
from gridformer.cluster.file import load_cluster
from gridformer.cluster.messages import like_messages
from gridformer.config import RunConfig
from gridformer.parallel.validation import check_layout
from gridformer.record.events import Kernel, Place, Trace


def test_every_rank_is_in_one_group_of_each_pattern_and_links_are_shared_as_predict_says() -> None:
    machine, cluster = Machine(4, 4, 100), load_cluster("frontera-rtx5000")
    assert cluster.node_size == machine.each
    shared = set()
    for members, distance in patterns(machine):
        groups = groups_of(machine, members, distance)
        assert sorted(rank for group in groups for rank in group) == [*range(machine.n)]
        assert sharers_of(machine, groups) == like_messages(cluster, groups[0], groups)
        shared.add(sharers_of(machine, groups))
    assert shared == {1, 2, 4}


def test_all_layouts_are_valid_and_there_are_enough_of_them() -> None:
    layouts = [layout.run(machine) for machine, several in PLAN.items() for layout in several]
    assert len(layouts) >= 20
    assert {run.model.family for run in layouts} == {"gpt2", "t5", "transformer"}
    assert len({name for name, _ in demo_runs()}) == 12


@pytest.mark.parametrize(("what", "column"), [("training", -1), ("inference", -2)])
def test_pages_agree_on_optimus_as_in_the_paper(what: str, column: int) -> None:
    """One ratio on 64 devices, with ranks in nodes as in the paper; gridformer has another one."""
    name, training = f"4x4, as in the paper, {what}; 4 nodes of 4", what == "training"
    assert name in [one.name for one in comparisons() if one.there]
    here, other = (_cells(page) for page in ("published.md", "published-optimus.md"))
    of_64 = [row for row in other if row[0] == "64" and len(row) == (7 if training else 5)]
    assert [row[2] for row in here if row[0] == name] == [row[column] for row in of_64]


def _cells(page: str) -> list[list[str]]:
    text = (Path(__file__).parents[2] / "docs/results" / page).read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in lines]


def test_what_was_measured_is_kept_until_its_run_changes(tmp_path: Path) -> None:
    machine, layout = Machine(2, 1, 200), Layout("dp 2", "GPT-2", {"dp": 2})
    Kept(times={layout.key(machine): [0.5, None]}).write(tmp_path / "kept.json")
    kept = Kept.read(tmp_path / "kept.json")
    assert kept.has(layout, machine)
    assert not kept.has(replace(layout, batch=32), machine)
    assert not kept.has(replace(layout, forward_too=True), machine)


def test_racks_are_a_level_of_the_network_and_their_trunk_is_slower() -> None:
    """A send of 500,000 bytes in 25,000 us reaches 20 MB/s of the 25 MB/s of 200 Mbit/s."""
    cluster = cluster_of(RACKS, _found())
    assert [level.size for level in cluster.levels] == [2, 4, 32]
    assert [level.shared_by for level in cluster.levels][1:] == [2, 4]
    node, trunk = (level.bandwidth_gbps.value for level in cluster.levels[1:])
    assert node == 2 * trunk
    assert cluster.fitted["outer_efficiency"].value == pytest.approx(0.8)


def _found() -> Measurements:
    rows = [["send", 16, 2, 1, 1, 500_000, 500.0], ["send", 16, 2, 2, 1, 500_000, 25_000.0]]
    product = ["float32", 16, 1, 64, 64, 64, "nn", 50.0]
    kernel = ["copy_", "float32", 16, 4096, 5.0]
    found = Measurements(
        {"messages": rows, "products": [product], "memory": [kernel]}, host=[2e-5, 1e-3]
    )
    found.add_host(16)
    return found


@pytest.mark.parametrize(
    ("plain_s", "said"),
    [(3.0, "grid is 2.00 times as fast as plain"), (0.5, "plain is 3.00 times as fast as grid")],
)
def test_the_page_says_which_side_wins_by_the_median_of_pairs(plain_s: float, said: str) -> None:
    """The grid takes 1.5 s, but for one pair in which everything took ten times as long."""
    run = RunConfig.model_validate({"model": MODELS["GPT-2"], "data": {"path": "."}})
    pair = grids.Best(run, "plain", 3.3, 2.0), grids.Best(run, "grid", 1.5, 2.0)
    wins, table, errors = grids.page([pair], [[plain_s, 1.5] * 4 + [10 * plain_s, 15.0]])
    assert f": {said}." in wins
    ratio = f"{plain_s / 1.5:.2f}"
    assert f"| 2.20 | {ratio} ({ratio}, {ratio}) | 1.00 |" in table
    assert errors.startswith("2 cases")


def test_processes_with_parts_of_their_own_share_no_cores() -> None:
    cores = cluster_of(grids.MACHINE, _found()).host.cores
    assert cores is not None
    assert cores.value == grids.MACHINE.n


def test_the_mean_error_counts_both_directions() -> None:
    rows = [Row("high", 1.2, 1.0), Row("low", 0.6, 1.0)]
    assert mean_error(rows) == pytest.approx(0.3)
    assert "worst -40% (low)" in error_lines(rows)


def test_the_runs_of_the_papers_are_valid() -> None:
    cases = [*megatron.scale()]
    cases += [case for some in megatron.tensor_or_pipeline().values() for case in some]
    cases += [case for some in megatron.schedules().values() for case in some.values()]
    cases += [case for some in megatron.stages().values() for case in some]
    for case in cases:
        check_layout(case.row().run)
    assert {case.row().run.layout.n_processes for case in megatron.scale()} >= {384, 1536, 3072}
    for model in super_.MODELS:
        for layout in super_.ways(4).values():
            assert super_.run_of(model, layout, 4).layout.n_processes == 4


@pytest.mark.parametrize(
    ("op", "heads", "keys", "hides", "launches"),
    [("sdpa", 4, 512, 1, 11), ("sdpa", 4, 512, 0, 9), ("sdpa_backward", 3, 128, 1, 9)],
)
def test_kernels_of_super_are_those_of_lbann(
    op: str, heads: int, keys: int, hides: int, launches: int
) -> None:
    """Forward, a head has two products and kernels for scale, mask and softmax.

    Backward it has four products, none of them a recomputation of the scores.
    """
    shape, flop = (2, heads, keys, keys, 32, hides), 4 * 2 * heads * keys * keys * 32
    place = Place("", 0, "", "layers.0.attention")
    whole = Kernel(op, "attention", shape, "float32", flop, 4 * flop // keys, place)
    other = whole._replace(kind="product", op="mm", shape=(1, 8, 24, 32))
    trace = of_lbann(Trace(rank=0, events=[whole, other], update=1))
    *kernels, last = [event for event in trace.events if isinstance(event, Kernel)]
    assert last is other
    assert trace.update == len(kernels) == 4 + heads * launches
    products = [one for one in kernels if one.kind == "product"]
    if op == "sdpa":
        shapes = [one.shape for one in products]
        assert shapes == [(2, keys, keys, 32), (2, keys, 32, keys)] * heads
        assert sum(one.flop for one in kernels) == flop
    else:
        assert len(products) == 4 * heads


@pytest.mark.full
def test_isoefficiency_has_the_exponents_of_the_paper() -> None:
    """Megatron needs work that grows with about the cube of the devices, a grid with p**1.5."""
    found = scaling.isoefficiency(0.8, scaling.flat(load_cluster("frontera-rtx5000")))
    exponents = {kind: scaling.exponent(widths) for kind, widths in found.items()}
    assert 2.8 < exponents["megatron"] < 3.4
    assert 1.4 < exponents["optimus"] < 1.7
    assert 1.4 < exponents["optimus, the paper's broadcasts"] < 1.7


def test_laws_of_scaling_are_fitted() -> None:
    """And bubbles are what a step takes beyond its micro-batches."""
    assert bubble({2: 2.5, 8: 8.5}) == pytest.approx({2: 0.25, 8: 0.0625})
    assert scaling.amdahl({4: 1.0, 16: 1 / (0.1 + 0.9 / 4)}) == pytest.approx(0.1)
    assert optimus.gustafson({4: 1.0, 16: (4 - 0.2 * 3) / 4}) == pytest.approx(0.2)
    assert scaling.exponent({4: 2.0, 16: 8.0}) == pytest.approx(3.0)
