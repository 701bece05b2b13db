"""A command line that launches one of entrypoints.py, for tests of `launch`.

    python -m tests.support.launch.main NAME N_PROCESSES FOLDER

NAME may also be MODULE:NAME, with a module of this package.
"""

import os
import signal
import sys
from pathlib import Path

from gridformer.launch import launch
from gridformer.launch.processes import warm_up
from gridformer.mesh.launch_env import rank_env
from gridformer.utils.errors import UserError
from gridformer.utils.signals import StopPolicy
from tests.support.launch.named import run_named

POLICIES = {
    "one_has_lost_another": StopPolicy(0.5),
    "one_long_save": StopPolicy(0.5, ("SIGUSR1",)),
    "fails_when_it_goes_on": StopPolicy(timeout_s=0.1),
    "one_step_that_no_grace_ends": StopPolicy(600.0),
}


def main() -> None:
    # A shell starts what runs in its background with Ctrl-C ignored, and so would start the tests.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if group := os.environ.get("CONTROL_GROUP"):
        Path(group, "cgroup.procs").write_text(str(os.getpid()))
    file, _, name = sys.argv[1].rpartition(":")
    n, folder = int(sys.argv[2]), Path(sys.argv[3])
    module = f"tests.support.launch.{file or 'entrypoints'}"
    if n > 1 and not rank_env():
        warm_up(module)
    try:
        launch(run_named, (module, name, folder, n), n, POLICIES.get(name))
    except UserError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
