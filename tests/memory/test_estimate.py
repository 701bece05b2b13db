"""Estimates without measuring: whom a rank represents, and what may be left out."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gridformer.config import RunConfig
from gridformer.data import TokenFolder, resolve
from gridformer.data.prepare.corpus import prepare_corpus
from gridformer.data.prepare.sources import open_sources
from gridformer.memory.estimate import estimate_rank, estimate_ranks
from gridformer.memory.ranks import largest_ranks
from gridformer.memory.room import upper_bound
from gridformer.record.batch import rows_like
from gridformer.record.step import KINDS
from tests.support.data import open_batches, pairs_source
from tests.support.multirank.memory import a_run
from tests.support.tasks import examples

OPTIMUS = {"scheme": "optimus", "rows": 2, "cols": 2}


def test_a_breakdown_adds_up() -> None:
    run = a_run({}, {}, {})
    breakdown = estimate_rank(run, 0)
    assert sum(breakdown.by_kind.values()) == breakdown.peak
    assert set(breakdown.by_kind) <= set(KINDS)
    v, s, h, n = 89, 24, 48, run.model.n_layers
    parameters = v * h + s * h + 2 * h + n * (12 * h * h + 13 * h)
    assert breakdown.by_kind["parameters"] == 4 * parameters
    counters = breakdown.by_kind["optimizer"] - 8 * parameters  # one per tensor
    assert 0 < counters < 4 * 100
    assert breakdown.between == breakdown.by_kind["parameters"] + breakdown.by_kind["optimizer"]
    line = breakdown.timeline
    totals = [sum(at) for at in zip(*line.bytes_of.values())]
    assert max(totals) == breakdown.peak
    assert len(totals) == len(line.times) <= 1500
    assert line.times == sorted(line.times)
    assert [kind for _, kind in line.phases][:3] == ["read the batch", "forward", "backward"]
    assert max(line.bytes_of["gradients"]) == 4 * parameters, "all are there at the update"


def test_activations_are_told_apart_and_recomputation_keeps_few() -> None:
    plain = estimate_rank(a_run({}, {}, {}), 0)
    again = estimate_rank(a_run({}, {}, {"recompute": "full"}), 0)
    kinds = {kind for kind in plain.by_kind if kind.startswith("activations")}
    assert len(kinds) == 5
    assert again.activations < 0.4 * plain.activations
    assert again.peak < plain.peak
    assert again.timeline.bytes_of["recomputed"]
    assert "recomputed" not in plain.timeline.bytes_of


def test_which_ranks_hold_most() -> None:
    grid = a_run({**OPTIMUS, "dp": 2}, {}, {})
    assert largest_ranks(grid) == {0: "all 8 alike"}
    first = a_run({"scheme": "subgraph", "branches": 4, "common": "first"}, {}, {})
    assert largest_ranks(first) == {0: "first sub-grid", 1: "other sub-grids"}
    pipeline = a_run({"pp": 4, "micro_batches": 4}, {"n_layers": 6}, {})
    found = largest_ranks(pipeline)
    assert found[0].startswith("stage 1 of 4")
    assert any("(as " in name for name in found.values()), "equal stages are looked at once"
    peaks = [breakdown.peak for breakdown in estimate_ranks(pipeline, [*found])]
    every = [estimate_rank(pipeline, rank).peak for rank in range(4)]
    assert max(peaks) == max(every)


@settings(max_examples=4)
@given(
    st.fixed_dictionaries(
        {
            "n_layers": st.integers(1, 3),
            "hidden_size": st.sampled_from([8, 64, 192]),
            "n_heads": st.sampled_from([1, 4]),
            "vocab_size": st.sampled_from([50, 3000]),
            "max_seq_len": st.sampled_from([4, 64, 200]),
            "family": st.sampled_from(["gpt2", "bert", "t5", "transformer"]),
            "dropout": st.sampled_from([0.0, 0.1]),
            "attention_dropout": st.sampled_from([0.0, 0.1]),
        }
    ),
    st.sampled_from([1, 8]),
    st.sampled_from(["float32", "float64", "bfloat16"]),
)
def test_the_bound_is_an_upper_bound(model: dict[str, Any], batch: int, dtype: str) -> None:
    run = a_run({}, model, {"global_batch": batch, "dtype": dtype, "loss_chunk_tokens": 0})
    assert estimate_rank(run, 0).peak <= upper_bound(run)


PACKED = {"document_mask": True, "packing": "documents"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders with text, with labeled documents and with pairs."""
    root = tmp_path_factory.mktemp("kinds")
    for label in ("good", "bad"):
        (root / "text" / label).mkdir(parents=True)
        for i in range(30):
            text = " ".join(f"{label} word {i * j}" for j in range(40))
            (root / "text" / label / f"{i}.txt").write_text(text)
    found = {"text": root / "plain", "labeled": root / "labeled", "pairs": root / "pairs"}
    prepare_corpus([pairs_source(60)], found["pairs"], vocab_size=300, val_fraction=0.2)
    sources = open_sources([str(root / "text")])
    prepare_corpus(sources, found["text"], vocab_size=300, val_fraction=0.2)
    sources = open_sources([str(root / "text")], labels_from_folders=True)
    prepare_corpus(sources, found["labeled"], vocab_size=300, val_fraction=0.2)
    for name in ("race", "sts-b", "squad2"):
        found[name] = examples(name, root).path
    return found


