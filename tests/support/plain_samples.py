"""What samples are, written a second time from what the documentation says, without gridformer."""

from types import SimpleNamespace as Corpus  # docs, which EOS ends, and columns
from typing import Any

IGNORE, EOS, V = -100, 0, 10_000
PAD, CLS, SEP = V, V + 2, V + 3  # of BERT; T5 and Transformer have PAD
Row = dict[str, Any]  # without padding where several documents may share a row


def fill(ids: list[int], n: int, value: int) -> list[int]:
    return [*ids, *[value] * (n - len(ids))]


def windows(c: Corpus, length: int, mask: bool = False, reset: bool = False) -> list[Row]:
    found, text = [], [(d, token) for d, doc in enumerate(c.docs) for token in doc]
    for i in range(0, len(text) - length, length):
        owners, ids = (list(some) for some in zip(*text[i : i + length + 1]))
        next_ones = zip(ids[1:], owners, owners[1:])
        targets = [t if here == there or not mask else IGNORE for t, here, there in next_ones]
        row: Row = {"tokens": ids[:-1], "targets": targets}
        row |= {"documents": [d - owners[0] for d in owners[:-1]]} if mask else {}
        row |= {"positions": [j - owners.index(owners[j]) for j in range(length)]} if reset else {}
        found.append(row)
    return found


def documents(c: Corpus, length: int) -> list[Row]:
    """Documents to pack; those that are longer than a sample are divided."""
    ids = [doc[i : i + length + 1] for doc in c.docs for i in range(0, len(doc) - 1, length)]
    return [{"tokens": one[:-1], "targets": one[1:]} for one in ids]


def cut(c: Corpus, n: int) -> list[Row]:
    text = [token for doc in c.docs for token in doc]
    return [{"text": text[i : i + n]} for i in range(0, len(text) - n + 1, n)]


def chats(c: Corpus, length: int) -> list[Row]:
    """Conversations of which an answer begins in time, without the folder's end-of-text token."""
    found, answer = [], iter(c.columns["answer"])
    for doc, begins in zip(c.docs, c.columns["first_answer"]):
        targets, n = [t if next(answer) else IGNORE for t in doc], min(len(doc) - 2, length)
        if begins <= length:
            found.append({"tokens": doc[:n], "targets": targets[1 : n + 1]})
    return found


def pairs(c: Corpus, family: str, source: int, length: int) -> list[Row]:
    begin, both = [PAD if family == "t5" else EOS], zip(c.docs[::2], c.docs[1::2])
    fitting = [(a, b) for a, b in both if len(a) <= source and len(b) <= length]
    return [{"source": a, "tokens": begin + b[:-1], "targets": b} for a, b in fitting]


def best_fit(sizes: list[int], room: int) -> list[int]:
    """The longest first, each where the least room is left in which it fits: what is left."""
    rooms = [room] * len(sizes)
    for size in sorted(sizes, reverse=True):
        rooms[rooms.index(min(left for left in rooms if left >= size))] -= size
    return sorted(left for left in rooms if left < room)


def texts(c: Corpus, family: str, length: int, label: str) -> list[Row]:
    every = zip(c.docs, c.columns["parts"], c.columns[label])
    both = [((doc[:n], doc[n:-1]), {"labels": wanted}) for doc, (n, *_), wanted in every]
    return [sequence(family, *texts, length) | wanted for texts, wanted in both]


def choices(c: Corpus, family: str, length: int) -> list[Row]:
    found = []
    for doc, (n, k, _), right in zip(c.docs, c.columns["parts"], c.columns["right"]):
        both = [sequence(family, doc[:n], b, length) for b in (doc[n : n + k], doc[n + k : -1])]
        found.append({key: [one[key] for one in both] for key in both[0]} | {"labels": right})
    return found


def sequence(family: str, a: list[int], b: list[int], length: int) -> Row:
    """One or two texts; the longer one is truncated, and the second one if they are equal."""
    before, sep = ([CLS], SEP) if family == "bert" else ([], EOS)
    between, end = [sep] * bool(b), [] if family == "gpt2" else [sep]  # gpt2 pads with it
    a, b = [*a], [*b]
    while len(before + a + between + b + end) > length:
        (a if len(a) > len(b) else b).pop()
    ids = before + a + between + b + end
    at = 0 if family == "bert" else len(ids) - 1
    return read(family, ids, length, len(before + a) + 1) | {"at": at}


def read(family: str, ids: list[int], length: int, n_first: int) -> Row:
    tokens = fill(ids, length, EOS if family == "gpt2" else PAD)
    valid = [i < len(ids) for i in range(length)]
    if family == "t5":  # its decoder reads the same one token later
        return {"source": tokens, "source_valid": valid, "tokens": [PAD, *tokens[:-1]]}
    segments = {"segments": [int(n_first <= i < len(ids)) for i in range(length)]}
    return {"tokens": tokens, "valid": valid} | (segments if family == "bert" else {})


def answers(c: Corpus, family: str, length: int, stride: int) -> list[Row]:
    found, (cls, sep) = [], (CLS, SEP) if family == "bert" else (EOS, EOS)
    for doc, (n, *_), (low, high) in zip(c.docs, c.columns["parts"], c.columns["answer"]):
        asked, context = doc[:n][: (length - 3) // 2], doc[n:-1]
        at, room = len(asked) + 2, length - 3 - len(asked)
        step = min(stride, room)
        for start in range(0, max(1, len(context) - room + step), step):
            held = context[start : start + room]
            row = read(family, [cls, *asked, sep, *held, sep], length, at)
            inside = start <= low and high < start + len(held)
            row["answer"] = [low - start + at, high - start + at] if inside else [0, 0]
            found.append(row)
    return found
