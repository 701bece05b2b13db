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
    # Python looks for cycles to free after every 700 new objects, and torch makes a million of them
    # as it is loaded, which took 0.2 s longer. As Python ends, it would look through all of them.
    gc.set_threshold(50_000, 20, 20)
    atexit.register(gc.freeze)
    from gridformer.cli.app import main as run

    run()


if __name__ == "__main__":
    main()
