"""Trains every architecture of transformers with a plan on several layouts, and in one process.

    nice python -m benchmarks.coverage --out docs/results/coverage.md

Networks are small and random, and the processes are on the CPU. It takes about an hour.
"""

from __future__ import annotations

import argparse
import re
import sys
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers
from tests.support.multirank.pool import WorkerPool

from benchmarks.common.machine import describe_machine
from benchmarks.common.page import write_page
from benchmarks.coverage import measured
from benchmarks.coverage.networks import architectures, build, first_that_runs
from gridformer.config import LayoutConfig
from gridformer.exactness import EQUAL
from gridformer.prove import check_with_inputs
from gridformer.utils.errors import ConfigError

LAYOUTS: dict[str, dict[str, Any]] = {
    "Megatron 1x2": {"scheme": "megatron", "cols": 2},
    "2-D Megatron 2x2": {"scheme": "megatron_2d", "rows": 2, "cols": 2},
    "Optimus 2x2": {"scheme": "optimus", "rows": 2, "cols": 2},
    "D&SP 2": {"scheme": "subgraph", "branches": 2},
    "fsdp=2": {"dp": 2, "dp_mode": "fsdp"},
    "pp=2": {"pp": 2, "micro_batches": 4},
}
REMEDY = re.compile(r"(: use |: give |: put |: set |; use |\. Give |, whose ).*", re.DOTALL)


def cell(pool: WorkerPool, name: str, changes: dict[str, Any], layout: dict[str, Any]) -> str:
    """Returns equal, or refused, error or wrong, a colon and why or what."""
    made: tuple[Any, Any] = build(name, changes)
    module, inputs = made
    n = LayoutConfig(**layout).n_processes
    try:
        check_with_inputs(module, inputs, LayoutConfig(**layout))
        said = pool.run(n, measured.of_module, name, changes, layout)
    except ConfigError as error:
        return f"refused: {short(error.problems[0])}"
    except Exception as error:
        return f"error: {traceback.format_exception_only(error)[-1].strip().splitlines()[-1]}"
    return next((text for text in said if text != "equal"), "equal").replace("|", "/")


def short(problem: str) -> str:
    """Returns a sentence of a refusal without its remedy, and without the place."""
    text = re.sub(r"folder=\S+: ", "", REMEDY.sub("", problem))
    text = re.sub(r"^[\w.*\[\]]+: ", "", text)
    text = re.sub(
        r"\b(?:\w+\.)+(?:\d+|\*)\.([\w.]+?)(?:\.weight)?( and \d+ more)?(?=[\s:])", r"\1", text
    )
    return text.replace("|", "/").replace("\n", " ")


def rows_of(names: list[str]) -> dict[str, list[str]]:
    """Returns the cells of each architecture; one cell if it could not be built."""
    found: dict[str, list[str]] = {}
    pool = WorkerPool(timeout_s=150.0)
    for name in names:
        try:
            changes = first_that_runs(name)
        except Exception as error:
            text = " ".join(str(error).split()).replace("|", "/")
            found[name] = [f"not built: {type(error).__name__}: {text[:120]}"]
        else:
            found[name] = [cell(pool, name, changes, layout) for layout in LAYOUTS.values()]
        print(name, found[name], file=sys.stderr, flush=True)
    pool.close()
    return found


def page(found: dict[str, list[str]]) -> list[str]:
    machine = describe_machine("benchmarks.coverage")
    built = {name: cells for name, cells in found.items() if len(cells) > 1}
    counts = Counter(text for cells in built.values() for text in cells if text != "equal")
    numbers = {text: i for i, (text, _) in enumerate(counts.most_common(), 1)}
    heads = ["equal", "refused", "error", "wrong"]
    columns = [Counter(cells[i].partition(":")[0] for cells in built.values()) for i in range(6)]
    totals = [
        f"| {word} | " + " | ".join(str(one[word]) for one in columns) + " |" for word in heads
    ]
    rows = []
    for name, cells in found.items():
        if name in built:
            texts = [f"{c.partition(':')[0]} {numbers.get(c, '')}".strip() for c in cells]
        else:
            texts = ["not built", *[""] * (len(LAYOUTS) - 1)]
        rows.append(f"| {name} | {' | '.join(texts)} |")
    title = "| | " + " | ".join(LAYOUTS) + " |\n|---|" + "---|" * len(LAYOUTS)
    right = [
        cells
        for cells in built.values()
        if {text.partition(":")[0] for text in cells} in ({"equal"}, {"equal", "refused"})
    ]
    every = [cells for cells in built.values() if {*cells} == {"equal"}]
    tensor = [cells for cells in built.values() if {*cells[:3], cells[4]} == {"equal"}]
    return [
        "# Architectures of transformers on layouts",
        f"Of {len(found)} architectures that carry a plan for tensor parallelism, {len(built)} "
        f"were built small. {len(right)} of these train as in one process on every layout here "
        f"that does not refuse them (at least one), {len(tensor)} on each of Megatron, 2-D "
        f"Megatron, Optimus and fsdp, and {len(every)} on all six. A layout refuses what its plan "
        "does not allow, with a sentence, before a process starts; errors and wrong numbers must "
        "not occur.",
        "`equal`: the loss, every gradient of the first step, and the weights after three steps of "
        f"AdamW differ by at most {EQUAL:.0e} from those in one process, in float64 "
        "([`gridformer prove`](../how-to/own-network.md)). Networks have 2 layers (4 where one "
        "needs them), 64 wide, 4 heads and 2 of keys (4 where one needs them), random weights and "
        "no dropout. In the one process, attention and experts are those of transformers (`sdpa`, "
        "`eager`). On layouts experts are those of gridformer, and in pipelines attention, too, "
        "where a network asks for a plain one.",
        f"{machine['cpu']}, {machine['cores']} cores; torch {torch.__version__}, transformers "
        f"{transformers.__version__}; {machine['date']}, commit {machine['commit']}",
        f"`{machine['command']}`",
        "## Counts",
        "\n".join([title, *totals]),
        "## Every architecture",
        "Numbers are those of the reasons below.",
        "\n".join([title, *rows]),
        "## Reasons",
        "\n".join(f"{i}. {text}" for text, i in numbers.items()),
        "## Not built",
        "\n".join(
            f"- {n}: {c[0].removeprefix('not built: ')}" for n, c in found.items() if len(c) == 1
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--names", nargs="+", help="of architectures; by default all")
    parser.add_argument("--out", type=Path, help="the page; by default it is printed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    write_page(page(rows_of(options.names or architectures())), options.out)


if __name__ == "__main__":
    main()
