"""The times that `benchmarks.gpu single` should measure, said before it measures them.

gridformer in eager mode takes what `gridformer predict` says. The other sides and modes take what
the page of results has for that model, scaled by the number of tokens, except for the update of
the parameters, which does not depend on tokens and is as long as predicted.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.sides import Gridformer
from benchmarks.gpu.step import Mode, Settings
from benchmarks.predicted.predictions import Question, predicting
from gridformer.cluster.file import load_cluster
from gridformer.config import RunConfig

PAGE = Path(__file__).parents[2] / "docs" / "results" / "gpu.md"
Times = dict[tuple[str, Mode], float]


def expected(several: Sequence[Settings], cluster: str) -> list[Times]:
    """Return the predicted seconds of a step by side and mode, for the first batch of each."""
    load_cluster(cluster)  # a wrong name is the user's error
    questions = [Question(_run(settings)) for settings in several]
    with predicting(questions, Path(cluster), len(questions)) as futures:
        answers = [future.result() for future in futures]
    found = []
    for settings, answer in zip(several, answers):
        times: Times = {}
        tokens = settings.batches[0] * settings.s
        update_s = 0.0 if answer.error else answer.step_s - answer.forward_s - answer.backward_s
        for side, (then_s, then) in last_time(settings.config.name).items():
            times[side] = update_s + (then_s - update_s) * tokens / then
        if not answer.error:
            times[Gridformer.name, "eager"] = answer.step_s
        found.append({side: s for side, s in times.items() if side[1] in settings.modes})
    return found


def last_time(model: str) -> dict[tuple[str, Mode], tuple[float, int]]:
    """Return seconds and tokens of a step on the page of results, by side and mode."""
    text = PAGE.read_text(encoding="utf-8")
    section = re.search(
        rf"^## Training step of {re.escape(model)} on one .*?(?=^## |\Z)", text, re.M | re.S
    )
    if section is None:
        return {}
    tokens = re.search(r"T=([\d,]+) tokens", section[0])
    assert tokens is not None
    rows = re.findall(
        r"^\| (.+), (eager|compiled) \|(?:[^|]*\|){2} *([\d,.]+) \|", section[0], re.M
    )
    n = int(tokens[1].replace(",", ""))
    return {(side, mode): (float(ms.replace(",", "")) / 1e3, n) for side, mode, ms in rows}


def _run(settings: Settings) -> RunConfig:
    train = {"global_batch": settings.batches[0], "dtype": settings.dtype, "sanity_checks": False}
    model = settings.config.model_copy(update={"max_seq_len": settings.s})
    return RunConfig.model_validate(
        {"model": model.model_dump(), "data": {"path": "."}, "train": train}
    )
