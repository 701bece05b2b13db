"""Running a plan: its processes, and what each of them does."""

from __future__ import annotations

from gridformer.launch import launch
from gridformer.mesh.process_group import close_world, init_world
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
    """What every process of a run does.

    The group is left at a good end only. A rank that fails must say so before anything that waits
    for its peers, which may be inside a collective: `launch` reports the failure and ends it.
    """
    world = init_world(plan.run.train.device, plan.n_processes, plan.run.train.timeout_s)
    Trainer(plan, world).fit()
    close_world()
