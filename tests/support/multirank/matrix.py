"""The exactness matrix: models x schemes x pipeline stages x replica modes x dropout.

`CELLS` are all combinations, on 1 to 16 processes; `QUICK` are some of them, in which every
possible pair of values occurs. `write` makes the table in docs/results/exactness.md.
"""

import functools
import itertools
import json
import textwrap
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gridformer import exactness
from gridformer.config import LayoutConfig, RunConfig, Task
from gridformer.exactness import MODELS, PIPELINES, REPLICAS
from gridformer.parallel.validation import check_layout
from gridformer.utils.errors import ConfigError
from tests.support.multirank.exactness import tiny

LARGEST = 8  # the most processes of a layout whose grid is the larger of two

CHOICE: dict[str, Any] = {"span_head": False, "n_labels": 1}
# What two tasks of fine-tuning leave out of these heads: learning labels, and learning spans.
LEFT_OUT: tuple[dict[str, Any], ...] = ({"span_head": False}, {"n_labels": 0})
# What differs in cells with dropout.
WITH_DROPOUT: dict[str, dict[str, Any]] = {
    "Llama": {"qk_norm": False, "tied_head": True, "qkv_bias": True, "window": 5},
    "BERT, fine-tuned": CHOICE,
    "GPT-2, fine-tuned": {"n_labels": 1},
    "Llama, fine-tuned": CHOICE,
    "T5, fine-tuned": CHOICE,
}
# What the labels of fine-tuned models are in cells with dropout; in the others, they are labels.
TASK_WITH_DROPOUT: dict[str, Task] = {
    "BERT, fine-tuned": "choice",
    "GPT-2, fine-tuned": "regression",
    "Llama, fine-tuned": "choice",
    "T5, fine-tuned": "choice",
}
# In these cells rows hold several documents or pairs, which attention and positions do not leave.
DOCUMENTS = {("GPT-2", True), ("Llama", False), ("Transformer", True), ("T5", False)}
# Each scheme uses the first of its grids if that takes at most 8 processes, else the second.
SCHEMES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "single": ({}, {}),
    "Megatron": ({"scheme": "megatron", "cols": 2},) * 2,
    "Megatron, sequence parallel": ({"scheme": "megatron", "cols": 2, "sequence_parallel": True},)
    * 2,
    "Megatron 2-D": ({"scheme": "megatron_2d", "rows": 2, "cols": 2},
        {"scheme": "megatron_2d", "rows": 2, "cols": 1}),
    "Optimus": ({"scheme": "optimus", "rows": 2, "cols": 2},
        {"scheme": "optimus", "rows": 2, "cols": 1}),
    "D&SP": ({"scheme": "subgraph", "branches": 2},) * 2,
    "D&SP-cSub": ({"scheme": "subgraph", "branches": 2, "common": "first"},) * 2,
    # In cells with dropout, columns shard the sequence instead of the batch.
    "Optimus, stationary weights": (
        {"scheme": "optimus", "rows": 2, "cols": 2, "stationary": "weight"},
        {"scheme": "optimus", "rows": 2, "cols": 1, "stationary": "weight"},
    ),
    "Megatron 2-D, rows over s": (
        {"scheme": "megatron_2d", "rows": 2, "cols": 2, "rows_over": "sequence"},
        {"scheme": "megatron_2d", "rows": 2, "cols": 1, "rows_over": "sequence"},
    ),
    "Optimus, rows over s": ({"scheme": "optimus", "rows": 2, "cols": 2, "rows_over": "sequence"},
        {"scheme": "optimus", "rows": 2, "cols": 1, "rows_over": "sequence"}),
}  # fmt: skip
# Schemes and models added after the quick cells were chosen, in order.
ADDED = ("Megatron 2-D", "Llama", "BERT, fine-tuned")
# Models of which all parts but the heads are in other models, too. Few of their cells are quick.
HEADS = ("GPT-2, fine-tuned", "Llama, fine-tuned", "T5, fine-tuned")
# Models with experts. Those of the first lie over all axes of the scheme and the replicas; those of
# the second are on every device, which the scheme shards.
EXPERTS = ("Experts", "DeepSeek experts")
DROPOUT = (False, True)


