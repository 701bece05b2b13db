"""Token files as Megatron-LM and datatrove write them, made from the formats' descriptions alone;
and a folder as transformers writes it.

None of this uses the library's own reader or writer, so that both are compared with the formats.
"""

import struct
from collections.abc import Callable, Sequence
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import torch

from tests.support.marks import extra

# The letters that stand for the dtypes of Megatron-LM's codes in the module struct.
LETTERS = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 8: "H"}

Documents = Sequence[Sequence[Sequence[int]]]  # the sequences of each document


def megatron_bytes(documents: Documents, code: int, modes: bool = False) -> tuple[bytes, bytes]:
    """Return the contents of a .bin and an .idx file."""
    sequences = [sequence for document in documents for sequence in document]
    item = struct.calcsize(LETTERS[code])
    tokens = b"".join(struct.pack(f"<{len(s)}{LETTERS[code]}", *s) for s in sequences)
    index = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", code)
    index += struct.pack("<Q", len(sequences)) + struct.pack("<Q", len(documents) + 1)
    sizes = [len(sequence) for sequence in sequences]
    index += struct.pack(f"<{len(sizes)}i", *sizes)
    pointers = accumulate((item * size for size in sizes[:-1]), initial=0)
    index += struct.pack(f"<{len(sizes)}q", *islice(pointers, len(sizes)))
    borders = accumulate(map(len, documents), initial=0)
    index += struct.pack(f"<{len(documents) + 1}q", *borders)
    return tokens, index + (b"\0" * len(sequences) if modes else b"")


def write_megatron(prefix: Path, documents: Documents, code: int = 8, modes: bool = False) -> Path:
    """Write PREFIX.bin and PREFIX.idx, and return PREFIX."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    tokens, index = megatron_bytes(documents, code, modes)
    prefix.with_name(f"{prefix.name}.bin").write_bytes(tokens)
    prefix.with_name(f"{prefix.name}.idx").write_bytes(index)
    return prefix


def write_datatrove(file: Path, documents: Sequence[Sequence[int]], item: int = 2) -> Path:
    """Write NAME.ds, its index and its metadata, and return NAME.ds."""
    file.parent.mkdir(parents=True, exist_ok=True)
    ids = [i for document in documents for i in document]
    file.write_bytes(struct.pack(f"<{len(ids)}{'H' if item == 2 else 'I'}", *ids))
    ends = [*accumulate(map(len, documents))]
    file.with_name(f"{file.name}.index").write_bytes(struct.pack(f"<{len(ends)}Q", *ends))
    file.with_name(f"{file.name}.metadata").write_text(f"gpt2|{item}\n{len(ids)}\n{len(ids)} T")
    return file


def shorter(name: str, by: int) -> Callable[[Path], None]:
    """Return what cuts the end of a file of a folder off."""

    def damage(folder: Path) -> None:
        (folder / name).write_bytes((folder / name).read_bytes()[:-by])

    return damage


def put(name: str, at: int, value: bytes) -> Callable[[Path], None]:
    """Return what writes some bytes into a file of a folder."""

    def damage(folder: Path) -> None:
        with (folder / name).open("r+b") as file:
            file.seek(at)
            file.write(value)

    return damage


def without(name: str) -> Callable[[Path], None]:
    """Return what removes a file of a folder."""
    return lambda folder: (folder / name).unlink()


def save_llama(folder: Path, **changes: Any) -> Path:
    """Save a small Llama of transformers with random weights, and return its folder."""
    transformers = extra("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **{
            **{"vocab_size": 301, "hidden_size": 48, "intermediate_size": 96},
            **{"num_hidden_layers": 5, "num_attention_heads": 12, "num_key_value_heads": 4},
            **{"max_position_embeddings": 24, "tie_word_embeddings": False, **changes},
        }
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder
