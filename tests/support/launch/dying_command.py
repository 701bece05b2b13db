"""`gridformer` for torchrun -m, with a last rank that is killed once."""

from gridformer.cli.app import main
from gridformer.launch import run
from tests.support.launch.dying import dies_once

if __name__ == "__main__":
    run.worker = dies_once  # type: ignore[assignment]
    main()
