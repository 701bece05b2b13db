"""Translated sentences from gettext catalogs, the messages of programs on this machine.

Catalogs are read with polib, because Python's own gettext module compiles and runs the formula
for plural forms that a catalog contains.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from gridformer.data.prepare.reading import Cursor, Text, TextSource, files_below, shuffled
from gridformer.data.tokenfolder import PartEntry
from gridformer.utils.errors import DataError, UserError, require

if TYPE_CHECKING:
    import polib

PREFIX = "gettext:"
ENGLISH = "en"
MIN_WORDS = 4  # of the English text; shorter ones are mostly menu items and names of places
_SUFFIXES = (".mo", ".po")
_LANGUAGE = re.compile(r"[a-z]{2,3}(_[A-Z]{2})?(@[a-z]+)?")
_DAMAGED = "catalogs that cannot be read"
_WORD = re.compile(r"(?<![%\w])[^\W\d_]+")  # a run of letters that is not a conversion such as %s
# Marks the letter after it as a keyboard shortcut: `_File`, `E&xit`. It also matches `a_b`, `R&D`
# and `&amp;`, which are no shortcuts, but these are the same in the translation.
_MNEMONIC = re.compile(r"[_&](?=[^\W\d_])")
DJANGO = "BSD-3-Clause, Django"
POSTGRES = "PostgreSQL License"
_GPL2, _GPL3, _LGPL = "GPL-2.0-or-later", "GPL-3.0-or-later", "LGPL-2.1-or-later"
# File names without a version at the end, by license.
_BY_NAME = {
    "GPL-2.0-only": ("git",),
    _GPL2: ("adduser", "apt", "libapt-pkg", "dpkg", "dpkg-dev", "net-tools", "python-apt"),
    _GPL3: (
        *("bash", "coreutils", "diffutils", "findutils", "gettext-tools", "gnupg", "gprof"),
        *("grep", "ld", "make", "opcodes", "sed", "tar", "wget"),
    ),
    _LGPL: ("glib", "gtk", "gdk-pixbuf", "gstreamer", "libc", "systemd"),
    "MIT": ("mit-krb",),
}
_LICENSE_OF = {name: license for license, names in _BY_NAME.items() for name in names}
# What translators write in the header of a .po file.
_SAME_AS = re.compile(r"same licen[sc]e as (?:the )?(.+?)(?: package| project)?\.", re.IGNORECASE)
_VERSION = re.compile(r"(-?\d[\d.]*)(-properties)?$")


Pair = tuple[str, str]  # an English text and its translation


def catalog_source(spec: str) -> TextSource:
    """Reads `gettext:de`, the catalogs of this machine, or `gettext:de:PATH`, those in a folder.

    Every English sentence occurs once, with the first translation, so that no sentence is in both
    splits. All sentences are held in memory: a whole system has a few megabytes.
    """
    language, files = _files_of(spec)
    pairs_of: dict[tuple[str, str | None], list[Text]] = {}  # by catalog and license
    left_out: Counter[str] = Counter()
    seen: set[str] = set()
    for path in files:
        try:
            catalog = read_catalog(path)
        except DataError:
            if len(files) == 1:
                raise
            left_out[_DAMAGED] += 1
            continue
        said = catalog.metadata.get("Language", "").strip()
        if said and said.partition("_")[0] != language.partition("_")[0]:
            left_out[f"catalogs in other languages than {language}"] += 1
            continue
        license = license_of(path, catalog)
        name = path.stem if license != DJANGO else _django_name(path)
        pairs_of_catalog = pairs_of.setdefault((name, license), [])
        for source, target in cleaned(catalog, MIN_WORDS, left_out):
            if source in seen:
                left_out["messages seen before"] += 1
            else:
                seen.add(source)
                pairs_of_catalog.append(Text(source, second=target))
    pairs = [pair for some in pairs_of.values() for pair in some]
    counts: Counter[str] = Counter()
    for (_, license), some in pairs_of.items():
        counts[license or "not stated, GPL for the most part"] += len(some)

    def read(skipped: Counter[str], cursor: Cursor) -> Iterator[Text]:
        skipped.update(left_out)
        yield from pairs

    return TextSource(
        spec,
        read,
        lambda: iter(shuffled(pairs)),
        files,
        "pairs",
        (ENGLISH, language),
        ", ".join(f"{name} ({n:,})" for name, n in counts.most_common() if n),
        n_bytes=sum(len(text.encode()) for pair in pairs for text in pair.texts),
        parts=tuple(
            PartEntry(name=name, license=license, documents=2 * len(some))
            for (name, license), some in pairs_of.items()
            if some
        ),
    )


def _files_of(spec: str) -> tuple[str, tuple[Path, ...]]:
    """Returns the language of a source, and the files of its catalogs."""
    language, _, place = spec.removeprefix(PREFIX).partition(":")
    if not _LANGUAGE.fullmatch(language):
        raise UserError(
            f"{spec}: '{language}' is not the code of a language; write {PREFIX}de for German, or "
            f"{PREFIX}de:PATH for catalogs in a folder"
        )
    if language == ENGLISH:
        raise UserError(f"{spec}: catalogs translate from English; name another language")
    require("polib", spec, "gettext")
    root = Path(place).expanduser() if place else None
    if root is None:
        folders = system_folders(language)
        paths = [path for folder in folders for path in files_below(folder, _SUFFIXES)]
        where = f"the locale folders of this system and this Python ({folders[0]} and others)"
        remedy = (
            f"install programs that include some (Debian: apt install git gnupg-l10n; on its slim "
            f"images, which omit translations, and elsewhere: pip install django), or name a "
            f"folder that has them: {PREFIX}{language}:PATH"
        )
    else:
        if not root.exists():
            raise UserError(f"{spec}: {root} does not exist; name a folder or a .mo or .po file")
        every = [root] if root.is_file() else files_below(root, _SUFFIXES)
        own = [p for p in every if language in (*p.relative_to(root).parts[:-1], p.stem)]
        # Or a file, or a folder of this language itself, for instance .../de/LC_MESSAGES.
        paths = own or (every if root.is_file() or language in root.resolve().parts else [])
        where = str(root)
        remedy = f"name a folder with */{language}/LC_MESSAGES/*.mo, {language}.po, or such a file"
    if not paths:
        raise UserError(f"{spec}: no catalogs for '{language}' in {where}: {remedy}")
    # One of several links to the same file, and of name.mo and name.po only the latter.
    real: dict[Path, Path] = {}
    for path in paths:
        real.setdefault(path.resolve(), path)
    kept = {*real.values()}
    twins = {path for path in kept if path.suffix != ".po" and path.with_suffix(".po") in kept}
    return language, tuple(path for path in real.values() if path not in twins)


def system_folders(language: str) -> list[Path]:
    """Returns folders in which the system, this Python and Django keep a language's catalogs."""
    share = (Path("/usr/share"), Path("/usr/local/share"), Path(sys.prefix) / "share")
    folders = [
        base / name / language / "LC_MESSAGES"
        for base in dict.fromkeys(share)
        for name in ("locale", "locale-langpack")
    ]
    django = importlib.util.find_spec("django")  # finds it without importing it
    for place in (django.submodule_search_locations or ()) if django else ():
        folders += sorted(Path(place).glob(f"**/locale/{language}/LC_MESSAGES"))
    return folders


