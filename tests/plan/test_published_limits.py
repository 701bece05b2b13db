"""What published runs could hold and what they could not, against what the planner would say."""

from __future__ import annotations

from typing import Any

import pytest

from gridformer.cluster import load_cluster
from gridformer.config import RunConfig, shipped_model
from gridformer.memory.estimate import estimate_ranks
from gridformer.memory.ranks import largest_ranks
from gridformer.parallel.auto.decisions import decide_run
from gridformer.parallel.validation import check
from gridformer.plan.predict import unfused
from gridformer.utils.units import GIB

# The model of Xu et al. 2021 (Optimus) on 64 devices: its 24 layers alone, in float32 with
# recomputation. The table of such a small vocabulary takes next to nothing.
STEM = {
    "n_layers": 24,
    "hidden_size": 8192,
    "n_heads": 128,
    "vocab_size": 64,
    "max_seq_len": 512,
    "dropout": 0.0,
}
OPTIMUS = {"scheme": "optimus", "rows": 8, "cols": 8, "schedule": "broadcast"}
MEGATRON = {"scheme": "megatron", "cols": 64}
# SUPER's own variant of D&SP-cSub: only heads are branches (Jain et al. 2021).
CSUB = {
    "scheme": "subgraph",
    "branches": 4,
    "common": "first",
    "attention": "outside",
    "feed_forward": "common",
}


def fits(cluster: str, model: dict[str, Any], layout: dict[str, Any], batch: int) -> bool:
    """Return whether the fullest rank's tensors fit into a device, as `gridformer plan` asks."""
    recompute = "full" if "hidden_size" in model and model["hidden_size"] == 8192 else "none"
    run = RunConfig.model_validate(
        {
            "model": model,
            "data": {"path": "."},
            "layout": layout,
            "train": {
                "global_batch": batch,
                "device": "cuda",
                "recompute": recompute,
                "sanity_checks": False,
            },
        }
    )
    check(run)
    machine = load_cluster(cluster)
    run = unfused(run, machine)
    decisions = decide_run(run)
    ranks = [*largest_ranks(run, decisions)]
    peak = max(found.peak for found in estimate_ranks(run, ranks, decisions))
    return peak / GIB <= machine.limit_gib


@pytest.mark.full
def test_optimus_holds_480_sequences_on_64_devices_of_16_gb() -> None:
    assert fits("frontera-rtx5000", STEM, OPTIMUS, 480)


@pytest.mark.full
def test_megatron_does_not_hold_480_sequences_there() -> None:
    assert not fits("frontera-rtx5000", STEM, MEGATRON, 480)


@pytest.mark.full
def test_csub_of_t5_large_mod_does_not_fit_16_gb() -> None:
    """One sequence a device. T5's dropout is on attention's probabilities, too."""
    model = {**shipped_model("t5-large-mod"), "attention_dropout": 0.1}
    assert not fits("lassen-v100", model, CSUB, 4)
