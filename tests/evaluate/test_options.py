"""`gridformer generate` refuses exactly the options that a model does not use."""

from __future__ import annotations

import pytest

from gridformer.config import Family, ModelConfig
from gridformer.evaluate.generate import check_options
from gridformer.utils.errors import ConfigError

SAMPLING = {"temperature", "top_k", "top_p", "seed"}
SEARCH = {"beams", "length_penalty"}
LOOKED_AT: dict[Family, set[str]] = {
    "gpt2": SAMPLING,
    "bert": set(),
    "t5": SEARCH,
    "transformer": SEARCH,
}


@pytest.mark.parametrize("family", LOOKED_AT)
def test_options_of_other_families_are_refused(family: Family) -> None:
    model = ModelConfig(family=family, n_layers=1, hidden_size=8, n_heads=2)
    check_options(model, sorted(LOOKED_AT[family]))
    for name in SAMPLING | SEARCH:
        if name not in LOOKED_AT[family]:
            with pytest.raises(ConfigError, match=f"this model is a {family}: .*leave it out") as e:
                check_options(model, [name])
            assert e.value.problems[0].startswith(f"--{name.replace('_', '-')} is for ")
