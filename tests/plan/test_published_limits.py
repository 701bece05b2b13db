"""What published runs could hold and what they could not, against what `predict` says."""

from typing import Any

import pytest
import torch

from gridformer.cluster.file import load_cluster
from gridformer.config import RunConfig, shipped_model
from gridformer.parallel.validation import check_layout
from gridformer.plan.predict import predict
from tests.support.fake_gpu import InProcess
from tests.support.marks import full_unless

# The model of Xu et al. 2021 (Optimus) on 64 devices of 16 GB: its 24 layers alone, in float32 with
# recomputation. The table of such a small vocabulary takes next to nothing.
STEM: dict[str, Any] = {"n_layers": 24, "hidden_size": 8192, "n_heads": 128}
STEM |= {"vocab_size": 64, "max_seq_len": 512, "dropout": 0.0}
OPTIMUS = {"scheme": "optimus", "rows": 8, "cols": 8, "schedule": "broadcast"}
MEGATRON = {"scheme": "megatron", "cols": 64}
# SUPER's own variant of D&SP-cSub: only heads are branches (Jain et al. 2021).
CSUB: dict[str, Any] = {"scheme": "subgraph", "branches": 4, "common": "first"}
CSUB |= {"attention": "outside", "feed_forward": "common"}


def fits(cluster: str, model: dict[str, Any], layout: dict[str, Any], batch: int) -> bool | None:
    torch.set_num_threads(1)
    recompute = "full" if model["hidden_size"] == 8192 else "none"
    train = {"global_batch": batch, "recompute": recompute, "sanity_checks": False}
    sections = {"model": model, "data": {"path": "."}, "layout": layout, "train": train}
    run = RunConfig.model_validate(sections)
    check_layout(run)
    return predict(run, load_cluster(cluster)).fits


# The paper: Optimus holds 480 sequences there, eight times what Megatron holds.
ON_64 = [(OPTIMUS, 480, True), (MEGATRON, 60, True), (MEGATRON, 120, False), (MEGATRON, 480, False)]


@pytest.mark.parametrize(
    ("layout", "batch", "said"), full_unless(ON_64[2:3].__contains__, ON_64, unpack=True)
)
def test_batches_of_optimus_and_megatron_on_64_devices_of_16_gb(
    gpu: InProcess, layout: dict[str, Any], batch: int, said: bool
) -> None:
    assert gpu(fits, "frontera-rtx5000", STEM, layout, batch) is said


@pytest.mark.full
def test_csub_of_t5_large_mod_does_not_fit_16_gb(gpu: InProcess) -> None:
    """One sequence a device. T5's dropout is on attention's probabilities, too."""
    model = {**shipped_model("t5-large-mod"), "attention_dropout": 0.1}
    assert gpu(fits, "lassen-v100", model, CSUB, 4) is False
