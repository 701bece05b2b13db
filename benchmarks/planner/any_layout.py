"""Times of the planner's commands for layouts drawn at random, the slowest of which are listed."""

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

COMMANDS = ("predict", "check", "memory", "plan")
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
    *(
        {
            "scheme": "optimus",
            "rows": n,
            "cols": n,
            "stationary": "weight",
            "sequence_parallel": one,
        }
        for n in (2, 4)
        for one in ("false", "true")
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
        # Samples are divided by it, too, and by columns where weights are stationary.
        width = int(scheme.get("branches", scheme.get("rows", 1)))
        width = 1 if scheme.get("rows_over") == "sequence" else width
        width *= int(scheme["cols"]) if scheme.get("sequence_parallel") == "false" else 1
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


def case_of(command: str, devices: int, words: str) -> Case:
    """Returns the command for a layout; `plan` has its model, devices and batch alone."""
    if command == "plan":
        given = " ".join(word for word in words.split() if "=" not in word or "batch=" in word)
        bar_s = 15 if devices <= 64 else 60
        return Case(devices, f"plan {given} --devices {devices} --cluster dgx-h100", bar_s)
    cluster = " --cluster dgx-h100" if command == "predict" else ""
    return Case(devices, f"{command} {words} --seconds 600{cluster}", 5)


def main(command: str, number: int, seed: int) -> None:
    """Prints how long a command takes for layouts drawn at random.

    Args:
        command: One of COMMANDS.
        number: How many layouts.
        seed: Draws other ones.
    """
    load, loading = os.getloadavg()[0], seconds_to_load_torch()
    cases = [case_of(command, *one) for one, _ in zip(layouts(seed), range(number))]
    times = [measure(case) for case in cases]

    def late() -> list[int]:
        return [i for i, case in enumerate(cases) if times[i][0] > (case.bar_s or 0)]

    at_once = number - len(late())
    for _ in range(_AGAIN):
        for i in late():
            times[i] = min(times[i], measure(cases[i]))
    found = sorted(((*took, *case) for took, case in zip(times, cases)), reverse=True)
    print(
        f"{n_cores()} cores; before it began, the load of the machine was {load:.1f} and torch "
        f"took {loading:.1f} s to load. {number} layouts (seed {seed}): {at_once} within their bar "
        f"at once, {number - len(late())} in the fastest of {1 + _AGAIN} runs, which is listed; "
        f"the median is {statistics.median(took for took, _ in times):.1f} s. The slowest:\n"
    )
    print("| devices | gridformer ... | bar | seconds | of a processor |")
    print("|---|---|---|---|---|")
    for took, used, n, words, bar_s in found[:_LISTED]:
        print(f"| {n} | `{words}` | {bar_s} | {took:.1f} | {used:.1f} |")
