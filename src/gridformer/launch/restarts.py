"""`train.max_restarts`: a local run that fails goes on in new processes from its newest checkpoint.

Each attempt has worker processes, a folder and a store of its own, so nothing of a failed one can
reach the next. The launcher stays, and with it the lock of the run directory.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from gridformer.checkpoint.copies import choose_or_replace
from gridformer.checkpoint.same_run import check_copy, data_start_of
from gridformer.launch.failures import Failure, cause, failure_text
from gridformer.launch.local import attempt
from gridformer.launch.memory_advice import memory_advice
from gridformer.launch.processes import signals_seen
from gridformer.launch.worker_process import print_last
from gridformer.train.metrics import read_metrics
from gridformer.train.plan import Plan
from gridformer.utils.signals import StopPolicy


def launch_with_restarts(
    entrypoint: Callable[[Plan], None], plan: Plan, policy: StopPolicy
) -> None:
    """Runs a plan in worker processes, and again after a failure. It never runs in this process.

    There is no further attempt after a UserError, which would come again, after a stop, or if two
    attempts in a row fail in the same step with the same error.

    Args:
        entrypoint: See `gridformer.launch.launch`; its argument is the plan.
        plan: The first attempt.
        policy: How the processes answer stop signals.

    Raises:
        UserError: See `gridformer.launch.launch`.
        SystemExit: See there.
    """
    attempts, before = 1 + plan.run.train.max_restarts, None
    with signals_seen(policy) as signals:
        for number in range(1, attempts + 1):
            ended = attempt(entrypoint, (plan,), plan.n_processes, policy, signals)
            failure = ended.failure
            if failure is None or failure.is_user_error or failure.told_to_stop or signals.first:
                ended.tell()
                return
            here = _step_of(plan), re.sub(r"\d+", "#", cause(failure))
            if number == attempts or here == before:
                _print_last_attempt(failure, plan, number, here[0] if here == before else None)
                raise SystemExit(1)
            before, plan = here, resumed(plan)
            goes_on = f"resumes from step {plan.resume_step}" if plan.resume else "begins anew"
            print_last(f"{failure_text(failure)}\n")
            print_last(
                f"gridformer: attempt {number + 1} of {attempts} {goes_on}, as {cause(failure)}"
            )


def resumed(plan: Plan) -> Plan:
    """Returns the plan of a run that goes on from its newest checkpoint.

    Args:
        plan: An earlier attempt of the run.

    Raises:
        CheckpointError: The newest checkpoint is damaged; see `train.fallback`.
    """
    check = partial(check_copy, plan.run, plan.data)
    found = choose_or_replace(plan.run.train, plan.out, check)
    if found is None:
        return plan
    return replace(
        plan,
        resume=found.folder,
        resume_step=found.manifest.step,
        start=None,
        data_start=data_start_of(found.manifest, plan.run, plan.data),
        older=found.older,
        damaged=found.damaged,
    )


def _step_of(plan: Plan) -> int:
    """Returns the last step of which there are metrics."""
    steps = [line["step"] for line in read_metrics(plan.out)[-1:]]
    return int(steps[0]) if steps else 0


def _print_last_attempt(failure: Failure, plan: Plan, number: int, same_step: int | None) -> None:
    if same_step is not None:
        print_last(
            f"gridformer: two attempts in a row failed with the same error after step {same_step}, "
            "so there is no other:\n"
        )
    else:
        print_last(f"gridformer: attempt {number} was the last (train.max_restarts):\n")
    print_last(failure_text(failure, partial(memory_advice, plan)))
