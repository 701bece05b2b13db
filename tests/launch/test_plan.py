"""Planning a run: what is refused is refused before torch is loaded, which takes seconds."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys
from gridformer.cli.app import app
try:
    app(["train", "demo", "layout.cols=3"], standalone_mode=False)
except Exception as error:
    print(type(error).__name__, "torch" in sys.modules)
"""


def test_a_refusal_loads_no_torch() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.stdout == "ConfigError False\n", done.stderr
