"""The `gridformer` command, also as `python -m gridformer`.

Until the command runs, Ctrl-C ends the process as the system does: Python's own handler would print
where in somebody's imports it was.
"""

import atexit
import gc
import signal

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def main() -> None:
    """Runs the command."""
    # As it ends, Python would look through all objects of torch for cycles to free: 0.6 s.
    atexit.register(gc.freeze)
    from gridformer.cli.app import main as run
    from gridformer.utils.process import begin_command

    begin_command()
    run()


if __name__ == "__main__":
    main()
