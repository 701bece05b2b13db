"""The layout of tests, the names of classes, and the size of modules.

Code that tests share is in tests/support, and no test imports another. No two public classes have
the same name. A short module that only a sibling imports is part of that sibling.
"""

import ast
import re
from collections import defaultdict
from pathlib import Path

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src/gridformer"


def imported(file: Path) -> set[str]:
    """Return the modules that a file imports anywhere; for `from a import b`, both a and a.b."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return found


def problems(tests: Path) -> list[str]:
    found = []
    for file in sorted(tests.rglob("*.py")):
        where = file.relative_to(tests)
        for module in sorted(imported(file)):
            if module.split(".")[-1].startswith("test_"):
                found.append(f"{where} imports {module}: move what both need to tests/support")
        if where.parts[0] == "support":
            if file.name.startswith("test_"):
                found.append(f"{where} is a test: pytest finds it, but it is no helper")
            continue
        if not file.name.startswith("test_") and file.name not in ("conftest.py", "__init__.py"):
            found.append(f"{where} is a helper: it belongs into tests/support")
        if not (file.parent / "__init__.py").exists():
            found.append(f"{where.parent} has no __init__.py: two of its names could clash")
    return found


def test_helpers_are_in_support_and_no_test_imports_another() -> None:
    assert problems(TESTS) == []


def test_violations_of_these_rules_are_found(tmp_path: Path) -> None:
    for folder in ("", "support", "train", "plain"):
        (tmp_path / folder).mkdir(exist_ok=True)
        if folder != "plain":
            (tmp_path / folder / "__init__.py").touch()
    (tmp_path / "conftest.py").write_text("from tests.support import pool\n")
    (tmp_path / "plain" / "test_one.py").write_text("import tests.support.pool\n")
    (tmp_path / "support" / "pool.py").write_text("import torch\n")
    (tmp_path / "support" / "test_pool.py").touch()
    (tmp_path / "train" / "helpers.py").touch()
    (tmp_path / "train" / "test_two.py").write_text("from tests.plain.test_one import batch\n")
    (tmp_path / "train" / "test_three.py").write_text(
        "def test_it():\n    from tests.plain import test_one as other\n"
    )
    found = [problem.partition(":")[0] for problem in problems(tmp_path)]
    assert found == [
        "plain has no __init__.py",
        "support/test_pool.py is a test",
        "train/helpers.py is a helper",
        "train/test_three.py imports tests.plain.test_one",
        "train/test_two.py imports tests.plain.test_one",
    ]


def classes(source: Path) -> dict[str, list[str]]:
    """Return the files that define each public class at their top level."""
    found: dict[str, list[str]] = defaultdict(list)
    for file in sorted(source.rglob("*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(str(file.relative_to(source)))
    return found


def test_no_two_public_classes_have_the_same_name() -> None:
    found = classes(SOURCE)
    assert len(found) > 300
    twice = {name: files for name, files in found.items() if len(files) > 1}
    assert twice == {}


def test_classes_of_the_same_name_are_found(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "one.py").write_text("class A:\n    class C: ...\n\n\nclass _B: ...\n")
    (tmp_path / "inner/two.py").write_text("class _B: ...\nclass A: ...\nclass C: ...\n")
    assert classes(tmp_path) == {"A": ["inner/two.py", "one.py"], "C": ["inner/two.py"]}


# A module for each command, and one for each scheme, is what a reader looks for.
LISTS = {"cli/app.py", "parallel/registry.py"}


def parts_of_siblings(source: Path, short: int = 120, together: int = 400) -> dict[str, str]:
    """Return short modules that only one module imports, which is in the same folder.

    What is imported in a function is loaded only when it is needed, and so has a file of its own.
    """
    files = {
        ".".join((source.name, *file.relative_to(source).with_suffix("").parts)): file
        for file in source.rglob("*.py")
    }
    sizes = {file: len(file.read_text(encoding="utf-8").splitlines()) for file in files.values()}
    importers: dict[Path, set[Path]] = defaultdict(set)
    for file in sizes:
        for name in imported(file) & {*files}:
            importers[files[name]] |= {file} - {files[name]}
    found = {}
    for file, (first, *others) in ((file, [*some]) for file, some in importers.items() if some):
        name = re.escape(file.stem)
        at_once = re.search(rf"^(from|import) [^\n]*\b{name}\b", first.read_text("utf-8"), re.M)
        alone = not others and first.parent == file.parent and first.name != "__init__.py"
        if alone and at_once and sizes[file] < short and sizes[file] + sizes[first] <= together:
            found[str(file.relative_to(source))] = str(first.relative_to(source))
    return found


def test_short_modules_with_one_sibling_importer_are_merged() -> None:
    assert {a: b for a, b in parts_of_siblings(SOURCE).items() if b not in LISTS} == {}


def test_short_modules_with_one_sibling_importer_are_found(tmp_path: Path) -> None:
    source = tmp_path / "pkg"
    (source / "inner").mkdir(parents=True)
    (source / "a.py").write_text("from pkg.b import x\nfrom pkg import c\nimport pkg.inner.e\n")
    (source / "b.py").write_text("x = 1\n")
    (source / "c.py").write_text("y = 1\n" * 120)
    (source / "d.py").write_text("from pkg.c import y\n")
    (source / "inner/e.py").write_text("")
    assert parts_of_siblings(source) == {"b.py": "a.py"}
    (source / "d.py").unlink()
    assert parts_of_siblings(source, short=121) == {"b.py": "a.py", "c.py": "a.py"}
    assert parts_of_siblings(source, short=121, together=100) == {"b.py": "a.py"}


# Settings and hooks of Python and torch; what torch.compile leaves out; how torch creates groups.
SET_OUTSIDE = {
    *("sys.unraisablehook", "sys.excepthook", "threading.excepthook", "setattr(sys)", "os.environ"),
    *("torch.backends.cudnn.allow_tf32", "torch.backends.cudnn.benchmark"),
    *("deterministic.fill_uninitialized_memory", "setattr(distributed_c10d)"),
    *("scores.attention_in_parts", "GatheringRows.attend"),
}


def replaced(file: Path) -> set[str]:
    """Return what a file sets on modules that it imports and on classes, and what it mocks."""
    nodes = [*ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
    outside = {node.name for node in nodes if isinstance(node, ast.ClassDef)}
    found = {name for name in imported(file) if "mock" in name.split(".")}
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            outside |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
    for node in nodes:
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr"):
            target, said = node.args[0], f"{ast.unparse(node.func)}({ast.unparse(node.args[0])})"
        elif isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            target, said = node.value, ast.unparse(node)
        else:
            continue
        while isinstance(target, ast.Attribute):
            target = target.value
        if getattr(target, "id", "") in outside:
            found.add(said)
    return found


def test_nothing_is_replaced_from_outside() -> None:
    found = {file: replaced(file) - SET_OUTSIDE for file in SOURCE.rglob("*.py")}
    assert {file: names for file, names in found.items() if names} == {}


def test_what_is_replaced_from_outside_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "import a.b\nfrom unittest.mock import patch\nfrom c import D\n\n\nclass E: ...\n\n\n"
        "a.b.f = 1\nsetattr(D, 'g', 2)\nE.h = D().i = 3\nx = y = a.b.f\nx.g = 4\n"
    )
    assert replaced(tmp_path / "a.py") == {
        *("unittest.mock", "unittest.mock.patch", "a.b.f", "setattr(D)", "E.h")
    }
