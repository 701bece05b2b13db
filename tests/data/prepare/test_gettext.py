"""Message catalogs as sources: where they are searched for, what is read, and their licenses."""

import importlib.machinery
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from gridformer.data.prepare import gettext as catalogs
from gridformer.data.prepare.gettext import cleaned, system_folders, without_mnemonics
from gridformer.data.prepare.reading import TextSource
from gridformer.data.prepare.sources import open_sources
from gridformer.utils.errors import DataError, UserError
from tests.support.data import texts
from tests.support.marks import extra

polib = extra("polib")


def write(path: Path, *pairs: tuple[str, str], **metadata: str) -> Path:
    """Write a catalog, compiled if the path has that suffix."""
    po = polib.POFile()
    po.header = "This file is distributed under the same license as the Example package."
    po.metadata = {"Content-Type": "text/plain; charset=UTF-8", **metadata}
    po.extend(polib.POEntry(msgid=a, msgstr=b) for a, b in pairs)
    path.parent.mkdir(parents=True, exist_ok=True)
    po.save_as_mofile(str(path)) if path.suffix == ".mo" else po.save(str(path))
    return path


ONE = ("the first of all messages", "die erste aller Nachrichten")
TWO = ("the second of all messages", "die zweite aller Nachrichten")
THREE = ("the third of all messages", "die dritte aller Nachrichten")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "locale"
    write(root / "de/LC_MESSAGES/git.mo", ONE, TWO)
    other = (ONE[0], "die allererste Nachricht")
    project = {"Project-Id-Version": "PostgreSQL 15"}
    write(root / "de/LC_MESSAGES/psql.mo", other, THREE, **project)
    write(root / "fr/LC_MESSAGES/git.mo", (ONE[0], "le premier de tous"))
    return root


def source(spec: str) -> TextSource:
    return open_sources([spec])[0]


def read(spec: str | Path) -> tuple[list[str], Counter[str]]:
    """Return the texts of German catalogs, and what is left out."""
    skipped: Counter[str] = Counter()
    return texts([source(f"gettext:de:{spec}")], skipped), skipped


def test_pairs_in_turn_each_english_text_once(root: Path) -> None:
    german = source(f"gettext:de:{root}")
    assert (german.kind, german.languages) == ("pairs", ("en", "de"))
    assert read(root) == ([*ONE, *TWO, *THREE], {"messages seen before": 1})
    assert texts([source(f"gettext:fr:{root}")]) == [ONE[0], "le premier de tous"]
    assert german.n_bytes == sum(len(text.encode()) for text in (*ONE, *TWO, *THREE))


def test_samples_are_whole_pairs_in_another_order(root: Path) -> None:
    pairs = [(f"message number {i} of many more", f"Nachricht {i}") for i in range(50)]
    write(root / "de/LC_MESSAGES/x.mo", *pairs)
    german = source(f"gettext:de:{root}")
    sample = [text for item in german.sampled() for text in item.texts]
    assert set(zip(sample[::2], sample[1::2])) == {*pairs, ONE, TWO, THREE}
    assert sample != texts([german])


def test_licenses_of_parts(root: Path) -> None:
    known = {
        "git": ("GPL-2.0-only", 4),
        "psql": ("PostgreSQL License", 2),
        "iso_3166": ("LGPL-2.1-or-later", 2),
        "libapt-pkg6.0": ("GPL-2.0-or-later", 2),
        "own": (None, 2),
        "other": ("that of Example", 2),
    }
    for number, name in enumerate(known):
        if number > 1:
            file = f"{name}.po" if name == "other" else f"{name}.mo"
            write(root / "de/LC_MESSAGES" / file, (f"number {number} of all messages", "x"))
    german = source(f"gettext:de:{root}")
    assert {part.name: (part.license, part.documents) for part in german.parts} == known
    assert str(german.license).startswith("GPL-2.0-only (2), ")
    assert "not stated, GPL for the most part (1)" in str(german.license)


def test_where_a_language_may_be_named(tmp_path: Path) -> None:
    write(tmp_path / "po/de.po", ONE)
    write(tmp_path / "po/fr.po", (ONE[0], "le premier"))
    folder = write(tmp_path / "share/de/LC_MESSAGES/a.mo", TWO).parent
    for place, want in (("po", ONE), ("po/de.po", ONE), (folder, TWO)):
        assert read(tmp_path / place)[0] == [*want]


def test_links_and_compiled_twins_count_once(tmp_path: Path) -> None:
    folder = tmp_path / "de"
    write(folder / "a.po", ONE)
    write(folder / "a.mo", ONE)
    (folder / "b.po").symlink_to(folder / "a.po")
    german = source(f"gettext:de:{tmp_path}")
    assert [path.name for path in german.files] == ["a.po"]


