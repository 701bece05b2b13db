"""Refuses a run on GPUs whose messages do not fit together, before its processes start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gridformer.config import RunConfig

if TYPE_CHECKING:
    from gridformer.check import Problem
    from gridformer.memory.room import Tell
    from gridformer.parallel.auto.decisions import Decisions

LIMIT_S = 5.0  # no more ranks are traced after this number of seconds


def preflight_problems(run: RunConfig, tell: Tell, decisions: Decisions) -> list[str]:
    """Checks a step of a run that will start on several GPUs, on a few of its ranks.

    `gridformer check` looks at more ranks, and also says what is slow. An error of the step is told
    and refuses nothing: versions of torch differ in what they can do with tensors without memory,
    and a step that raises an error on GPUs, too, ends all processes at once.

    Args:
        run: The checked run.
        tell: Receives a progress message, and errors.
        decisions: The result of `decide_run(run)`.

    Returns:
        The problems, each with its remedy.
    """
    from gridformer.memory.room import on_gpu

    if run.layout.n_processes == 1 or not on_gpu(run):
        return []
    from gridformer.check import check_step

    tell("", "checking that the messages of a step fit together")
    report = check_step(run, decisions, most=0, limit_s=LIMIT_S)
    for one in report.problems:
        if one.kind == "error":
            tell(f"{_sentence(one)}. The run begins all the same, as it may work on GPUs.", "")
    return [_sentence(one) for one in report.problems if one.stops and one.kind != "error"]


def _sentence(problem: Problem) -> str:
    from gridformer.check.problems import KINDS, rank_ranges

    axis = f", axis {problem.axis}" if problem.axis else ""
    return (
        f"{KINDS[problem.kind]} ({rank_ranges(problem.ranks)}{axis}, at {problem.place}): "
        f"{problem.text}; {problem.remedy}"
    )
