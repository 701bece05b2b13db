"""Running a plan: its processes, and what each of them does."""

from __future__ import annotations

from gridformer.launch import close_world, init_world, launch
from gridformer.train.plan import Plan
from gridformer.train.trainer import Trainer


def execute(plan: Plan) -> None:
    """Start the run's processes and wait for them; a run that is done already is left alone."""
    if plan.done:
        print(
            f"{plan.out} has done {plan.resume_step} of {plan.run.train.steps} steps: raise "
            "train.steps to go on, or name another --out"
        )
        return
    launch(worker, (plan,), plan.n_processes)


def worker(plan: Plan) -> None:
    """What every process of a run does."""
    world = init_world(plan.run.train.device, plan.n_processes, plan.run.train.timeout_s)
    try:
        Trainer(plan, world).fit()
    finally:
        close_world()