def read_catalog(path: Path) -> polib.MOFile | polib.POFile:
    """Reads a .mo or .po file."""
    import polib

    try:
        # polib takes the path of a file that it cannot open for the text of a catalog.
        with path.open("rb"):
            pass
        return polib.pofile(str(path)) if path.suffix == ".po" else polib.mofile(str(path))
    # polib raises struct.error, IndexError and more for what it cannot parse.
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise DataError(f"{path}: is not a readable catalog ({reason})") from None


def cleaned(
    catalog: polib.MOFile | polib.POFile, min_words: int, skipped: Counter[str]
) -> Iterator[Pair]:
    """Yields translated messages on one line each, without keyboard shortcuts.

    Messages that are short, not translated, or whose translation is the same or waits for review
    (fuzzy) are left out and counted.
    """
    for entry in catalog:
        # Compilers leave fuzzy messages out, so entries of .mo files have no such flag.
        if entry.obsolete or getattr(entry, "fuzzy", False):
            skipped["messages that are fuzzy or obsolete"] += 1
            continue
        for source, target in _forms(entry):
            pair = without_mnemonics((" ".join(source.split()), " ".join(target.split())))
            if not pair[1] or pair[0].casefold() == pair[1].casefold():
                skipped["messages without a translation"] += 1
            elif len(_WORD.findall(pair[0])) < min_words:
                skipped[f"messages of less than {min_words} words"] += 1
            else:
                yield pair


def without_mnemonics(pair: Pair) -> Pair:
    """Removes keyboard shortcuts if each text has exactly one and their words differ."""
    marks = [list(_MNEMONIC.finditer(text)) for text in pair]
    if any(len(matches) != 1 for matches in marks):
        return pair
    places = [matches[0].start() for matches in marks]
    signs = [text[place] for text, place in zip(pair, places)]
    # From the space before each shortcut on.
    starts = [max(text.rfind(" ", 0, place), 0) for text, place in zip(pair, places)]
    words = [text[start:].split(maxsplit=1)[0] for text, start in zip(pair, starts)]
    if signs[0] != signs[1] or words[0] == words[1]:
        return pair
    source, target = (text[:place] + text[place + 1 :] for text, place in zip(pair, places))
    return source, target


def _forms(entry: polib.POEntry | polib.MOEntry) -> Iterator[tuple[str, str]]:
    """Yields the message, or its singular and plural forms."""
    if not entry.msgid_plural:
        yield entry.msgid, entry.msgstr
        return
    forms = [entry.msgstr_plural[key] for key in sorted(entry.msgstr_plural)]
    if len(forms) > 1:  # of three and more, a formula determines where the later ones apply
        yield entry.msgid, forms[0]
    if len(forms) in (1, 2):
        yield entry.msgid_plural, forms[-1]


def license_of(path: Path, catalog: polib.MOFile | polib.POFile) -> str | None:
    """Returns the license of a catalog, or None if it is not known.

    Compiled catalogs do not state it. Those of well-known projects have the license of the project,
    under whose terms translations are contributed. The package that installed a catalog is
    authoritative.
    """
    if "PostgreSQL" in catalog.metadata.get("Project-Id-Version", ""):
        return POSTGRES
    if {"django", "locale"} <= set(path.parts) and path.stem.startswith("django"):
        return DJANGO
    if path.stem.startswith("iso_"):
        return _LGPL  # iso-codes
    known = _LICENSE_OF.get(_VERSION.sub("", path.stem))
    said = _SAME_AS.search(" ".join(getattr(catalog, "header", "").split()))
    return known or (f"that of {said[1]}" if said else None)


def _django_name(path: Path) -> str:
    """Returns a name such as `django.contrib.admin.django` for a catalog in Django's folders."""
    parts = path.parts[: len(path.parts) - 1 - path.parts[::-1].index("locale")]
    start = len(parts) - 1 - parts[::-1].index("django")
    return ".".join(part for part in (*parts[start:], path.stem) if part != "conf")
