"""Loss curves by type (dtypes.py). By layout: `python -m benchmarks.precision.loss_curves`."""

import typer

from benchmarks.precision.dtypes import main

if __name__ == "__main__":
    typer.run(main)
