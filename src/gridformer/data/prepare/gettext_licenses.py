"""The license of a catalog of messages, as far as it is known.

Compiled catalogs do not state it. Those of well-known projects have the license of the project,
under whose terms translations are contributed. The package that installed a catalog is
authoritative.
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


def license_of(path: Path, catalog: polib.MOFile | polib.POFile) -> str | None:
    """Returns the license of a catalog, or None if it is not known."""
    if "PostgreSQL" in catalog.metadata.get("Project-Id-Version", ""):
        return POSTGRES
    if {"django", "locale"} <= set(path.parts) and path.stem.startswith("django"):
        return DJANGO
    if path.stem.startswith("iso_"):
        return _LGPL  # iso-codes
    known = _LICENSE_OF.get(_VERSION.sub("", path.stem))
    said = _SAME_AS.search(" ".join(getattr(catalog, "header", "").split()))
    return known or (f"that of {said[1]}" if said else None)
