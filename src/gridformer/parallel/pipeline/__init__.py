"""Pipelines: successive stages of a model on successive ranks (Narayanan et al. 2021).

partition    where the model is cut
stage_params what a rank holds of it, and what several hold
order        who does what when, and what is sent
stage_io     what is sent from stage to stage
executor     doing it
timeline     how long it took
"""

from gridformer.parallel.pipeline.executor import Executor
from gridformer.parallel.pipeline.partition import stages_of
from gridformer.parallel.pipeline.stage_params import keep_stages, mark_shared
from gridformer.parallel.pipeline.timeline import Event, OnAction, idle_fraction, timed

__all__ = [
    "Event",
    "Executor",
    "OnAction",
    "idle_fraction",
    "keep_stages",
    "mark_shared",
    "stages_of",
    "timed",
]
