"""`layout.reshard: auto` is the setting that it decides for, in every estimate and in the model."""

from typing import Any

import pytest

from gridformer.config import RunConfig
from gridformer.memory.budget import cheapest_first
from gridformer.memory.estimate import estimate_rank
from gridformer.memory.quick import quick_estimate, states_of, total_states
from gridformer.parallel.auto.decisions import decide_run
from gridformer.parallel.validation import violations
from gridformer.utils.units import GIB
from tests.support.multirank.memory import a_run

MODEL = {"hidden_size": 96, "n_layers": 4}
REPLICAS = {"dp": 4, "dp_mode": "fsdp", "micro_batches": 2}


def run_of(reshard: str, memory_gib: float, **layout: Any) -> RunConfig:
    return a_run({**REPLICAS, "reshard": reshard, **layout}, MODEL, {"memory_gib": memory_gib})


@pytest.mark.parametrize(("memory_gib", "is_then"), [(0.002, "layer"), (1.0, "step")])
def test_auto_is_what_it_decides(memory_gib: float, is_then: str) -> None:
    """The model that is built holds as much, and the formulas and the traffic say so, too."""
    auto, then = run_of("auto", memory_gib), run_of(is_then, memory_gib)
    other = run_of("layer" if is_then == "step" else "step", memory_gib)
    assert estimate_rank(auto, 0).peak == estimate_rank(then, 0).peak
    assert estimate_rank(auto, 0).peak != estimate_rank(other, 0).peak
    for number in (quick_estimate, states_of, total_states):
        assert number(auto) == number(then) != number(other)
    assert decide_run(auto).traffic == decide_run(then).traffic != decide_run(other).traffic
    offered = {"layout.reshard": "layer"} in [*cheapest_first(auto)]
    assert offered == (is_then == "step"), "what helps if it does not fit"


@pytest.mark.parametrize("layout", [{}, {"scheme": "megatron", "cols": 2, "pp": 2}])
def test_the_limit_is_where_all_layers_fit(layout: dict[str, Any]) -> None:
    """12 h² elements of each of n layers on c columns and pp stages; a quarter is there anyway."""
    devices = layout.get("cols", 1) * layout.get("pp", 1)
    price = 12 * 96 * 96 * 4 / devices * 4 * (1 - 1 / 4)
    held = decide_run(run_of("layer", 1.0, **layout)).choices.held_bytes
    limit = (held + price) / 0.8 / GIB
    for factor, is_then in ((0.999, "layer"), (1.001, "step")):
        choices = decide_run(run_of("auto", factor * limit, **layout)).choices
        assert choices.reshard == is_then
        (reason,) = (said for said in choices.reasons if said.startswith("reshard:"))
        assert ("once a step" if is_then == "step" else "4 times a step") in reason


def test_without_a_limit_copies_of_layers_take_a_share_of_what_a_device_holds() -> None:
    """Many activations leave room for parameters; nothing but parameters leaves none."""
    few = a_run({**REPLICAS, "reshard": "auto"}, MODEL, {"global_batch": 8})
    many = a_run({**REPLICAS, "reshard": "auto"}, MODEL, {"global_batch": 800})
    assert decide_run(few).choices.reshard == "layer"
    assert decide_run(many).choices.reshard == "step"


def test_auto_is_valid_where_nothing_is_gathered() -> None:
    """It decides nothing there, while `step` is a mistake."""
    replicate = {"dp_mode": "replicate"}
    assert not violations(run_of("auto", 1.0, **replicate))
    assert violations(run_of("step", 1.0, **replicate))
    assert decide_run(run_of("auto", 1.0, **replicate)).choices.reshard == "layer"
