"""Executes a plan: starts its processes, each of which trains."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from gridformer.checkpoint.place import LocalPlace
from gridformer.config import TrainConfig
from gridformer.launch import launch
from gridformer.launch.copy_last import copy_last
from gridformer.launch.failure_cause import out_of_memory
from gridformer.launch.memory_advice import memory_advice
from gridformer.launch.restarts import launch_with_restarts
from gridformer.launch.watch import MARGIN_S, start_watch
from gridformer.launch.worker_process import print_last
from gridformer.mesh.launch_env import Joined, launched_place, use_only
from gridformer.mesh.process_group import close_process_groups, init_process_groups
from gridformer.mesh.rendezvous import store_of
from gridformer.train.callbacks import Callback
from gridformer.train.evaluation import Measure
from gridformer.train.numerics import set_numerics
from gridformer.train.plan import Plan
from gridformer.train.trainer import Trainer
from gridformer.utils.disk import leave_to_callers
from gridformer.utils.errors import SaveError
from gridformer.utils.no_dynamo import without_dynamo
from gridformer.utils.signals import StopPolicy, install

_ENDED = "run/ended"
_LOOK_S = 1.0  # a spare process checks this often whether the run has ended


def execute(plan: Plan, callbacks: Sequence[Callback] = ()) -> None:
    """Starts the processes of a run and waits for them. A run that is done already is left alone.

    Args:
        plan: The run.
        callbacks: Are told what the run does. They are pickled into its first process.

    Raises:
        UserError: A worker raised it.
        SystemExit: A worker failed or a signal stopped the run, see `launch`; or the last
            checkpoint is not at `train.checkpoint_to`, see `copy_last`.
    """
    policy, place = policy_of(plan.run.train), launched_place()
    if plan.done:
        if place and place.rank:
            return
        print(
            f"{plan.out} has done {plan.resume_step} of {plan.run.train.steps} steps: increase "
            "train.steps to continue, or choose another --out"
        )
        copy_last(plan, policy.ends_at)
        return
    work = partial(worker, callbacks=tuple(callbacks)) if callbacks else worker
    if place and place.size > plan.n_processes:
        if place.rank >= plan.n_processes:
            wait_as_spare(place)
            return
        use_only(plan.n_processes)
        try:
            launch(work, (plan,), plan.n_processes, policy)
        finally:
            release_spares(place)
        copy_last(plan, policy.ends_at)
        return
    advise = partial(memory_advice, plan)
    try:
        if plan.run.train.max_restarts and not place:
            launch_with_restarts(work, plan, policy)
        else:
            launch(work, (plan,), plan.n_processes, policy, advise)
    except SaveError as error:  # of a run in this process alone
        print_last(f"gridformer: {error}")
        raise SystemExit(1) from None
    except (MemoryError, RuntimeError) as error:  # the same
        if (means := out_of_memory(error)) is not None:
            print_last(f"rank 0 failed: {means}; {advise()}\n")
        raise
    finally:
        if not place:
            LocalPlace(plan.out).sweep()  # what a killed process was writing
    copy_last(plan, policy.ends_at)


def train(
    run: Path | str,
    overrides: Sequence[str] = (),
    out: Path | None = None,
    callbacks: Sequence[Callback] = (),
) -> None:
    """Trains a run from Python, or resumes it, as `gridformer train` does from the command line.

    A run with several processes starts them on this machine, and each of them imports the script
    that calls this. So the call must be inside `if __name__ == "__main__":`, and `callbacks` must
    be picklable.

    Args:
        run: The path of a run file, or the name of a shipped one.
        overrides: `dotted.key=value` texts.
        out: The run directory; None means `runs/NAME`.
        callbacks: Are told what the run does, in its first process.

    Raises:
        UserError: The run cannot start, see `gridformer.launch.plan.plan_run`, or a worker raised
            it.
        SystemExit: See `execute`.
    """
    from gridformer.launch.plan import plan_run
    from gridformer.launch.run_lock import RunLock

    with RunLock() as lock:
        execute(plan_run(run, [*overrides], out=out, lock=lock), callbacks)


def wait_as_spare(place: Joined) -> None:
    """Waits until a run has ended in which this process, one of too many, does not take part.

    torchrun takes a process that ends for one that is done, and its machine would leave the run.
    """
    stop = install()
    stop.nothing_left_to_save()
    store = store_of(place)
    with suppress(RuntimeError):  # torch's error for a store that is gone
        while not store.check([_ENDED]):
            time.sleep(_LOOK_S)
    stop.uninstall()


def release_spares(place: Joined) -> None:
    """Called on rank 0 when a run has ended: lets processes end that took no part in it."""
    if place.rank == 0:
        store_of(place).set(_ENDED, "yes")


def policy_of(train: TrainConfig) -> StopPolicy:
    """Returns how the processes of a run answer stop signals."""
    ends_at = None if train.max_hours is None else began() + 3600 * train.max_hours
    grace_s, timeout_s = train.stop_grace_s, train.timeout_s
    return StopPolicy(grace_s, train.stop_signals, ends_at=ends_at, timeout_s=timeout_s)


def began() -> float:
    """Returns when this run began (`time.time`): when its first process was started.

    Under torchrun that is torchrun itself, whose workers may be restarted.
    """
    place = launched_place()
    pid = os.getppid() if place and place.by == "torchrun" else os.getpid()
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        up_s = float(Path("/proc/uptime").read_text(encoding="utf-8").split()[0])
        return time.time() - up_s + int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):  # not Linux
        return time.time()


def _measures(plan: Plan) -> list[Measure]:
    """Returns what evaluations measure besides losses; texts are generated by `evaluate`."""
    if not plan.run.train.bleu_every:
        return []
    from gridformer.evaluate.bleu import Bleu

    return [Bleu(plan.run, plan.out)]


def worker(plan: Plan, callbacks: Sequence[Callback] = ()) -> None:
    """The entrypoint of every process of a run: joins the process group and trains.

    The process group is destroyed only on success. A rank that fails must report it before it does
    anything that waits for its peers, which may be inside a collective: `launch` reports the
    failure and ends the process.

    Args:
        plan: The run.
        callbacks: See `execute`.
    """
    train = plan.run.train
    leave_to_callers()
    set_numerics(train)
    world = init_process_groups(train.device, plan.n_processes, train.timeout_s, MARGIN_S)
    watch = start_watch(world, train.timeout_s, plan.out)
    with without_dynamo():
        trainer = Trainer(plan, world, _measures(plan), callbacks)
        if watch:
            watch.where.model = trainer.model
        trainer.fit()
    close_process_groups()
    if watch:
        watch.end()