class Cell(NamedTuple):
    """One combination. `replicas` is the mode of two replicas, or `none`."""

    model: str
    scheme: str
    pp: int
    replicas: str
    dropout: bool

    @property
    def layout(self) -> dict[str, Any]:
        first, second = (self._on(grid).layout for grid in SCHEMES[self.scheme])
        return first if LayoutConfig(**first).n_processes <= LARGEST else second

    def _on(self, grid: Mapping[str, Any]) -> exactness.Cell:
        if grid.get("stationary") == "weight" and self.dropout:
            grid = {**grid, "sequence_parallel": True}
        if self.model == EXPERTS[0]:
            over = [key for key in ("rows", "cols", "branches") if key in grid]
            over += ["dp"] * (self.replicas != "none")
            grid = {**grid, "experts_over": over}
        return exactness.Cell(self.model, grid, self.pp, self.replicas, self.dropout)

    @property
    def config(self) -> dict[str, Any]:
        changes = WITH_DROPOUT.get(self.model, {}) if self.dropout else {}
        return {**self._on({}).config, **changes}

    @property
    def documents(self) -> bool:
        return (self.model, self.dropout) in DOCUMENTS

    @property
    def task(self) -> Task:
        """Return what the labels of a fine-tuned model are; `auto` for other models."""
        if self.model not in TASK_WITH_DROPOUT:
            return "auto"
        return TASK_WITH_DROPOUT[self.model] if self.dropout else "classify"

    @property
    def title(self) -> str:
        dropout = "dropout" if self.dropout else "no_dropout"
        words = f"{self.model}-{self.scheme}-pp{self.pp}-{self.replicas}-{dropout}"
        return words.replace(", ", "_").replace(" ", "_")


CELLS = [
    Cell(*values) for values in itertools.product(MODELS, SCHEMES, PIPELINES, REPLICAS, DROPOUT)
]


# The quick cells of HEADS: those of schemes that change these heads.
QUICK_HEADS = {
    Cell("GPT-2, fine-tuned", "Megatron, sequence parallel", 1, "none", True),
    Cell("Llama, fine-tuned", "Optimus", 1, "none", False),
    Cell("Llama, fine-tuned", "Optimus", 1, "none", True),
    Cell("T5, fine-tuned", "Megatron, sequence parallel", 1, "none", False),
    Cell("T5, fine-tuned", "D&SP-cSub", 1, "none", True),
}
# One more cell with rows of several pairs, whose numbers processes gather.
QUICK_PAIRS = {Cell("Transformer", "D&SP", 1, "none", True)}
STATIONARY = "Optimus, stationary weights"
QUICK_STATIONARY = {
    Cell("GPT-2", STATIONARY, 2, "none", True),
    Cell("T5", STATIONARY, 1, "none", False),
    Cell("Llama", STATIONARY, 1, "fsdp", False),
    Cell("Llama", STATIONARY, 1, "none", True),
}
# The schemes whose rows divide each sequence, and the quick cells of them: of each kind of family,
# and of all that a row does otherwise.
OVER_SEQUENCE = ("Megatron 2-D, rows over s", "Optimus, rows over s")
QUICK_OVER_SEQUENCE = {
    Cell("GPT-2", "Megatron 2-D, rows over s", 1, "none", True),
    Cell("Llama", "Megatron 2-D, rows over s", 1, "none", False),
    Cell("Llama", "Optimus, rows over s", 1, "none", True),
    Cell("BERT", "Optimus, rows over s", 1, "zero1", True),
    Cell("T5", "Megatron 2-D, rows over s", 2, "none", False),
    Cell("BERT, fine-tuned", "Megatron 2-D, rows over s", 1, "none", True),
}
QUICK_EXPERTS = {
    Cell("Experts", "single", 1, "fsdp", False),
    Cell("Experts", "Megatron, sequence parallel", 2, "none", True),
    Cell("Experts", "Megatron 2-D", 1, "none", False),
    Cell("Experts", "Optimus", 1, "none", False),
    Cell("Experts", "D&SP", 1, "zero1", False),
    Cell("Experts", "D&SP-cSub", 1, "replicate", True),
    Cell("Experts", "Optimus, rows over s", 1, "none", False),
    Cell("DeepSeek experts", "Megatron", 1, "none", False),
    Cell("DeepSeek experts", "Optimus", 1, "none", False),
    Cell("DeepSeek experts", "D&SP-cSub", 1, "zero1", False),
}
# The cells in which every pair of values occurs.
PAIRED = [
    cell
    for cell in CELLS
    if cell.model not in (*HEADS, *EXPERTS) and cell.scheme not in (STATIONARY, *OVER_SEQUENCE)
]


