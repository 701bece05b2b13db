"""Small conversations, and a folder of them."""

import json
from pathlib import Path

from gridformer.data import TokenFolder
from gridformer.data.chat import open_template
from gridformer.data.prepare.corpus import prepare_chat


def conversations(n: int) -> list[dict[str, object]]:
    """Return n records, in the three forms in turn, with one or two answers each."""
    found: list[dict[str, object]] = []
    for i in range(n):
        a, b = i % 7, i * i % 11
        said = (f"{a} + {b}?", f"{a + b}", f"{b} - {a}?", f"it is {b - a}")
        turns = [{"role": ("user", "assistant")[j % 2], "content": said[j]} for j in range(4)]
        forms: tuple[dict[str, object], ...] = (
            {"messages": turns},
            {"instruction": "Add.", "input": f"{a} {b}", "output": f"{a + b}"},
            {"prompt": f"count to {a}", "completion": " ".join(map(str, range(a + 1)))},
        )
        found.append(forms[i % 3])
    return found


def written(path: Path, records: list[dict[str, object]]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def chat_folder(root: Path, n: int = 150) -> TokenFolder:
    """Prepare a folder of n conversations with the template chatml."""
    chat, needed = open_template("chatml", None)
    lines = written(root / "talks.jsonl", conversations(n))
    return prepare_chat([lines], root / "chat", chat, needed, vocab_size=300, val_fraction=0.2)
