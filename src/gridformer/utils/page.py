"""The frame of the HTML pages: one file that needs no network, readable on screen and on paper."""

from __future__ import annotations

import base64
import hashlib
import html

STYLE = """
:root { --text: #222; --soft: #555; --line: #ddd; --code: #f3f3f3; --page: #fff; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--page);
  max-width: 1080px; margin: 32px auto; padding: 0 24px; }
h1 { font-size: 26px; margin-bottom: 4px; } h2 { font-size: 19px; margin: 36px 0 4px; }
p.note { color: var(--soft); margin-top: 0; }
code { background: var(--code); padding: 1px 4px; font-size: 13px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
td, th { text-align: right; padding: 4px 10px; border-bottom: 1px solid var(--line); }
ol li { margin-bottom: 12px; }
"""
DARK = """
:root { color-scheme: light dark; }
@media screen and (prefers-color-scheme: dark) {
  :root { --text: #e4e4e4; --soft: #a2a7ad; --line: #3a3f45; --code: #2a2e33; --page: #16181b; }
}
"""


def document(title: str, body: str, style: str = "", script: str = "") -> str:
    """Returns a whole page.

    Args:
        title: The title, as text.
        body: The content of the body, as HTML in which all text is escaped.
        style: More CSS, after that of all pages.
        script: JavaScript that runs after the body. The page then allows this script alone, and
            lets it load nothing.
    """
    head = "<meta charset='utf-8'><meta name='viewport' content='width=device-width'>"
    if script:
        # A script that a name from a run could bring in would have another checksum.
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        rules = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
        head += f'<meta http-equiv="Content-Security-Policy" content="{rules}">'
        body += f"\n<script>{script}</script>"
    head += f"<title>{html.escape(title)}</title><style>{STYLE}{style}</style>"
    return f"<!doctype html><html lang='en'><head>{head}</head><body>{body}</body></html>\n"