def _quick() -> set[Cell]:
    """Choose few cells in which every pair of values of two dimensions occurs.

    The choice is greedy: it takes the cells with the most new pairs for their time. Cells of a
    scheme or model that was added later come on top, so that the earlier choice stays, but for
    cells whose pairs all occur in others by now.
    """
    chosen: set[Cell] = set()
    for n_added in range(len(ADDED) + 1):
        later = ADDED[n_added:]
        cells = [cell for cell in PAIRED if cell.scheme not in later and cell.model not in later]
        chosen = _chosen(cells, chosen)
    counts = Counter(pair for cell in chosen for pair in _pairs(cell))
    for cell in sorted(chosen, key=lambda cell: (-time_of(cell), cell)):
        if all(counts[pair] > 1 for pair in _pairs(cell)):
            chosen.remove(cell)
            counts.subtract(_pairs(cell))
    return (
        chosen | QUICK_HEADS | QUICK_PAIRS | QUICK_STATIONARY | QUICK_OVER_SEQUENCE | QUICK_EXPERTS
    )


def _chosen(cells: list[Cell], before: set[Cell]) -> set[Cell]:
    """Return these cells, and others that contain the remaining pairs."""
    chosen = {*before}
    pairs = {cell: _pairs(cell) for cell in {*cells, *before}}
    times = {cell: time_of(cell) for cell in cells}
    missing = {pair for cell in cells for pair in pairs[cell]}
    missing -= {pair for cell in chosen for pair in pairs[cell]}
    while missing:
        best = max(cells, key=lambda cell: len(pairs[cell] & missing) / times[cell])
        chosen.add(best)
        missing -= pairs[best]
    return chosen


def _pairs(cell: Cell) -> set[tuple[int, Any, int, Any]]:
    places = itertools.combinations(range(len(cell)), 2)
    return {(i, cell[i], j, cell[j]) for i, j in places}


def time_of(cell: Cell) -> float:
    """Estimate a cell's time in units of what the first process adds; two stacks count twice.

    With many processes, messages on two cores take longer than their number suggests.
    """
    stacks = 2 if cell.model in ("T5", "Transformer") else 1
    n = LayoutConfig(**cell.layout).n_processes
    return 5 + stacks * (n + n * n / 8)


SETTINGS: dict[str, Any] = {**exactness.TRAIN, "dtype": "float64"}
QUICK = _quick()
QUICK_STEPS = 2  # the second is the first with moments and updated copies
# Cells that also run over NCCL's path; every value of every dimension occurs.
QUICK_ON_NCCL = {
    Cell("GPT-2", "Optimus", 1, "none", True),
    Cell("BERT", "Optimus", 1, "fsdp", True),
    Cell("Transformer", "Megatron, sequence parallel", 1, "zero1", True),
    Cell("GPT-2", "Megatron", 1, "none", False),
    Cell("BERT", "D&SP", 2, "replicate", False),
    Cell("GPT-2", "Megatron 2-D", 1, "replicate", False),
    Cell("T5", "D&SP-cSub", 1, "fsdp", True),
    Cell("GPT-2", "single", 4, "none", True),
    Cell("Llama", "Optimus", 1, "none", True),
    Cell("BERT, fine-tuned", "Megatron, sequence parallel", 1, "none", True),
    Cell("Llama", STATIONARY, 1, "none", True),
    Cell("GPT-2", "Optimus, rows over s", 2, "fsdp", False),
    Cell("T5", "Megatron 2-D, rows over s", 2, "none", False),
    Cell("Experts", "Megatron, sequence parallel", 1, "zero1", False),
    Cell("DeepSeek experts", "Optimus", 1, "none", False),
}


