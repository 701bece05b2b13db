"""Executes a plan: starts its processes, each of which trains."""

from __future__ import annotations

from gridformer.launch import launch
from gridformer.launch.watch import MARGIN_S, Watch
from gridformer.launch.worker_process import end_with_report
from gridformer.mesh.launch_env import joined
from gridformer.mesh.process_group import close_world, init_world
from gridformer.train.numerics import set_numerics
from gridformer.train.plan import Plan
from gridformer.train.trainer import Trainer


def execute(plan: Plan) -> None:
    """Starts the processes of a run and waits for them. A run that is done already is left alone.

    Raises:
        UserError: a worker raised it.
        SystemExit: a worker failed or a signal stopped the run, see `launch`.
    """
    if plan.done:
        place = joined()
        if place and place.rank:
            return
        print(
            f"{plan.out} has done {plan.resume_step} of {plan.run.train.steps} steps: increase "
            "train.steps to continue, or choose another --out"
        )
        return
    launch(worker, (plan,), plan.n_processes)


def worker(plan: Plan) -> None:
    """The entrypoint of every process of a run: joins the process group and trains.

    The process group is destroyed only on success. A rank that fails must report it before it does
    anything that waits for its peers, which may be inside a collective: `launch` reports the
    failure and ends the process.
    """
    train = plan.run.train
    set_numerics(train)
    world = init_world(train.device, plan.n_processes, train.timeout_s + MARGIN_S)
    place, watch = joined(), None
    if place and world.size > 1:
        nccl = world.backend == "nccl"
        watch = Watch(place, train.timeout_s, plan.out, end_with_report, nccl)
    trainer = Trainer(plan, world)
    if watch:
        watch.where.model = trainer.model
    trainer.fit()
    if watch:
        watch.end()
    close_world()
