"""Small conversations, and a folder of them."""

from __future__ import annotations

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
        if i % 3 == 0:
            talk = [(f"{a} + {b}?", f"{a + b}"), (f"{b} - {a}?", f"it is {b - a}")]
            messages = [
                {"role": role, "content": text}
                for turn in talk
                for role, text in zip(("user", "assistant"), turn)
            ]
            found.append({"messages": messages})
        elif i % 3 == 1:
            found.append({"instruction": "Add.", "input": f"{a} {b}", "output": f"{a + b}"})
        else:
            found.append(
                {"prompt": f"count to {a}", "completion": " ".join(map(str, range(a + 1)))}
            )
    return found


def written(path: Path, records: list[dict[str, object]]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def chat_folder(root: Path, n: int = 150) -> TokenFolder:
    """Prepare a folder of n conversations with the template chatml."""
    chat, needed = open_template("chatml", None)
    lines = written(root / "talks.jsonl", conversations(n))
    return prepare_chat([lines], root / "chat", chat, needed, vocab_size=300, val_fraction=0.2)
