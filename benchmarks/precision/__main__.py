"""Compares loss curves by number type (dtypes.py).

For the comparison by layout run `python -m benchmarks.precision.loss_curves`.
"""

import typer

from benchmarks.precision.dtypes import main

if __name__ == "__main__":
    typer.run(main)
