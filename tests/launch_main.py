"""A command line that launches one of launch_entrypoints.py, for test_launch.py.

python -m tests.launch_main NAME N_PROCESSES FOLDER
"""

import importlib
import sys
from pathlib import Path

from gridformer.errors import UserError
from gridformer.launch import joined, launch, local, warm_up

local.PRELOAD.remove("torch._dynamo")  # seconds, and nothing is trained here
local.PRELOAD.remove("torch.distributed.checkpoint")
MODULE = "tests.launch_entrypoints"


def main() -> None:
    name, n, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    if n > 1 and not joined():
        warm_up(MODULE)
    try:
        launch(getattr(importlib.import_module(MODULE), name), (folder, n), n)
    except UserError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
