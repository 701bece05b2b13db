"""Under which licence a catalogue of messages is, as far as that is known.

Compiled catalogues do not say; those of well-known projects go by the licence of the project, under
whose terms translations are given. The package that installed a catalogue has the last word.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import polib

DJANGO = "BSD-3-Clause, Django"
POSTGRES = "PostgreSQL License"
_GPL2, _GPL3, _LGPL = "GPL-2.0-or-later", "GPL-3.0-or-later", "LGPL-2.1-or-later"
# By the name of the file, without a version at its end.
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
_LICENCE_OF = {name: licence for licence, names in _BY_NAME.items() for name in names}
# What translators write into the head of a .po file.
_SAME_AS = re.compile(r"same licen[sc]e as (?:the )?(.+?)(?: package| project)?\.", re.IGNORECASE)
_VERSION = re.compile(r"(-?\d[\d.]*)(-properties)?$")


def licence_of(path: Path, catalogue: polib.MOFile | polib.POFile) -> str | None:
    """The licence of a catalogue; None where it is not known."""
    if "PostgreSQL" in catalogue.metadata.get("Project-Id-Version", ""):
        return POSTGRES
    if {"django", "locale"} <= set(path.parts) and path.stem.startswith("django"):
        return DJANGO
    if path.stem.startswith("iso_"):
        return _LGPL  # iso-codes
    known = _LICENCE_OF.get(_VERSION.sub("", path.stem))
    said = _SAME_AS.search(" ".join(getattr(catalogue, "header", "").split()))
    return known or (f"that of {said[1]}" if said else None)
