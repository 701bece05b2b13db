"""Times of `gridformer predict` for layouts drawn at random, the slowest of which are listed."""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

from benchmarks.planner.speed import Case, measure
from gridformer.launch.plan import read_run_without_data
from gridformer.utils.errors import UserError
from gridformer.utils.process import n_cores

BAR_S = 5.0
MOST_DEVICES = 4096
_LISTED = 8
# Runs of a layout that has taken longer than the bar: other machines on the same host may have
# slowed it down.
_AGAIN = 2
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
        {"scheme": scheme, "rows": rows, "cols": cols, "rows_over": over}
        for scheme in ("optimus", "megatron_2d")
        for rows, cols in ((2, 2), (2, 4), (4, 2), (4, 4))
        for over in ("batch", "sequence")
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
        # Samples are divided by it, too.
        width = int(scheme.get("branches", scheme.get("rows", 1)))
        width = 1 if scheme.get("rows_over") == "sequence" else width
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


def seconds_to_load_torch() -> float:
    """Returns how long a process takes that only loads torch, as a measure of the machine."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.perf_counter() - begin


def main(number: int, seed: int) -> None:
    """Prints how long `predict` takes for layouts drawn at random.

    Args:
        number: How many.
        seed: Draws other ones.
    """
    load, loading = os.getloadavg()[0], seconds_to_load_torch()
    drawn = [one for one, _ in zip(layouts(seed), range(number))]
    cases = [Case(n, f"predict {words} --seconds 600 --cluster dgx-h100") for n, words in drawn]
    times = [measure(case) for case in cases]
    within = [sum(took <= BAR_S for took, _ in times)]
    for _ in range(_AGAIN):
        for i, case in enumerate(cases):
            if times[i][0] > BAR_S:
                times[i] = min(times[i], measure(case))
        within.append(sum(took <= BAR_S for took, _ in times))
    found = sorted(((*took, *one) for took, one in zip(times, drawn)), reverse=True)
    print(
        f"{n_cores()} cores; before it began, the load of the machine was {load:.1f} and torch "
        f"took {loading:.1f} s to load. {number} layouts (seed {seed}): {within[0]} took at most "
        f"{BAR_S:g} s at once, {within[-1]} in the fastest of {1 + _AGAIN} runs, which is listed; "
        f"the median is {statistics.median(took for took, _ in times):.1f} s. The slowest:\n"
    )
    print("| devices | gridformer predict ... --cluster dgx-h100 | seconds | of a processor |")
    print("|---|---|---|---|")
    for took, used, n, words in found[:_LISTED]:
        print(f"| {n} | `{words}` | {took:.1f} | {used:.1f} |")
