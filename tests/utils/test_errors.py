"""If a package that one command needs is missing, the error names it and what to install."""

import subprocess
import sys

import pytest

from gridformer.data.prepare.sources import open_sources
from gridformer.utils.errors import UserError
from tests.support.commands import gridformer_here


@pytest.mark.parametrize(
    ("package", "source", "extra"), [("datasets", "hf:x", "hf"), ("polib", "gettext:de", "gettext")]
)
def test_sources(package: str, source: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    said = f"^{source} needs {package}: pip install 'gridformer\\[{extra}\\]'$"
    with pytest.raises(UserError, match=said):
        open_sources([source])


def test_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check comes first, because the requested work may take minutes."""
    monkeypatch.setitem(sys.modules, "plotly", None)
    done = gridformer_here("memory", "no-such-run", "--html", "page.html")
    assert done.returncode == 2
    assert done.stderr == "error: --html needs plotly: pip install 'gridformer[html]'\n"


def test_nothing_else_loads_them() -> None:
    """A run, and the user's own text, need none of the extras."""
    program = (
        "import sys\n"
        "sys.modules |= dict.fromkeys(('datasets', 'plotly', 'polib'))\n"
        "import gridformer.launch.run, gridformer.data.prepare.sources, gridformer.memory.show\n"
        "import gridformer.evaluate.generate, gridformer.data.prepare.corpus\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
