"""Private names of torch: few files use them, a page lists them, and a new torch may lack some."""

import ast
import re
from collections.abc import Iterator
from importlib import import_module, util
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src/gridformer"
HOMES = ("comm/", "record/", "utils/torch_private.py", "utils/placeholder_module.py")
PAGE = (ROOT / "docs/reference/internals.md").read_text(encoding="utf-8")
# Each item of a cell is one name, or several of which torch has at least one.
LISTED = [
    re.findall(r"`(.+?)`", item)
    for cell in re.findall(r"^\| (`torch.*?) \|", PAGE, re.MULTILINE)
    for item in cell.split(", ")
]
OPERATORS = r"torch\.ops\.|torch\.(_foreach|_fused)_\w+$"  # used anywhere
PYTHON = {"_replace", "_asdict", "_fields", "_exit", "_current_frames", "_getframe"}
PYTHON |= {"_forkserver", "_forkserver_pid"}
# Those of transformers' models.
PYTHON |= {"_init_weights", "_attn_implementation", "_supports_sdpa", "_apply_gate"}


def private(name: str) -> set[str]:
    """Return the private parts of a dotted name."""
    return {part for part in name.split(".") if re.fullmatch(r"_(?!_)\w+", part)}


KNOWN = {part for names in LISTED for name in names for part in private(name)}


def exists(name: str) -> bool:
    """Tell whether torch has a name. A module that is the last part is not loaded."""
    found: Any = torch
    path = "torch"
    for part in name.split(".")[1:]:
        path += f".{part}"
        if hasattr(found, "__path__") and part not in vars(found) and util.find_spec(path):
            found = import_module(path) if path != name else None
        elif hasattr(found, part):
            found = getattr(found, part)
        else:
            return part in getattr(found, "__annotations__", {})
    return True


def owned(nodes: list[ast.AST]) -> Iterator[str]:
    """Yield the attributes that classes define: methods, fields, and what they set on self."""
    for node in nodes:
        if isinstance(node, ast.ClassDef):
            for line in node.body:
                yield getattr(getattr(line, "target", line), "id", getattr(line, "name", ""))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr if getattr(node.value, "id", "") == "self" else ""


def reached(nodes: list[ast.AST], own: set[str]) -> Iterator[str]:
    """Yield the private names that a file takes from torch, or from objects of unknown classes."""
    roots = set()
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                name = f"{getattr(node, 'module', None) or ''}.{alias.name}".lstrip(".")
                if name.startswith("torch"):
                    roots.add((alias.asname or alias.name).split(".")[0])
                    yield from private(name)
        elif isinstance(node, ast.Constant) and re.fullmatch(r"[\w.]+", str(node.value)):
            parts = private(str(node.value))
            yield from parts if str(node.value).startswith("torch.") else parts & KNOWN
    for node in nodes:
        if isinstance(node, ast.Attribute) and private(node.attr):
            root = (name := ast.unparse(node)).split(".")[0]
            is_own = node.attr in own and (node.attr not in KNOWN or root == "self")
            if (root in roots or not is_own) and not re.match(OPERATORS, name):
                yield node.attr


def used(source: Path) -> dict[str, set[str]]:
    """Return the files that use each private name of torch."""
    files = {f: [*ast.walk(ast.parse(f.read_text("utf-8")))] for f in source.rglob("*.py")}
    own = PYTHON.union(*map(owned, files.values()))
    found: dict[str, set[str]] = {}
    for file, nodes in files.items():
        for name in reached(nodes, own):
            found.setdefault(name, set()).add(str(file.relative_to(source)))
    return found


def test_torch_has_every_name() -> None:
    words = {file: {*re.findall(r"\w+", file.read_text("utf-8"))} for file in SOURCE.rglob("*.py")}
    for names in LISTED:
        leaf = names[0].rpartition(".")[2]
        users = [str(file.relative_to(SOURCE)) for file in words if leaf in words[file]]
        assert users, f"nothing uses {names[0]} anymore: remove it from docs/reference/internals.md"
        gone = f"torch {torch.__version__} has no {' nor '.join(names)}, used in {', '.join(users)}"
        assert any(map(exists, names)), gone


def test_every_name_in_use_is_listed_and_in_its_place() -> None:
    found = used(SOURCE)
    assert {name: files for name, files in found.items() if name not in KNOWN} == {}
    elsewhere = {(n, f) for n, files in found.items() for f in files if not f.startswith(HOMES)}
    assert elsewhere == set(), "move these behind a function of gridformer.utils.torch_private"


def test_names_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("class A:\n    _own: int\n\n\nprint(A()._own, x._replace)\n")
    (tmp_path / "b.py").write_text(
        "import torch.distributed as dist\nfrom torch._x import y\n\n"
        'print(y._gone, dist._own.b, getattr(y, "_base"), "torch._z.a")\n'
    )
    assert used(tmp_path) == {name: {"b.py"} for name in ("_x", "_gone", "_own", "_base", "_z")}
    names = "torch._C._gone", "torch._gone.a", "torch.Tensor._base", "torch._dynamo"
    assert [*map(exists, names)] == [False, False, True, True]
