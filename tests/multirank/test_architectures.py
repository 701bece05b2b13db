"""The most used architectures of transformers, made small, on the layouts of the coverage page.

`make test` runs two of the pairs, other ones each day; `make test-all` runs all of them.
"""

from __future__ import annotations

import os
import random
from itertools import product
from typing import Any

import pytest

from tests.support.marks import extra, full_unless
from tests.support.multirank.pool import WorkerPool

extra("transformers")
coverage: Any = pytest.importorskip("benchmarks.coverage.__main__")

NAMES = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi", "phi3"),
    *("olmo", "olmo2", "olmo3", "granite", "starcoder2", "cohere", "cohere2", "gpt_neox", "glm4"),
    *("smollm3", "nemotron", "qwen3_5_text", "llama4_text", "hy_v4", "deepseek_v32", "jamba"),
    *("inkling2_text", "granitemoe"),
)
REFUSED = {
    ("nemotron", "pp=2"): "transformers has no plan for NemotronForCausalLM",
    ("llama4_text", "pp=2"): "transformers has no plan for Llama4ForCausalLM",
    ("hy_v4", "pp=2"): "layers read prev_topk_indices of others, not hidden states alone",
    ("inkling2_text", "pp=2"): "layers read block_states of others, not hidden states alone",
    **{
        ("inkling2_text", layout): "reads block_states, which is whole, beside what devices have"
        for layout in ("2-D Megatron 2x2", "Optimus 2x2")
    },
}
# Those that are refused in every session: no process is started for them.
ALWAYS = {
    ("hrm_text", "pp=2"): "model.L_module.layers and model.H_module.layers are no chain of layers",
    ("gemma3n_text", "pp=2"): "embed_tokens_per_layer looks up tokens, and layers get embeddings",
    ("deepseek_v4", "pp=2"): "layers read input_ids, and get embeddings alone",
    ("qwen4_exp_text", "Optimus 2x2"): "sharded between sections, and it reads columns of what is",
    ("higgs_audio_v2", "2-D Megatron 2x2"): "reads audio_token_mask, which is whole",
    ("llama4_vision_model", "2-D Megatron 2x2"): "tokens between sections, and 17 do not divide by",
}
PAIRS = [*product(NAMES, coverage.LAYOUTS)]
# Their layers read another activation beside one of which devices have a part.
PAIRS += product(
    ("muse_glimmer_assistant", "t5gemma2_decoder", "voxtral_realtime_text"),
    ("2-D Megatron 2x2", "Optimus 2x2", "D&SP 2"),
)
SEED = os.environ["GRIDFORMER_PAIRS"]  # set in conftest.py, equal in all workers of a session
CHOSEN = random.Random(SEED).sample([pair for pair in PAIRS if pair not in REFUSED], 2)


@pytest.mark.parametrize(
    ("name", "layout"),
    full_unless(lambda pair: pair in [*CHOSEN, *ALWAYS], [*PAIRS, *ALWAYS], unpack=True),
)
def test_equals_one_process_or_says_why(pool: WorkerPool, name: str, layout: str) -> None:
    print(f"GRIDFORMER_PAIRS={SEED} runs {CHOSEN}")
    changes = coverage.first_that_runs(name)
    with pool.limit(280.0):
        found = coverage.cell(pool, name, changes, coverage.LAYOUTS[layout])
    said = (REFUSED | ALWAYS).get((name, layout))
    assert found == "equal" if said is None else found.startswith("refused:") and said in found