@pytest.mark.parametrize(
    ("kind", "model", "data"),
    [
        ("text", {"family": "gpt2"}, {}),
        ("text", {"family": "gpt2"}, {"document_mask": True, "reset_positions": False}),
        ("text", {"family": "llama"}, PACKED),
        ("labeled", {"family": "gpt2", "n_labels": 2}, {}),
        ("text", {"family": "bert"}, {}),
        ("text", {"family": "bert", "sentence_pair": False}, {}),
        ("labeled", {"family": "bert", "n_labels": 2, "sentence_pair": False}, {}),
        ("text", {"family": "t5"}, {"source_len": 24}),
        ("pairs", {"family": "transformer"}, {"source_len": 20}),
        ("pairs", {"family": "t5"}, {"task": "pairs", "source_len": 20, **PACKED}),
        ("race", {"family": "bert"}, {"task": "choice"}),
        ("race", {"family": "llama"}, {"task": "choice"}),
        ("race", {"family": "t5"}, {"task": "choice"}),
        ("sts-b", {"family": "gpt2"}, {"task": "regression"}),
        ("squad2", {"family": "t5"}, {"task": "answer"}),
    ],
)
def test_batches_have_the_shapes_of_real_ones(
    folders: dict[str, Path], kind: str, model: dict[str, Any], data: dict[str, Any]
) -> None:
    sizes = {"n_layers": 1, "hidden_size": 8, "n_heads": 2, "max_seq_len": 24}
    run = RunConfig.model_validate(
        {"model": {**sizes, **model}, "data": {"path": folders[kind], **data}}
    )
    folder = TokenFolder.open(folders[kind])
    run = resolve(run, folder)
    real = open_batches(run, folder, "train").batch(0, slice(0, 3))
    got = rows_like(run, slice(5, 8))
    want = {key: torch.from_numpy(value) for key, value in real.items()}
    assert {key: (x.shape, x.dtype) for key, x in got.items()} == {
        key: (x.shape, x.dtype) for key, x in want.items()
    }


def test_layouts_larger_than_this_machine_need_no_group_here() -> None:
    estimate_rank(a_run({**OPTIMUS, "dp": 2}, {}, {}), 5)
    assert not torch.distributed.is_initialized()


def test_offloaded_moments_are_not_on_the_device() -> None:
    model = {"n_layers": 6}
    plain = estimate_rank(a_run({}, model, {"device": "cuda"}), 0)
    away = estimate_rank(a_run({}, model, {"device": "cuda", "offload": "optimizer"}), 0)
    assert plain.host == 0
    counters = away.by_kind["optimizer"]  # one per tensor
    assert 0 < counters < 4 * 100
    assert away.host == plain.by_kind["optimizer"] - counters
    assert plain.between - away.between == away.host
    on_cpu = estimate_rank(a_run({}, model, {"device": "cpu", "offload": "optimizer"}), 0)
    assert on_cpu.host == 0, "there both memories are one"
