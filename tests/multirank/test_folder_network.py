"""Networks of transformers as a family: every layout against one device, and that against
transformers; a run that moves between layouts and becomes a folder again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gridformer.checkpoint.convert.exporting import entries_of_network, export_run
from gridformer.config import LayoutConfig, ModelConfig, RunConfig, parse_run
from gridformer.config.model import sizes_of_folder
from gridformer.mesh import Axes
from gridformer.parallel.build import build_parallel
from gridformer.parallel.validation import check_layout
from gridformer.prove import in_float64
from gridformer.train.plan import Plan
from gridformer.utils.errors import ConfigError
from tests.support.foreign import save_llama
from tests.support.marks import extra, full_unless
from tests.support.multirank import own_networks
from tests.support.multirank.exactness import compare, worst_of
from tests.support.multirank.matrix import SETTINGS
from tests.support.multirank.nccl_path import on_nccl
from tests.support.multirank.pool import WorkerPool
from tests.support.multirank.runs import TRAIN, assert_same_run, plan_for, start_from, train

transformers = extra("transformers")
GRID = {"rows": 2, "cols": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "megatron": {"scheme": "megatron", "cols": 2},
    "megatron s": {"scheme": "megatron", "cols": 2, "sequence_parallel": True, "dp": 2},
    "megatron_2d": {"scheme": "megatron_2d", **GRID},
    "optimus": {"scheme": "optimus", **GRID},
    "rows over s": {"scheme": "optimus", **GRID, "rows_over": "sequence"},
    "rows over s fsdp": {"scheme": "megatron_2d", **GRID, "rows_over": "sequence", "dp": 2,
        "dp_mode": "fsdp"},
    "fsdp": {"dp": 2, "dp_mode": "fsdp"},
    "optimus fsdp": {"scheme": "optimus", **GRID, "dp": 2, "dp_mode": "fsdp"},
    "branches": {"scheme": "subgraph", "branches": 2, "dp": 2},
    "branches fsdp": {"scheme": "subgraph", "branches": 2, "dp": 2, "dp_mode": "fsdp"},
    "pipeline of branches": {"scheme": "subgraph", "branches": 2, "pp": 2, "micro_batches": 2},
    "pipeline": {"pp": 2, "micro_batches": 4},
    "interleaved": {"pp": 2, "micro_batches": 4, "stages_per_rank": 2, "scheme": "megatron",
        "cols": 2},
    "zero bubble": {"pp": 2, "micro_batches": 4, "pipeline": "zb_h1", "scheme": "megatron",
        "cols": 2},
    "V": {"pp": 2, "micro_batches": 4, "stages_per_rank": 2, "pipeline": "zbv",
        "scheme": "megatron", "cols": 2},
    "pipeline of grids": {"pp": 2, "micro_batches": 2, "scheme": "optimus", **GRID},
    "pipeline s": {"pp": 2, "micro_batches": 2, "scheme": "megatron_2d", **GRID},
}  # fmt: skip

# Their messages take NCCL's path.
ON_NCCL = {"megatron s", "megatron_2d", "optimus", "optimus fsdp", "branches fsdp"}
ON_NCCL |= {"fsdp", "interleaved"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    parent = tmp_path_factory.mktemp("folders")
    return {
        tied: save_llama(parent / str(tied), tie_word_embeddings=tied) for tied in (False, True)
    }


QUICK = ("megatron s", "optimus", "rows over s", "branches fsdp", "interleaved", "pipeline")


@pytest.mark.parametrize("layout", full_unless(lambda layout: layout in QUICK, LAYOUTS))
def test_equals_one_device(pool: WorkerPool, folders: dict[bool, Path], layout: str) -> None:
    keys, settings = LAYOUTS[layout], dict(SETTINGS)
    if "pp" in keys or "fsdp" in layout:
        settings["recompute"] = "full"
    if layout in ("optimus", "branches fsdp"):
        settings["optimizer"] = "muon"
    n = LayoutConfig(**keys).n_processes
    model = sizes_of_folder(str(folders["pipeline" in layout]))
    how = (on_nccl, compare) if layout in ON_NCCL else (compare,)
    worst_of(pool.run(n, *how, keys, model, settings, 2))


SIZES = {"vocab_size": 89, "hidden_size": 48, "num_hidden_layers": 2, "pad_token_id": 0}
HEADS = {"num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": 96}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", {**SIZES, **HEADS}),
    "Qwen3, norms of heads": ("Qwen3ForCausalLM", {**SIZES, **HEADS, "head_dim": 8}),
    "Phi3, fused products": ("Phi3ForCausalLM", {**SIZES, **HEADS}),
    "Mistral, a window": ("MistralForCausalLM", {**SIZES, **HEADS, "sliding_window": 5}),
    "Mixtral, experts": ("MixtralForCausalLM", {**SIZES, **HEADS, "num_local_experts": 3}),
    "Mixtral, two experts": ("MixtralForCausalLM", {**SIZES, **HEADS, "num_local_experts": 2}),
    "Gemma2, soft caps": ("Gemma2ForCausalLM", {**SIZES, **HEADS, "head_dim": 8}),
    "Apertus, buffers with weights": ("ApertusForCausalLM", {**SIZES, **HEADS}),
}


def save(folder: Path, name: str, values: dict[str, Any]) -> Any:
    """Save a network of transformers with random weights, and return it in float64."""
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    network = kind(kind.config_class(**values, max_position_embeddings=24))
    for part in network.modules():
        if hasattr(part, "beta"):  # a buffer that is part of the weights
            part.beta.add_(0.25)
    network.save_pretrained(folder)
    return network.double().train()


@pytest.mark.parametrize("name", OTHERS)
def test_one_device_equals_transformers(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No plan of transformers has fused products whose columns are dealt out; Phi-3's could.
    plan = dict(transformers.Phi3Config.base_model_tp_plan)
    plan |= {"layers.*.mlp.gate_up_proj": "packed_colwise", "layers.*.mlp.down_proj": "rowwise"}
    monkeypatch.setattr(transformers.Phi3Config, "base_model_tp_plan", plan)
    theirs = save(tmp_path, *OTHERS[name])
    theirs.set_experts_implementation("eager")  # expert by expert
    config = ModelConfig(**sizes_of_folder(str(tmp_path)))
    model = build_parallel(config, LayoutConfig(), Axes(), 0, torch.device("cpu"), "float64")
    rotates = any("forward" in vars(part) for part in model.modules())
    assert rotates != name.startswith("Phi3"), "which does not rotate all of a head"
    tokens = torch.randint(89, (4, 13), generator=torch.Generator().manual_seed(1))
    rows = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:].contiguous()}
    with in_float64():
        logits = theirs(input_ids=rows["tokens"], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows["targets"].flatten())
        loss.backward()
        ours = model.losses(rows)["tokens"] / rows["targets"].numel()
        ours.backward()
    written = {entry.ours: entry.form.theirs for entry in entries_of_network(config)}
    network: Any = model
    read, orders = network.initial_values(0), network.orders
    assert len(orders) == 2 * name.startswith(("Phi3", "Mixtral"))
    for p_name, p in theirs.named_parameters():
        assert torch.equal(written[p_name](read(p_name))[0].double(), p), "an export undoes it"
    assert float(ours.detach()) == pytest.approx(float(loss.detach()), rel=1e-12)
    found = {name: p.grad for name, p in model.named_parameters()}
    for p_name, p in theirs.named_parameters():
        want = p.grad
        assert want is not None
        if p_name in orders:
            want = want.index_select(*orders[p_name])
        assert (found[p_name] - want).abs().max() < 1e-12, p_name


def test_products_in_layers_that_are_gathered_stay_so(pool: WorkerPool, tmp_path: Path) -> None:
    """The loss reads sharded logits, and Phi-3 slices what its fused products return."""
    save(tmp_path, "Phi3ForCausalLM", {**SIZES, **HEADS})
    model = sizes_of_folder(str(tmp_path))
    with pool.limit(280.0):
        worst_of(pool.run(2, compare, {"scheme": "megatron", "cols": 2}, model, dict(SETTINGS), 2))


MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "a window, rows over s": ("Mistral, a window",
        {"scheme": "megatron_2d", **GRID, "rows_over": "sequence"}),
    "experts, rows over s": ("Mixtral, experts",
        {"scheme": "optimus", **GRID, "rows_over": "sequence"}),
    "experts, stages without layers": ("Mixtral, experts",
        {"scheme": "megatron", "cols": 2, "sequence_parallel": True, "pp": 4, "micro_batches": 2}),
    "experts, over columns and replicas of stages": ("Mixtral, experts",
        {"scheme": "megatron", "cols": 2, "pp": 2, "dp": 2, "micro_batches": 2, "dp_mode": "fsdp",
            "experts_over": ["cols", "dp"]}),
    "experts, over rows that divide sequences": ("Mixtral, experts",
        {"scheme": "optimus", **GRID, "rows_over": "sequence", "experts_over": ["rows"]}),
    "experts, over groups of replicas": ("Mixtral, experts",
        {"dp": 4, "dp_mode": "fsdp", "experts_over": ["dp"], "experts_dp": 2}),
    **{
        f"experts, of which replicas have rows, {mode}": (
            "Mixtral, two experts",
            {"scheme": "megatron", "cols": 2, "dp": 4, "dp_mode": mode},
        )
        for mode in ("fsdp", "zero1")
    },
}  # fmt: skip


@pytest.mark.parametrize("case", MORE)
def test_other_networks_equal_one_device(pool: WorkerPool, tmp_path: Path, case: str) -> None:
    name, layout = MORE[case]
    save(tmp_path, *OTHERS[name])
    n, model = LayoutConfig(**layout).n_processes, sizes_of_folder(str(tmp_path))
    if "experts" in case:
        assert model["ffn_size"] == 2 * 96, "estimates count a token's two experts"
    with pool.limit(280.0):
        # Experts travel as they do over NCCL.
        how = (on_nccl,) * ("experts" in case)
        settings = SETTINGS | ({"recompute": "full"} if "experts_over" in layout else {})
        found = pool.run(n, *how, own_networks.in_double, compare, layout, model, settings, 2)
        worst_of(found)


@pytest.mark.parametrize("name", ["Granite", "NanoChat", "Gemma2"])
def test_what_surrounds_layers_runs_once(pool: WorkerPool, tmp_path: Path, name: str) -> None:
    """Granite scales embeddings, and NanoChat normalizes them as it does the last hidden states.

    Every other layer of Gemma 2 has a window, by its number. The first of the stages has no layers,
    and the last one has the head alone.
    """
    more: dict[str, dict[str, Any]] = {
        "Granite": {"embedding_multiplier": 5.0},
        "Gemma2": {"sliding_window": 4},
    }
    save(tmp_path, f"{name}ForCausalLM", {**SIZES, **HEADS, **more.get(name, {})})
    layout, model = {"pp": 4, "micro_batches": 2}, sizes_of_folder(str(tmp_path))
    with pool.limit(280.0):
        worst_of(pool.run(4, compare, layout, model, dict(SETTINGS), 2))


def a_run(folder: Path, data: Path, layout: dict[str, Any], **changes: Any) -> RunConfig:
    settings = {**TRAIN, "global_batch": 8, "eval_batches": 2, "device": "cpu"}
    sections = {"model": {"folder": str(folder)}, "data": {"path": str(data), "seq_len": 12}}
    return parse_run(
        {"name": "test", **sections, "layout": layout, "train": {**settings, **changes}}
    )


def test_a_run_moves_and_is_exported(pool: WorkerPool, token_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "apertus"
    name, sizes = OTHERS["Apertus, buffers with weights"]
    save(folder, name, {**sizes, "vocab_size": 301})
    one, grid = {"scheme": "megatron", "cols": 2}, {"scheme": "optimus", "rows": 2, "cols": 2}

    def plan(out: str, layout: dict[str, Any]) -> Plan:
        return plan_for(a_run(folder, token_folder, layout), tmp_path / out)

    with pool.limit(280.0):
        pool.run(2, train, plan("whole", one))
        start_from(tmp_path / "whole", tmp_path / "moved")
        pool.run(4, train, plan("moved", grid))
    assert_same_run(tmp_path / "whole", tmp_path / "moved")
    done = export_run(tmp_path / "moved", tmp_path / "exported")
    assert done.architecture == name
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    before = transformers.AutoModelForCausalLM.from_pretrained(folder)
    kept = dict(before.named_buffers())
    assert float(kept["model.layers.1.mlp.act_fn.beta"]) == 0.75
    assert all(torch.equal(kept[n], buffer) for n, buffer in exported.named_buffers())
    moved = [(a - b).abs().max() for a, b in zip(exported.parameters(), before.parameters())]
    assert 0 < max(moved) < 0.1, "five steps change weights a little"


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "heads": ({"scheme": "megatron", "cols": 6}, {}, "16 outputs do not divide by layout.cols=6"),
    "first": ({"scheme": "subgraph", "branches": 2, "common": "first"}, {}, "use common=all"),
    "documents": ({}, {"document_mask": True}, "networks of others read no documents"),
    "key": ({}, {"hidden_size": 64}, "hidden_size=48; leave it out"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(folders: dict[bool, Path], case: str) -> None:
    layout, other, said = REFUSED[case]
    run = {"model": {"folder": str(folders[False])}, "data": {"path": "."}, "layout": layout}
    section = "data" if "document_mask" in other else "model"
    run[section] |= other
    with pytest.raises(ConfigError, match=said):
        check_layout(parse_run(run))
