"""The benchmark of schemes: its counters on known cases, its file and its report."""

from dataclasses import replace
from pathlib import Path

import torch
from benchmarks.common import live_memory, machine
from benchmarks.schemes import cases, group, report, results, traffic


def test_live_memory_counts_storages_and_what_autograd_keeps() -> None:
    """FSDP2 frees and allocates parameters by resizing."""
    x = torch.ones(1000, requires_grad=True)
    with live_memory.LiveMemory([x]) as memory:
        y = x.exp().sin()  # exp keeps its result, which sin keeps as its input
        assert memory.live() == 4000 + 2 * 4000
        y.sum().backward()
        assert memory.live() == 4000 + 4000 + 4000, "x, its gradient and y"
        x.grad = None
        view = y.detach().view(10, 100)[2:]
        del y
        assert memory.live() == 8000, "the view holds the storage"
        view.untyped_storage().resize_(0)
        assert memory.live() == 4000
        view.untyped_storage().resize_(8000)
        view.add_(1)
        assert memory.live() == 12000
    assert memory.peak >= 16000


def test_one_row_of_optimus_moves_what_megatron_moves() -> None:
    size = cases.Size(8, 128, 512, 8, 4)
    forward = traffic.two_dimensional(size, 1, 4, recompute=False, output_stationary=False).forward
    assert forward == traffic.one_dimensional(size, 4, recompute=False).forward
    column = traffic.two_dimensional(size, 4, 1, recompute=False, output_stationary=False)
    kept = traffic.sharded(size, 4, 1, recompute=False, reshard=True)
    assert (column.forward, column.backward) == (kept.forward, kept.backward)


def test_every_variant_fits_every_shape() -> None:
    for processes in cases.PROCESSES:
        for name in cases.SIZES:
            size = cases.Case(name, processes, recompute=False).size
            for variant in group.all_variants(processes):
                assert variant.obstacles(size) == [], (name, variant.name)
    eight_heads = cases.Size(8, 128, 512, 8, 4)
    obstacles = {v.name: v.obstacles(eight_heads) for v in group.all_variants(16)}
    assert obstacles["megatron"] == ["n=8 does not divide by 16"]
    assert obstacles["optimus-auto"] == []


def a_group(**changes: object) -> results.Group:
    row = results.Row("single", "one process", [], 2, [[1.0, 2.0]], [{}, {}], [0.0, 0.0])
    row = replace(
        row,
        formula=[0.0, 0.0],
        live={"parameters": 1, "gradients": 1, "kept": 1, "workspace": 0, "peak": 4},
        worst={"y": 0.0},
    )
    twice = replace(row, name="megatron", title="megatron 1x4", seconds=[[2.0, 4.0]])
    unable = results.Row("megatron-sp", "megatron 1x4, s", ["s=5 does not divide by 4"])
    case = cases.Case("tiny", 4, recompute=False)
    group = results.Group(
        case.key,
        case.describe(),
        "tiny",
        4,
        False,
        {"b": 4, "s": 16, "h": 32, "n": 4, "layers": 2},
        1,
        [row, twice, unable],
        {**machine.describe_machine("benchmarks.schemes")},
    )
    return replace(group, **changes)  # type: ignore[arg-type]


def test_file_of_results(tmp_path: Path) -> None:
    out = tmp_path / "new" / "results.jsonl"
    assert results.read(out) == {}
    results.append(out, a_group())
    with out.open("a") as file:
        file.write('{"key": "tiny/4/ke')  # killed while writing
    results.append(out, a_group(rounds=7))
    (found,) = results.read(out).values()
    assert found.rounds == 7, "the newest line of a group counts"
    case = cases.Case("tiny", 4, recompute=False)
    assert found.covers(case, ["single", "megatron"], 7)
    assert not found.covers(case, ["single", "megatron"], 8)
    assert not found.covers(case, ["single", "optimus-auto"], 7)
    assert not found.covers(cases.Case("tiny", 4, recompute=True), ["single"], 7)
    assert not replace(found, size={**found.size, "b": 8}).covers(case, ["single"], 7)


def test_report() -> None:
    text = report.report([a_group()])
    assert "| megatron | 2.00 |" in text
    assert "| megatron | megatron 1x4 | 2 | 1000.0 | 2000.0 | 3000.0 | 2.00 |" in text
    assert "megatron 1x4, s cannot run: s=5 does not divide by 4" in text
    assert "Nothing" in report.report([])


def test_conclusion_and_figure(tmp_path: Path) -> None:
    """Variants within 0.05 of the fastest are not told apart, and torch's best is named."""
    group = a_group()
    reference, megatron, unable = group.rows
    other = replace(megatron, name="optimus-auto", seconds=[[2.0, 4.1]])
    theirs = replace(megatron, name="torch-tp", seconds=[[3.0, 6.0]])
    group = replace(group, rows=[reference, theirs, megatron, other, unable])
    found = report.conclusion([group, replace(group, processes=1)])
    assert found.splitlines()[2:] == [
        "- tiny, 4 processes: megatron, optimus-auto are the fastest (2.00 to "
        "2.03); torch's best, torch-tp, takes 1.50 times as long as our best, megatron; torch-tp "
        "is the slowest (3.00)."
    ]
    report.draw([group], tmp_path / "ratios.png")
    assert (tmp_path / "ratios.png").read_bytes().startswith(b"\x89PNG")
