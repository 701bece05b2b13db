"""Which messages of a catalog become pairs."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from gridformer.data.prepare.gettext import Pair, cleaned, without_mnemonics
from tests.support.marks import extra

polib = extra("polib")


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
    assert pairs == [Pair("Cannot open the file %s", "Kann die Datei %s nicht öffnen")]
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
    assert without_mnemonics(Pair(source, target)) == expected