def test_the_system_and_django(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site-packages/django"
    write(package / "conf/locale/de/LC_MESSAGES/django.po", ("a fourth of all messages", "vier"))
    write(package / "contrib/admin/locale/de/LC_MESSAGES/djangojs.mo", ("one two or five", "fünf"))
    spec = importlib.machinery.ModuleSpec("django", None, is_package=True)
    spec.submodule_search_locations = [str(package)]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    folders = system_folders("de")
    assert folders[0] == Path("/usr/share/locale/de/LC_MESSAGES")
    assert len([folder for folder in folders if package in folder.parents]) == 2
    here = [f for f in folders if package in f.parents]
    monkeypatch.setattr(
        catalogs, "system_folders", lambda language: [root / language / "LC_MESSAGES", *here]
    )
    german = source("gettext:de")
    assert [(part.name, part.license) for part in german.parts[-2:]] == [
        ("django.django", "BSD-3-Clause, Django"),
        ("django.contrib.admin.djangojs", "BSD-3-Clause, Django"),
    ]
    assert len(german.parts) == 4


def test_nothing_to_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogs, "system_folders", lambda language: [tmp_path / language])
    code = "not the code of a language; write gettext:de for"
    for spec, said in (
        ("de", r"no catalogs for 'de' .* pip install django.*de:PATH"),
        (f"de:{tmp_path}", r"name a folder with \*/de/LC_MESSAGES/\*\.mo, de\.po"),
        (f"de:{tmp_path / 'gone'}", "does not exist"),
        *(("", code), ("German", code), ("../x", code)),
        ("en", "name another language"),
    ):
        with pytest.raises(UserError, match=said):
            source(f"gettext:{spec}")


@pytest.mark.parametrize("content", [b"", b"\xde\x12\x04\x95", b"\xde\x12\x04\x95" + b"\xff" * 60])
def test_damaged_and_foreign_catalogs(root: Path, content: bytes) -> None:
    damaged = root / "de/LC_MESSAGES/damaged.mo"
    damaged.write_bytes(content)
    values: dict[str, Any] = {"Language": "fr"}
    write(root / "de/LC_MESSAGES/wrong.mo", ("a stray among the messages", "perdu"), **values)
    both, skipped = read(root)
    assert len(both) == 6
    assert skipped["catalogs that cannot be read"] == 1
    assert skipped["catalogs in other languages than de"] == 1
    with pytest.raises(DataError, match=r"damaged\.mo: is not a readable catalog"):
        read(damaged)


def catalog(*entries: Any) -> Any:
    po = polib.POFile()
    po.extend(entries)
    return po


def entry(source: str, target: str, **values: object) -> Any:
    return polib.POEntry(msgid=source, msgstr=target, **values)


def test_cleaned() -> None:
    skipped: Counter[str] = Counter()
    po = catalog(
        entry("Cannot open  the\n file %s", "Kann die\tDatei %s nicht öffnen\n"),
        entry("Not sure about this one", "Nicht sicher damit", flags=["fuzzy"]),
        entry("Not there any more now", "Nicht mehr da", obsolete=True),
        entry("Not translated at all yet", ""),
        entry("The same on both sides", "The Same on both sides"),
        entry("Open file", "Datei öffnen"),
        entry("%s: %d %s %5d x", "%s: %d %s %5d y"),
    )
    pairs = list(cleaned(po, 4, skipped))
    assert pairs == [("Cannot open the file %s", "Kann die Datei %s nicht öffnen")]
    assert skipped == {
        "messages that are fuzzy or obsolete": 2,
        "messages without a translation": 2,
        "messages of less than 4 words": 2,
    }


@pytest.mark.parametrize(
    ("forms", "expected"),
    [
        (["eine Datei"], [("%d files", "eine Datei")]),
        (["eine Datei", "%d Dateien"], [("one file", "eine Datei"), ("%d files", "%d Dateien")]),
        (["plik", "pliki", "plików"], [("one file", "plik")]),
    ],
)
def test_plurals(forms: list[str], expected: list[tuple[str, str]]) -> None:
    po = catalog(
        polib.POEntry(
            msgid="one file", msgid_plural="%d files", msgstr_plural=dict(enumerate(forms))
        )
    )
    assert list(cleaned(po, 1, Counter())) == expected


def test_plural_formulas_are_never_run(tmp_path: Path) -> None:
    po = catalog(entry("one two three four", "eins zwei drei vier"))
    trap = tmp_path / "trap"
    po.metadata = {"Plural-Forms": f"nplurals=2; plural=__import__('os').mkdir('{trap}')"}
    po.save_as_mofile(str(tmp_path / "a.mo"))
    assert len(list(cleaned(polib.mofile(str(tmp_path / "a.mo")), 4, Counter()))) == 1
    assert not trap.exists()


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ("_Save the file", "Datei _speichern", ("Save the file", "Datei speichern")),
        ("E&xit now", "&Beenden", ("Exit now", "Beenden")),
        # A word that is the same on both sides is no shortcut.
        ("set my_name now", "jetzt my_name setzen", ("set my_name now", "jetzt my_name setzen")),
        ("our R&D unit", "unsere R&D", ("our R&D unit", "unsere R&D")),
        ("this &amp; that", "dies &amp; das", ("this &amp; that", "dies &amp; das")),
        # Nor are several shortcuts, a single one, or two kinds.
        ("_a and _b", "_c und _d", ("_a and _b", "_c und _d")),
        ("_Open", "Öffnen", ("_Open", "Öffnen")),
        ("_Open", "&Laden", ("_Open", "&Laden")),
        ("this & that", "dies & das", ("this & that", "dies & das")),
    ],
)
def test_mnemonics(source: str, target: str, expected: tuple[str, str]) -> None:
    assert without_mnemonics((source, target)) == expected
