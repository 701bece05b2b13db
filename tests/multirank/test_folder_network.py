"""A network of transformers under the trainer's parts: every layout against one device, and that
against transformers itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from gridformer.config.model import sizes_of_folder
from tests.support.multirank.exactness import compare
from tests.support.multirank.matrix import SETTINGS
from tests.support.multirank.pool import WorkerPool

LAYERS = 5
GRID = {"rows": 2, "cols": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "megatron": {"scheme": "megatron", "cols": 2},
    "megatron s": {"scheme": "megatron", "cols": 2, "sequence_parallel": True, "dp": 2},
    "megatron_2d": {"scheme": "megatron_2d", **GRID},
    "optimus": {"scheme": "optimus", **GRID},
    "fsdp": {"dp": 2, "dp_mode": "fsdp"},
    "optimus fsdp": {"scheme": "optimus", **GRID, "dp": 2, "dp_mode": "fsdp"},
    "pipeline": {"pp": 2, "micro_batches": 4},
    "interleaved": {
        "pp": 2,
        "micro_batches": 4,
        "stages_per_rank": 2,
        "scheme": "megatron",
        "cols": 2,
    },
    "pipeline of grids": {"pp": 2, "micro_batches": 2, "scheme": "optimus", **GRID},
    "pipeline s": {"pp": 2, "micro_batches": 2, "scheme": "megatron_2d", **GRID},
}


def save_llama(folder: Path, **changes: Any) -> Path:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **{
            **{"vocab_size": 89, "hidden_size": 48, "intermediate_size": 96},
            **{"num_hidden_layers": LAYERS, "num_attention_heads": 12, "num_key_value_heads": 4},
            **{"max_position_embeddings": 24, "tie_word_embeddings": False, **changes},
        }
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    parent = tmp_path_factory.mktemp("folders")
    return {
        tied: save_llama(parent / str(tied), tie_word_embeddings=tied) for tied in (False, True)
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_one_device(pool: WorkerPool, folders: dict[bool, Path], layout: str) -> None:
    keys, settings = LAYOUTS[layout], dict(SETTINGS)
    if "pp" in keys or "fsdp" in layout:
        settings["recompute"] = "full"
    n = keys.get("rows", 1) * keys.get("cols", 1) * keys.get("dp", 1) * keys.get("pp", 1)
    model = sizes_of_folder(str(folders["pipeline" in layout]))
    with pool.limit(280.0):  # each process imports transformers at first
        worst = pool.run(n, compare, keys, model, settings, 3)
    assert max(max(one.values()) for one in worst) < 1e-9, worst
