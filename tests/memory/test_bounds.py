"""Bounds of a run's memory that need no step: refusals at once, and only of what cannot fit."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from gridformer.config import ModelConfig, model_names, shipped_model
from gridformer.memory.budget import cheapest_first, valid_change
from gridformer.memory.quick import states_of, total_states
from gridformer.memory.room import Room, beyond_saving
from gridformer.models import count_parameters
from gridformer.utils.units import GIB
from tests.support.commands import python_alone
from tests.support.multirank.memory import a_run

WIDE = {"hidden_size": 96, "n_layers": 4, "vocab_size": 64, "max_seq_len": 16}
LAYOUTS: list[dict[str, Any]] = [
    {},
    {"scheme": "optimus", "rows": 2, "cols": 2, "dp": 2},
    {"scheme": "megatron", "cols": 4, "pp": 2, "micro_batches": 2},
    {"scheme": "megatron_2d", "rows": 2, "cols": 2},
    {"scheme": "subgraph", "branches": 2, "dp": 2, "dp_mode": "fsdp"},
]


@pytest.mark.parametrize("name", model_names())
def test_matrices_are_nearly_all_parameters(name: str) -> None:
    model = ModelConfig(**({"vocab_size": 30_000} | shipped_model(name)))
    assert 0.98 < model.matrix_elements / count_parameters(model) < 1


@pytest.mark.parametrize("device", ["cpu", "cuda"])  # a GPU's host may hold the optimizer's state
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.get("scheme", "single"))
def test_only_what_nothing_saves_is_refused(layout: dict[str, Any], device: str) -> None:
    """All settings that save memory, together, still hold more than the least that counts."""
    run = a_run(layout, WIDE, {"device": device})
    together: dict[str, Any] = {}
    for change in cheapest_first(run):
        other = valid_change(run, together | change)
        together |= change if other else {}
    saved = valid_change(run, together)
    assert saved is not None
    assert beyond_saving(run, Room(int(states_of(saved)), "it has room")) == []
    (text,) = beyond_saving(run, Room(int(states_of(saved) * 0.3), "it is small"))
    assert "it is small: no setting that saves memory is enough" in text
    least = re.search(r"use a layout of ([\d,]+) or more devices", text)
    assert least is not None
    devices = total_states(run) / (0.3 * states_of(saved))
    assert int(least[1].replace(",", "")) == pytest.approx(devices, rel=0.05, abs=1)


def test_a_model_far_too_large_is_refused_without_torch(token_folder: Path, tmp_path: Path) -> None:
    """The number of bytes is known from the run file; loading torch takes longer than the rest."""
    sections: dict[str, Any] = {
        "model": {"name": "gpt-175b"},
        "data": {"path": str(token_folder), "seq_len": 16},
        "layout": {"scheme": "optimus", "rows": 2, "cols": 2},
        # A build for GPUs is asked whether there are some, and torch has to be loaded for that.
        "train": {"steps": 1, "global_batch": 8, "device": "cpu" if torch.version.cuda else "auto"},
    }
    path = tmp_path / "large.yaml"
    path.write_text(yaml.safe_dump(sections))
    program = (
        "import sys\n"
        "from gridformer.memory import room\n"
        "room.free_memory = lambda: 20 << 30\n"
        "from gridformer.launch.plan import plan_run\n"
        "from gridformer.utils.errors import ConfigError\n"
        "try:\n"
        "    plan_run(sys.argv[1])\n"
        "except ConfigError as error:\n"
        "    print(error, 'torch' in sys.modules)\n"
    )
    found = python_alone("-c", program, path)
    assert found.stdout.endswith(" False\n"), found
    states = re.search(r"would hold (\d+) GiB of parameters, gradients and optim", found.stdout)
    assert states is not None
    assert int(states[1]) == pytest.approx(16 * 174.6e9 / 4 / GIB, rel=0.01)
