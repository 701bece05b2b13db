"""Times of `gridformer predict` for layouts drawn at random, the slowest of which are listed."""

from __future__ import annotations

import os
import random
import statistics
from collections.abc import Iterator

from benchmarks.planner.speed import Case, measure
from gridformer.launch.plan import read_run_without_data
from gridformer.utils.errors import UserError
from gridformer.utils.hardware import n_cores

BAR_S = 5.0
MOST_DEVICES = 4096
_LISTED = 8
_MODELS = (
    "gpt-1t", "gpt-530b", "gpt-175b", "llama-3.1-405b", "llama-3.1-70b", "qwen3-32b", "mistral-7b",
    "t5-large", "t5-large-mod", "transformer-big", "megatron-8.3b", "turing-nlg-17b", "bert-large",
    "megatron-bert-3.9b",
)  # fmt: skip
_SCHEMES: tuple[dict[str, int | str], ...] = (
    {"scheme": "single"},
    *({"scheme": "megatron", "cols": cols} for cols in (2, 4, 8)),
    *({"scheme": "megatron", "cols": cols, "sequence_parallel": "true"} for cols in (2, 4, 8)),
    *(
        {"scheme": scheme, "rows": rows, "cols": cols}
        for scheme in ("optimus", "megatron_2d")
        for rows, cols in ((2, 2), (2, 4), (4, 2), (4, 4))
    ),
    *({"scheme": "subgraph", "branches": branches} for branches in (2, 4)),
)


def layouts(seed: int) -> Iterator[tuple[int, str]]:
    """Yields valid runs: their number of devices, and what follows `gridformer predict`."""
    draw = random.Random(seed)
    while True:
        scheme = draw.choice(_SCHEMES)
        pp, dp = draw.choice((1, 2, 4, 8, 16, 24, 32, 48, 64)), 2 ** draw.randrange(6)
        micro = draw.choice((1, pp, 3 * pp // 2, 2 * pp, 4 * pp, 8 * pp)) or 1
        width = int(scheme.get("branches", scheme.get("rows", 1)))  # samples are divided by it, too
        settings = {
            **{f"layout.{key}": value for key, value in scheme.items()},
            "layout.pp": pp,
            "layout.stages_per_rank": draw.choice((1, 1, 2, 3)) if pp > 1 else 1,
            "layout.dp": dp,
            "layout.dp_mode": draw.choice(("replicate", "zero1", "fsdp")),
            "layout.micro_batches": micro,
            "train.global_batch": micro * dp * width * draw.choice((1, 2, 4)),
            "train.dtype": draw.choice(("bfloat16", "bfloat16", "float32")),
            "train.recompute": draw.choice(("none", "full", "selective")),
        }
        words = [f"{key}={value}" for key, value in settings.items()]
        model = draw.choice(_MODELS)
        try:
            n = read_run_without_data(model, words).layout.n_processes
        except UserError:
            continue
        if n <= MOST_DEVICES:
            yield n, " ".join([model, *words])


def main(number: int, seed: int) -> None:
    """Prints how long `predict` takes for layouts drawn at random.

    Args:
        number: How many.
        seed: Draws other ones.
    """
    load, found = os.getloadavg()[0], []
    for (n, words), _ in zip(layouts(seed), range(number)):
        took, used = measure(Case(n, f"predict {words} --seconds 600 --cluster dgx-h100"))
        found.append((took, used, n, words))
    found.sort(reverse=True)
    seconds = [one[0] for one in found]
    within = sum(took <= BAR_S for took in seconds)
    print(
        f"{n_cores()} cores; the load of the machine before it began was {load:.1f}. {number} "
        f"layouts (seed {seed}): {within} took at most {BAR_S:g} s, the median "
        f"{statistics.median(seconds):.1f} s. The slowest:\n"
    )
    print("| devices | gridformer predict ... --cluster dgx-h100 | seconds | of a processor |")
    print("|---|---|---|---|")
    for took, used, n, words in found[:_LISTED]:
        print(f"| {n} | `{words}` | {took:.1f} | {used:.1f} |")
