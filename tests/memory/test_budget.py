"""Runs that do not fit are refused before any process starts, with settings that do fit."""

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from gridformer.cli.app import app
from gridformer.config import RunConfig, load_run
from gridformer.launch.plan import plan_run, read_run
from gridformer.memory import budget as fits
from gridformer.memory import room as rooms
from gridformer.memory.budget import fit_problems, nearest, valid_change
from gridformer.memory.estimate import MemoryBreakdown, estimate_rank
from gridformer.memory.ranks import chosen_ranks
from gridformer.memory.room import Room, room_of, upper_bound
from gridformer.models import build_model
from gridformer.parallel.auto import decisions
from gridformer.parallel.auto.cost import Choices
from gridformer.parallel.auto.decisions import Decisions
from gridformer.parallel.validation import check_layout
from gridformer.record.step import KINDS
from gridformer.utils.errors import ConfigError
from gridformer.utils.units import GIB
from tests.support.marks import extra
from tests.support.multirank.memory import a_run

WIDE = {"hidden_size": 96, "n_layers": 4}


@pytest.fixture(autouse=True)
def _no_hurry() -> Iterator[None]:
    """Remove time limits: results must not depend on how fast the machine is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fits, "SEARCH_S", 1e6)
        yield


def peak(run: RunConfig) -> int:
    return estimate_rank(run, 0).peak


def test_proposed_settings_fit() -> None:
    run = a_run({}, WIDE, {"loss_chunk_tokens": 0})
    worst = estimate_rank(run, 0)
    n_bytes = round(0.8 * worst.peak)
    offers = nearest(run, worst, n_bytes)
    assert [{*offer.changes} for offer in offers] == [{"layout.micro_batches"}, {"train.recompute"}]
    for offer in offers:
        other = valid_change(run, offer.changes)
        assert other is not None
        assert peak(other) == offer.peak <= n_bytes
        assert "train.global_batch" not in offer.changes, "the run's numbers stay as they are"


def test_several_settings_together(monkeypatch: pytest.MonkeyPatch) -> None:
    run = a_run({}, {**WIDE, "n_layers": 2}, {"loss_chunk_tokens": 0})
    worst = estimate_rank(run, 0)
    ways: list[dict[str, Any]] = [{"train.recompute": "full"}, {"layout.micro_batches": 2}]
    monkeypatch.setattr(fits, "cheapest_first", lambda run: iter(ways))
    least = min(peak(other) for way in ways if (other := valid_change(run, way)) is not None)
    (together,) = nearest(run, worst, least - 1)
    assert together.changes == ways[0] | ways[1]
    other = valid_change(run, together.changes)
    assert other is not None
    assert peak(other) == together.peak < least
    assert not nearest(run, worst, worst.between // 2), "parameters and moments alone are more"
    monkeypatch.setattr(fits, "cheapest_first", lambda run: iter(ways[:1]))
    again = valid_change(run, ways[0])
    assert again is not None
    (smaller,) = nearest(run, worst, peak(again) - 1)  # the last resort
    assert smaller.changes == {"train.recompute": "full", "train.global_batch": 16}


@pytest.mark.parametrize(
    ("change", "n_layers", "micro_batches", "vocab_size", "fullest"),
    [
        ({"train.loss_chunk_tokens": 64}, 2, 2, 3000, 0),  # empties the last stage
        ({"train.recompute": "full"}, 4, 4, 1600, 1),  # empties the first stage, and leaves logits
    ],
    ids=["first", "last"],
)
def test_every_stage_fits_with_the_proposed_settings(
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, Any],
    n_layers: int,
    micro_batches: int,
    vocab_size: int,
    fullest: int,
) -> None:
    """The change empties the fullest stage, so that the other one holds the most."""
    stages = {"pp": 2, "micro_batches": micro_batches}
    model = {"n_layers": n_layers, "hidden_size": 48, "vocab_size": vocab_size}
    run = a_run(stages, model, {"loss_chunk_tokens": 0})
    again = valid_change(run, change)
    assert again is not None
    before, after = ([estimate_rank(each, rank) for rank in (0, 1)] for each in (run, again))
    worst, most = before[1 - fullest], after[fullest].peak
    assert worst.peak > before[fullest].peak >= most > after[1 - fullest].peak
    monkeypatch.setattr(fits, "cheapest_first", lambda run: iter([change]))
    monkeypatch.setattr(fits, "smaller_batches", lambda run: iter([]))
    one_by_one = lambda run, ranks, made: [estimate_rank(run, r, made) for r in ranks]  # noqa: E731
    monkeypatch.setattr(fits, "estimate_ranks", one_by_one)
    (offer,) = nearest(run, worst, most)
    assert offer.peak == most
    assert nearest(run, worst, most - 1) == []


@pytest.mark.parametrize(
    ("chunk", "fullest"), [(0, 1), (64, 0)], ids=["the last stage", "the first stage"]
)
def test_every_stage_must_fit(monkeypatch: pytest.MonkeyPatch, chunk: int, fullest: int) -> None:
    """All logits at once fill the last stage; in chunks, they leave the first one the fuller."""
    model = {"n_layers": 2, "hidden_size": 48, "vocab_size": 3000}
    run = a_run({"pp": 2, "micro_batches": 2}, model, {"loss_chunk_tokens": chunk})
    needed = [estimate_rank(run, rank).needed for rank in (0, 1)]
    assert needed[fullest] - 1 > needed[1 - fullest]
    monkeypatch.setattr(fits, "refusal", lambda *_: "refused")  # it looks for settings that fit
    assert fit_problems(run, room=Room(needed[fullest], "just enough")) == []
    assert fit_problems(run, room=Room(needed[fullest] - 1, "a byte too few")) == ["refused"]


def test_a_refusal_says_what_there_is_and_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    run = a_run({}, WIDE, {"loss_chunk_tokens": 0})
    monkeypatch.setattr(fits, "room_of", lambda run: Room(10**12, "plenty"))
    monkeypatch.setattr(fits, "estimate_ranks", lambda *_: pytest.fail("the bound said enough"))
    assert fit_problems(run) == []
    monkeypatch.undo()
    size = peak(run)
    monkeypatch.setattr(fits, "room_of", lambda run: Room(size, "just enough"))
    assert fit_problems(run) == []
    monkeypatch.setattr(fits, "room_of", lambda run: Room(round(0.8 * size), "the room is small"))
    (text,) = fit_problems(run)
    assert text.startswith("rank 0 would hold ")
    assert "the room is small: use layout.micro_batches=2 (" in text
    assert len(re.findall(r"\([\d.]+ (MiB|GiB)\)", text)) == 2


def test_copies_of_a_save_under_way_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """They lie beside all else on CPUs, and a run without room for them can save without them."""
    run = a_run({}, WIDE, {"loss_chunk_tokens": 0, "save_every": 1})
    found = estimate_rank(run, 0)
    elements = sum(p.numel() for p in build_model(run.model).parameters())
    assert 12 * elements <= found.saved <= 12.1 * elements  # parameters and two moments
    assert (found.peak, found.needed) == (peak(run), found.peak + found.saved)
    monkeypatch.setattr(fits, "room_of", lambda run: Room(found.needed, "just enough"))
    assert fit_problems(run) == []
    monkeypatch.setattr(fits, "room_of", lambda run: Room(found.peak, "the room is small"))
    (text,) = fit_problems(run)
    assert "of copies while it saves" in text
    assert "use train.async_save=false (" in text
    for without in ({"async_save": False}, {"save_every": 0}, {"save_every": run.train.steps}):
        other = run.model_copy(update={"train": run.train.model_copy(update=without)})
        assert estimate_rank(other, 0).needed == found.peak
        assert fit_problems(other) == []


@pytest.mark.parametrize("layout", [{}, {"scheme": "optimus", "rows": 2, "cols": 2}])
def test_what_can_never_fit_is_refused_at_once(
    layout: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are refused by their parameters alone: no step is run on any setting."""
    run = a_run(layout, WIDE, {})
    monkeypatch.setattr(fits, "estimate_ranks", lambda *_: pytest.fail("a step was run"))
    told: list[str] = []
    monkeypatch.setattr(fits, "room_of", lambda run: Room(1000, "there is no room"))
    (text,) = fit_problems(run, lambda *words: told.extend(words))
    assert not told, "there was nothing to wait for"
    least = int(re.findall(r"use a layout of ([\d,]+) or more devices", text)[0].replace(",", ""))
    matrices = 12 * 96 * 96 * 4 + 96 * run.model.vocab_size
    assert least == -(-16 * matrices // 1000)
    assert f"{16 * matrices / max(1, 4 * bool(layout)) / 2**20:.3g} MiB of parameters" in text


def test_the_estimate_is_printed_before_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search also gives up in time."""
    run = a_run({}, WIDE, {"loss_chunk_tokens": 0})
    size, told = peak(run), []
    monkeypatch.setattr(fits, "room_of", lambda run: Room(round(0.8 * size), "the room is small"))
    monkeypatch.setattr(fits, "SEARCH_S", 0.0)
    tried: list[RunConfig] = []
    estimate_ranks = fits.estimate_ranks

    def counted(run: RunConfig, ranks: list[int], made: Decisions) -> list[MemoryBreakdown]:
        tried.append(run)
        return estimate_ranks(run, ranks, made)

    monkeypatch.setattr(fits, "estimate_ranks", counted)
    (text,) = fit_problems(run, lambda found, doing: told.append((found, doing, len(tried))))
    assert len(tried) == 1
    assert "no setting that was tried within 0 s fits; try " in text
    likely = re.findall(r"try (\S+=\S+) \(by formula about ", text)
    other = valid_change(run, dict(change.split("=") for change in likely))
    assert other is not None
    assert peak(other) < size
    (_, looking, _), (found, searching, before) = told
    assert looking == "checking whether it fits into memory"
    assert found.startswith("It does not fit: rank 0 would hold ")
    assert "0 s at most" in searching
    assert before == 1


def test_the_budget_is_the_setting_or_the_machines_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    run = a_run({}, {}, {"memory_gib": 2.5})
    room = room_of(run)
    assert room is not None
    assert room.n_bytes == round(0.95 * 2.5 * GIB), "estimates leave a margin"
    assert room.why == "train.memory_gib=2.5 leaves 2.38 GiB with 5% to spare"
    monkeypatch.setattr(rooms, "free_memory", lambda: 8 * GIB)
    four = a_run({"scheme": "optimus", "rows": 2, "cols": 2}, {}, {"device": "cpu"})
    room = room_of(four)
    assert room is not None
    assert room.n_bytes == round(0.95 * (2 * GIB - rooms.OWN_CPU))
    monkeypatch.setattr(rooms, "free_memory", lambda: None)
    assert room_of(four) is None


def test_train_refuses_before_any_process_starts(
    token_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sections: dict[str, Any] = {
        "model": {"n_layers": 4, "hidden_size": 64, "n_heads": 4, "max_seq_len": 64},
        "data": {"path": str(token_folder)},
        "layout": {"scheme": "megatron", "cols": 2},
        "train": {"steps": 1, "global_batch": 32, "loss_chunk_tokens": 0, "memory_gib": 0.02},
    }
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(sections))
    monkeypatch.setattr("gridformer.launch.run.launch", lambda *_: pytest.fail("it was started"))
    with pytest.raises(ConfigError) as error:
        plan_run(path, out=tmp_path / "out")
    (text,) = error.value.problems
    assert "train.memory_gib=0.02" in text
    offered = re.search(r"use (\S+=\S+)", text)
    assert offered is not None
    plan = plan_run(path, [offered[1]], out=tmp_path / "out")
    assert plan.n_processes == 2
    assert not (tmp_path / "out").exists()


def test_a_plan_makes_its_decisions_once(
    token_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decisions are made once, although memory is estimated too (the bound is too large)."""
    path = tmp_path / "mine.yaml"
    decided: list[Choices] = []
    sections: dict[str, Any] = {
        "model": {"n_layers": 1, "hidden_size": 16, "n_heads": 2, "max_seq_len": 16},
        "data": {"path": str(token_folder)},
        "train": {"steps": 1, "global_batch": 8, "memory_gib": 0.002},
    }
    path.write_text(yaml.safe_dump(sections))
    wanted = read_run(path)
    assert upper_bound(wanted) > wanted.train.memory_gib * GIB
    decide = decisions.decide

    def counted(*args: Any) -> Choices:
        decided.append(decide(*args))
        return decided[-1]

    monkeypatch.setattr(decisions, "decide", counted)
    plan = plan_run(path, out=tmp_path / "out")
    assert [plan.decisions.choices] == decided


def invoke(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["memory", *words], env={"COLUMNS": "120"})
    if isinstance(result.exception, ConfigError):
        raise result.exception
    return result.exit_code, result.output


DEMO = ["demo", "model.n_layers=1", "model.vocab_size=500", "data.path=no-such-folder"]
DEMO += ["train.global_batch=8"]


def test_the_command_prints_a_table_and_draws_a_page(tmp_path: Path) -> None:
    extra("plotly")
    page = tmp_path / "pages" / "memory.html"
    code, text = invoke(*DEMO, "--html", str(page))
    assert code == 0
    breakdown = estimate_rank(load_run("demo", DEMO[1:]), 0)
    for kind, n_bytes in breakdown.by_kind.items():
        assert re.search(rf"{re.escape(kind)}\s+{n_bytes / 2**20:.3f}", text), kind
    assert f"{breakdown.peak / 2**20:.3f}" in text
    assert breakdown.moment in text
    assert "all 4 alike" in text
    drawn = page.read_text(encoding="utf-8")
    assert all(f'"{kind}"' in drawn for kind in KINDS if kind in breakdown.timeline.bytes_of)
    assert "<h1>demo-4m on optimus 2x2: " in drawn
    assert "<th>rank 0, all 4 alike</th>" in drawn
    assert f"<tr><td>peak</td><td>{breakdown.peak / 2**20:.3f}</td></tr>" in drawn
    assert not re.search(r"<(script|link)[^>]+(src|href)=", drawn), "it needs nothing else"


def test_the_command_says_whether_it_fits() -> None:
    code, text = invoke(*DEMO, "--budget", "1")
    assert (code, "It fits" in text) == (0, True)
    code, text = invoke(*DEMO, "--budget", "0.015")
    assert code == 1
    assert "It does not fit: rank 0 would hold" in text
    assert "use " in text
    on_gpu = load_run("demo", [*DEMO[1:], "train.device=cuda"])
    needed = max(estimate_rank(on_gpu, rank).needed for rank in (0, 1))
    code, text = invoke(*DEMO, "--budget", f"{1.02 * needed / GIB}")
    assert code == 1, "an estimate that leaves no margin does not fit"


@pytest.mark.parametrize(
    ("words", "devices"),
    [((), "CPUs"), (("--budget", "1"), "GPUs"), (("--budget", "1", "train.device=cpu"), "CPUs")],
)
def test_the_command_says_which_devices_it_is_for(words: tuple[str, ...], devices: str) -> None:
    """Copies of a save lie in the same memory on CPUs alone."""
    _, text = invoke(*DEMO, *words)
    assert f", for {devices}" in text
    assert ("with the copies while it saves" in text) == (devices == "CPUs" and bool(words))


def test_ranks_are_chosen() -> None:
    run = a_run({"scheme": "optimus", "rows": 2, "cols": 2}, {}, {})
    assert [*chosen_ranks(run, "")] == [0]
    assert [*chosen_ranks(run, "3,1")] == [3, 1]
    assert [*chosen_ranks(run, "all")] == [0, 1, 2, 3]
    for wrong in ("4", "-1", "one"):
        with pytest.raises(ConfigError, match=r"--ranks .*(0 to 3|0,5,7), or all"):
            chosen_ranks(run, wrong)


def test_a_vocabulary_must_be_known_without_data() -> None:
    with pytest.raises(ConfigError, match=r"set model\.vocab_size"):
        invoke("demo", "data.path=no-such-folder")


def test_sums_in_each_micro_batch_and_parts_over_all_replicas_are_proposed() -> None:
    shared = {"dp": 4, "dp_mode": "fsdp", "shard_over": 2, "micro_batches": 2}
    offers = [*fits.cheapest_first(a_run(shared, {}, {}))]
    assert {"layout.gradient_sync": "micro_batch"} in offers
    assert {"layout.shard_over": 0} in offers


def test_invalid_changes_are_not_tried() -> None:
    run = a_run({}, {}, {})
    for wrong in ({"train.recompute": "twice"}, {"layout.micro_batches": 7}):
        assert valid_change(run, wrong) is None
    check_layout(run)


@pytest.mark.parametrize(("gpus", "device"), [([], "cpu"), ([0, 1], "auto")])
def test_a_run_that_has_no_gpus_is_estimated_without_them(
    monkeypatch: pytest.MonkeyPatch, gpus: list[int], device: str
) -> None:
    """A machine may have GPUs, but fewer than the run has processes."""
    run = a_run({"dp": 2}, {}, {"device": "auto"})
    seen: list[str] = []

    def estimate(run: RunConfig, *_: Any) -> list[Any]:
        seen.append(run.train.device)
        return [SimpleNamespace(needed=0)]

    monkeypatch.setattr(rooms, "gpus_here", lambda *_: gpus)
    monkeypatch.setattr(fits, "room_of", lambda run: Room(1, "a byte"))
    monkeypatch.setattr(fits, "states_of", lambda run: 0)
    monkeypatch.setattr(fits, "estimate_ranks", estimate)
    assert fit_problems(run) == []
    assert seen == [device]


@pytest.mark.parametrize(("shared", "processes"), [(False, 1), (True, 3)])
def test_processes_that_share_a_gpu_share_its_memory(
    monkeypatch: pytest.MonkeyPatch, shared: bool, processes: int
) -> None:
    run = a_run({"dp": 6}, {}, {"device": "cuda"})
    monkeypatch.setattr(rooms, "gpus_here", lambda *_: [0, 1])
    monkeypatch.setattr("gridformer.mesh.gpus.gpus_here", lambda *_: [0, 1])
    monkeypatch.setattr(
        "torch.cuda.get_device_properties", lambda i: SimpleNamespace(total_memory=24 * GIB)
    )
    if shared:
        monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    found = room_of(run)
    assert found is not None
    assert found.n_bytes == round((24 * GIB / processes - rooms.OWN_CUDA) * rooms.USABLE)
    assert ("which 3 processes share" in found.why) == shared
