"""Compiled layers launch at least a third less than before blocks were compiled by themselves."""

import pytest
from benchmarks.gpu.launches import BEFORE, LAYOUTS, launches

from tests.support.marks import full_unless

QUICK = [("gpt2", "optimus 2x2"), ("gpt2", "megatron 2-D 2x2"), ("llama", "optimus 2x2, broadcast")]
CELLS = [(model, layout) for model in BEFORE for layout in LAYOUTS]


@pytest.mark.parametrize(
    ("model", "layout"), full_unless(QUICK.__contains__, CELLS, unpack=True), ids=str
)
def test_a_compiled_layer_launches_a_third_less(model: str, layout: str) -> None:
    before = BEFORE[model][[*LAYOUTS].index(layout)]
    kernels, messages = launches(model, layout, compiled=True)
    casts_alone = model == "gpt2" and layout.endswith((", dp 2", "micro-batches"))
    assert kernels + messages <= before * (3 / 4 if casts_alone else 2 / 3)


def test_launches_of_eager_layers_are_counted() -> None:
    """A GPT-2 layer: 12 products, attention both ways, and what lies between them."""
    kernels, messages = launches("gpt2", "single")
    assert (kernels, messages) == (40, 0)
    assert launches("gpt2", "megatron 1x4")[1] == 4
