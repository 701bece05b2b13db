"""Executes a plan: starts its processes, each of which trains, and copies the last checkpoint.

With `train.max_restarts`, a local run that fails goes on from its newest checkpoint. Each attempt
has processes, a folder and a store of its own; the launcher and its lock of the run stay.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from gridformer.checkpoint.checkpoint import check_copy
from gridformer.checkpoint.copies import choose_checkpoint, copy_newest
from gridformer.checkpoint.store import LocalStore
from gridformer.launch import launch
from gridformer.launch.failures import memory_advice, out_of_memory, print_last
from gridformer.launch.local import attempt
from gridformer.launch.processes import process_stat, signals_seen
from gridformer.launch.watch import MARGIN_S, start_watch
from gridformer.mesh.launch_env import RankEnv, rank_env, use_only
from gridformer.mesh.process_group import close_process_groups, init_process_groups
from gridformer.mesh.rendezvous import store_of
from gridformer.train.callbacks import Callback
from gridformer.train.evaluation import Measure
from gridformer.train.metrics import read_metrics
from gridformer.train.numerics import set_numerics
from gridformer.train.plan import Plan
from gridformer.train.trainer import Trainer
from gridformer.utils.errors import SaveError
from gridformer.utils.files import leave_to_callers
from gridformer.utils.placeholder_module import without_dynamo
from gridformer.utils.signals import StopPolicy, install

_ENDED = "run/ended"
_FIRST_S, _LONGEST_S = 5.0, 60.0  # between two attempts to copy the last checkpoint
_LOOK_S = 1.0  # a spare process checks this often whether the run has ended


def execute(plan: Plan, callbacks: Sequence[Callback] = ()) -> None:
    """Starts the processes of a run and waits for them. A run that is done already is left alone.

    The callbacks are pickled into the first process of the run, which tells them what it does.

    Raises:
        UserError: A worker raised it.
        SystemExit: A worker failed, a signal stopped the run, or its last checkpoint is not copied.
    """
    train, place = plan.run.train, rank_env()
    ends_at = None if train.max_hours is None else _began() + 3600 * train.max_hours
    policy = StopPolicy(
        train.stop_grace_s, train.stop_signals, ends_at=ends_at, timeout_s=train.timeout_s
    )
    if plan.done:
        if place and place.rank:
            return
        is_more = plan.resume_step > train.steps
        steps = (
            f"steps, more than train.steps={train.steps}" if is_more else f"of {train.steps} steps"
        )
        print(
            f"{plan.out} has done {plan.resume_step} {steps}: increase train.steps to continue, or "
            "choose another --out"
        )
        copy_last(plan, policy.ends_at)
        return
    work = partial(worker, callbacks=tuple(callbacks)) if callbacks else worker
    spare = place is not None and place.size > plan.n_processes
    if place and spare:
        if place.rank >= plan.n_processes:
            wait_as_spare(place)
            return
        use_only(plan.n_processes)
    advise = partial(memory_advice, plan)
    try:
        if train.max_restarts and not place:
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
            LocalStore(plan.out).sweep()  # what a killed process was writing
        elif spare and place.rank == 0:  # lets the spare processes end
            store_of(place).set(_ENDED, "yes")
    copy_last(plan, policy.ends_at)


def train(
    run: Path | str,
    overrides: Sequence[str] = (),
    out: Path | None = None,
    callbacks: Sequence[Callback] = (),
) -> None:
    """Trains a run from Python, or resumes it, as `gridformer train` does from the command line.

    Each process of the run imports the script that calls this. So the call must be inside
    `if __name__ == "__main__":`.

    Args:
        run: The path of a run file, or the name of a shipped one.
        overrides: `dotted.key=value` texts.
        out: The run directory; None means `runs/NAME`.
        callbacks: Are told what the run does, in its first process; picklable.

    Raises:
        UserError: The run cannot start, or a worker raised it.
        SystemExit: A worker failed, or a signal stopped the run.
    """
    from gridformer.launch.plan import plan_run
    from gridformer.launch.run_lock import RunLock

    with RunLock() as lock:
        execute(plan_run(run, [*overrides], out=out, lock=lock), callbacks)


def wait_as_spare(place: RankEnv) -> None:
    """Waits for the end of a run that has one process less; else torchrun takes it for done."""
    stop = install()
    stop.nothing_left_to_save()
    store = store_of(place)
    with suppress(RuntimeError):  # torch's error for a store that is gone
        while not store.check([_ENDED]):
            time.sleep(_LOOK_S)
    stop.uninstall()


def _began() -> float:
    """Returns the `time.time` when this process, or the torchrun that restarts it, was started."""
    place = rank_env()
    pid = os.getppid() if place and place.by == "torchrun" else os.getpid()
    try:
        up_s = float(Path("/proc/uptime").read_text(encoding="utf-8").split()[0])
        return time.time() - up_s + process_stat(pid)[1] / os.sysconf("SC_CLK_TCK")
    except OSError:  # not Linux
        return time.time()


def worker(plan: Plan, callbacks: Sequence[Callback] = ()) -> None:
    """The entrypoint of every process of a run: joins the process group and trains.

    The group is closed only on success, because a rank that fails must not wait for its peers.
    """
    train = plan.run.train
    leave_to_callers()
    set_numerics(train)
    world = init_process_groups(train.device, plan.n_processes, train.timeout_s, MARGIN_S)
    watch = start_watch(world, train.timeout_s, plan.out)
    measures: list[Measure] = []
    if train.bleu_every:
        from gridformer.evaluate.bleu import Bleu

        measures.append(Bleu(plan.run, plan.out))
    with without_dynamo():
        trainer = Trainer(plan, world, measures, callbacks)
        if watch:
            watch.model = trainer.model
        trainer.fit()
    close_process_groups()
    if watch:
        watch.end()


def copy_last(plan: Plan, ends_at: float | None = None) -> None:
    """Copies the last checkpoint of a run that is done to `train.checkpoint_to`, if need be.

    The process of rank 0, or the launcher, tries again for `train.full_disk_wait_s`.

    Raises:
        SystemExit: The last checkpoint is not there, with code 1.
    """
    train, place = plan.run.train, rank_env()
    if not train.checkpoint_to or (place and place.rank):
        return
    wait_s, pause = train.full_disk_wait_s, _FIRST_S
    if ends_at is not None:
        wait_s = min(wait_s, ends_at - time.time())
    until = time.monotonic() + wait_s
    while why := copy_newest(train, plan.out):
        if time.monotonic() + pause > until:
            print_last(
                f"gridformer: all steps are done and their checkpoint is in {plan.out}, but it is "
                f"not at {train.checkpoint_to} ({why}): run the same command to copy it"
            )
            raise SystemExit(1)
        if pause == _FIRST_S:
            print_last(
                f"gridformer: the last checkpoint is not at {train.checkpoint_to} yet ({why}); "
                f"trying again for {wait_s:.0f} s (train.full_disk_wait_s)"
            )
        time.sleep(pause)
        pause = min(_LONGEST_S, 2 * pause)


def launch_with_restarts(
    entrypoint: Callable[[Plan], None], plan: Plan, policy: StopPolicy
) -> None:
    """Runs a plan in worker processes, and again after a failure.

    There is no further attempt after a UserError, which would come again, after a stop, or if two
    attempts in a row fail in the same step with the same error.

    Raises:
        UserError: A worker raised it.
        SystemExit: The last attempt failed, or a signal stopped the run.
    """
    attempts, before = 1 + plan.run.train.max_restarts, None
    with signals_seen(policy) as signals:
        for number in range(1, attempts + 1):
            failure = attempt(entrypoint, (plan,), plan.n_processes, policy, signals)
            if failure is None:
                return
            if failure.is_user_error or failure.told_to_stop or signals.first:
                failure.report_and_exit()
            steps = [line["step"] for line in read_metrics(plan.out)[-1:]]
            here = int(steps[0]) if steps else 0, re.sub(r"\d+", "#", failure.cause)
            why = f"attempt {number} was the last (train.max_restarts)" * (number == attempts)
            if here == before:
                why = (
                    f"two attempts in a row failed with the same error after step {here[0]}, so "
                    "there is no other"
                )
            if why:
                print_last(f"gridformer: {why}:\n")
                print_last(failure.text(partial(memory_advice, plan)))
                raise SystemExit(1)
            before, plan = here, resumed(plan)
            goes_on = f"resumes from step {plan.resume_step}" if plan.resume else "begins anew"
            print_last(f"{failure.text()}\n")
            print_last(
                f"gridformer: attempt {number + 1} of {attempts} {goes_on}, as {failure.cause}"
            )


def resumed(plan: Plan) -> Plan:
    """Returns the plan of a run that goes on from its newest checkpoint, if there is one."""
    check = partial(check_copy, plan.run, plan.data)
    newest = choose_checkpoint(plan.run.train, plan.out, check)
    if newest is None:
        return plan
    return plan.resuming(newest.folder, newest.manifest, newest.older, newest.damaged)