def n_of(cell: Cell) -> int:
    return LayoutConfig(**cell.layout).n_processes


def of_one_task(model: dict[str, Any], turn: int) -> dict[str, Any]:
    """Return a model with the heads of one task, which is what a run trains.

    Args:
        model: The settings of a model. Unless they are for fine-tuning, they stay as they are.
        turn: Models of even turns learn labels, others learn spans.
    """
    return model if model.get("token_head", True) else {**model, **LEFT_OUT[turn % 2]}


@functools.cache
def refusal(cell: Cell) -> str:
    """Return why `gridformer train` would refuse a combination, or an empty string."""
    model = tiny(**cell.config)
    run = RunConfig.model_validate(
        {
            "model": model,
            "layout": cell.layout,
            "data": {"path": ".", "task": cell.task},
            "train": {"global_batch": SETTINGS["global_batch"]},
        }
    )
    try:
        check_layout(run)
    except ConfigError as error:
        return "; ".join(error.problems)
    return ""


def remember(path: Path, worst: Mapping[Cell | str, float]) -> dict[Cell | str, float]:
    """Add the results to those in the file at `path`, and return all of them."""
    lines = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    found = {Cell(*key) if isinstance(key, list) else key: value for key, value in lines}
    found = {key: value for key, value in found.items() if key in CELLS or isinstance(key, str)}
    found |= worst
    text = ",\n".join(json.dumps(entry) for entry in found.items())
    path.write_text(f"[\n{text}\n]\n", encoding="utf-8")
    return found


def write(
    path: Path,
    worst: Mapping[Cell, float],
    refused: Mapping[Cell, str],
    others: Mapping[str, float],
    how: str,
) -> None:
    """Write the table with a row for each model and scheme and a column for each pipeline and mode.

    Each entry is the larger of the relative differences without and with dropout. `others` holds
    the results of a ResNeXt, by layout.
    """
    columns = [*itertools.product(PIPELINES, REPLICAS)]
    if not all(cell in worst or cell in refused for cell in CELLS):
        how += " A dash is a cell that has not been run."
    modes = {mode: "" if mode == "none" else f", dp=2 {mode}" for mode in REPLICAS}
    lines = ["# Exactness: every layout against one device", ""]
    lines += [*textwrap.wrap(how, 118, break_on_hyphens=False), ""]
    lines += ["| model | scheme | " + " | ".join(f"pp={p}{modes[m]}" for p, m in columns) + " |"]
    lines += ["|---|---|" + "---|" * len(columns)]
    for model, scheme in itertools.product(MODELS, SCHEMES):
        entries = []
        for pp, replicas in columns:
            cells = [Cell(model, scheme, pp, replicas, dropout) for dropout in DROPOUT]
            if any(cell in refused for cell in cells):
                entries.append("refused")
            elif all(cell in worst for cell in cells):
                entries.append(_short(max(worst[cell] for cell in cells)))
            else:
                entries.append("-")
        lines.append(f"| {model} | {scheme} | " + " | ".join(entries) + " |")
    reasons = sorted(set(refused.values()))
    lines += ["", *(f"- refused: {reason}" for reason in reasons)]
    if others:
        said = "; ".join(f"{_short(value)} with {name}" for name, value in others.items())
        about = (
            "A ResNeXt, whose branches are paths of convolutions, over 5 steps of SGD (largest "
            f"absolute difference): {said}. `gridformer.parallel.branches.parallelize_branches` "
            "places any network with branches on sub-grids; the other schemes, pipelines and "
            "modes of replicas are of transformers."
        )
        lines += ["", *textwrap.wrap(about, 118)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _short(value: float) -> str:
    return f"{value:.0e}".replace("e-0", "e-")
