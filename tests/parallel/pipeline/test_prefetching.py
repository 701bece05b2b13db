"""A pass gathers weights early for its own stage only."""

from typing import Any

import pytest

from gridformer.models.blocks import Layer
from gridformer.parallel import build_parallel
from gridformer.parallel.auto.decisions import decide_run
from gridformer.parallel.axes import build_axes
from gridformer.parallel.data.fsdp import Gathering
from gridformer.parallel.tensor.summa import GatheredWeight
from gridformer.record.fake import watched_fakes
from gridformer.record.step import on_devices
from tests.support.multirank.memory import a_run

N_LAYERS = 8
FSDP = {"dp": 2, "dp_mode": "fsdp", "pp": 2, "micro_batches": 2}
GATHER = {"scheme": "optimus", "rows": 2, "cols": 2, "schedule": "gather"}
OPTIMUS = {**GATHER, "pp": 2, "micro_batches": 2}


def chains(layout: dict[str, Any]) -> list[list[int]]:
    """Return the layers of each chain of links of rank 0, the head and the table left out."""
    run = a_run(layout, {"n_layers": N_LAYERS}, {"global_batch": 8})
    decisions = decide_run(run)
    with on_devices(run, 0, backend="gloo") as log:
        axes = build_axes(run.layout, log.device.type, decisions.block)
        with watched_fakes(log):
            how = run.train.seed, log.device, run.train.dtype, decisions.choices, False
            model = build_parallel(run.model, run.layout, axes, *how)
        layer_of: dict[Any, int] = {}
        gathering = getattr(model, "gathering", None)
        for name, layer in model.named_modules():
            if isinstance(layer, Layer):
                number = int(name.rpartition(".")[2])
                if isinstance(gathering, Gathering):
                    layer_of[gathering.layers[len(layer_of)]] = number
                for module in layer.modules():
                    weight = vars(module).get("gathered_weight")
                    if isinstance(weight, GatheredWeight):
                        layer_of[weight] = number
    found = []
    for link in layer_of:
        if link.before not in layer_of:
            found.append([layer_of[link]])
            while link.after in layer_of:
                assert link.after.before is link
                link = link.after
                found[-1].append(layer_of[link])
    return found


@pytest.mark.parametrize(("layout", "n_weights"), [(FSDP, 1), (OPTIMUS, 4)])
def test_weights_of_different_stages_are_not_linked(layout: dict[str, Any], n_weights: int) -> None:
    def times(layers: list[int]) -> list[int]:
        return [layer for layer in layers for _ in range(n_weights)]

    assert chains(layout) == [times([0, 1, 2, 3])]
    assert chains({**layout, "stages_per_rank": 2}) == [times([0, 1]), times([4, 5])]
