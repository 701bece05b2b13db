# ruff: noqa: F401
"""Pipeline parallelism: consecutive stages of a model on different ranks (Narayanan et al. 2021).

partition   splits a model into stages
stages      what a rank holds of a model, and the tensors that are sent from stage to stage
schedules   the order of forward and backward passes, and the messages between ranks
executor    runs a schedule
timeline    measures it
"""

from gridformer.parallel.pipeline.executor import LOADING_RUNS, Executor, StopsBefore
from gridformer.parallel.pipeline.partition import stages_of
from gridformer.parallel.pipeline.stages import (
    keep_stages,
    mark_shared,
    modules_of,
    prefetch_within_stages,
)
from gridformer.parallel.pipeline.timeline import Clock, Event, OnAction, idle_fraction, timed
