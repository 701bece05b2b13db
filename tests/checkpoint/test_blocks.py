"""Each rank copies and writes its own blocks, their index stays small, a load opens few files."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from gridformer.checkpoint import safetensors_file
from gridformer.checkpoint.blocks import (
    BlockIndex,
    Snapshot,
    TensorBlock,
    bytes_of,
    joined_index,
    packed_part,
    written_here,
)
from gridformer.checkpoint.safetensors_file import positions_in, read_blocks, write_file
from gridformer.mesh import Axes, Axis
from gridformer.parallel.sharding import ParamShard
from gridformer.utils.errors import CheckpointError

SIZE = (6, 8)


def whole() -> Tensor:
    return torch.arange(48.0).view(SIZE)


def block(row: int, col: int) -> TensorBlock:
    """Return the block of one of 2 x 4 devices."""
    shard = ParamShard(SIZE, (3 * row, 2 * col))
    return TensorBlock.of(shard.block_of(whole(), torch.Size((3, 2))), shard)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, BlockIndex]:
    """A folder into which eight ranks have written their blocks of two tensors."""
    parts = {}
    for rank in range(8):
        held = dict.fromkeys(("a", "b"), block(*divmod(rank, 4)))
        with (tmp_path / f"{rank}.safetensors").open("wb") as file:
            write_file(file, held)
        parts[f"{rank}.safetensors"] = packed_part(held)
    return tmp_path, joined_index(parts)


def test_a_load_opens_the_files_that_it_needs(
    saved: tuple[Path, BlockIndex], monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    opened_file = safetensors_file.opened_file

    def noted(path: Path) -> Any:
        names.append(path.name)
        return opened_file(path)

    monkeypatch.setattr(safetensors_file, "opened_file", noted)
    local = torch.zeros(2, 4).t()  # stored transposed; rows 1 to 4, columns 2 and 3
    read_blocks({"a": TensorBlock.of(local, ParamShard(SIZE, (1, 2)))}, *saved)
    assert torch.equal(local, whole()[1:5, 2:4])
    assert names == ["1.safetensors", "5.safetensors"]


def test_tensors_begin_at_multiples_of_eight_bytes(saved: tuple[Path, BlockIndex]) -> None:
    """Readers map files, and read numbers of eight bytes where they lie."""
    for path in saved[0].glob("*.safetensors"):
        assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0


def test_an_index_names_tensors_once(saved: tuple[Path, BlockIndex]) -> None:
    index = saved[1]
    assert index.names == [["a", "b"]]
    assert index.files["6.safetensors"] == [(0, (3, 4), (3, 2))]
    assert BlockIndex.model_validate_json(index.model_dump_json()) == index


@pytest.mark.parametrize(
    ("name", "size", "without", "message"),
    [
        ("c", SIZE, "", "does not contain 'c'"),
        ("a", (6, 9), "", r"with shape \[6, 8\], but this run needs \[6, 9\]"),
        ("a", SIZE, "2.safetensors", "only a part of 'a': a file is missing"),
    ],
)
def test_what_does_not_fit_is_refused(
    saved: tuple[Path, BlockIndex], name: str, size: tuple[int, ...], without: str, message: str
) -> None:
    folder, index = saved
    index.files.pop(without, None)
    wanted = {name: TensorBlock.of(torch.zeros(size), ParamShard(size, (0, 0)))}
    with pytest.raises(CheckpointError, match=message):
        read_blocks(wanted, folder, index)


@pytest.mark.parametrize("damage", [bytes(7) + b"@", bytes(64), b"\xff", b"\x08"], ids=str)
def test_a_damaged_header_is_named(saved: tuple[Path, BlockIndex], damage: bytes) -> None:
    """Also by a rank that has not verified the file, since ranks share that work."""
    folder, index = saved
    path = folder / "5.safetensors"
    path.write_bytes(damage + path.read_bytes()[len(damage) :])
    told = f"{path} is truncated, damaged or no safetensors file"
    with pytest.raises(CheckpointError, match=told):
        read_blocks({"a": TensorBlock(torch.zeros(SIZE), SIZE, (0, 0))}, folder, index)
    with pytest.raises(CheckpointError, match=told):
        next(positions_in(path))


def test_one_rank_writes_a_block() -> None:
    """One of the replicas, which have about as much to write; or the first stage that has it."""
    shards: Mapping[str, tuple[Tensor, ParamShard]] = {
        f"t{n}": (torch.zeros(n), ParamShard((n,), (0,))) for n in range(9, 0, -1)
    }
    written = [written_here(shards, Axes(dp=Axis("dp", 3, index))) for index in range(3)]
    assert sorted(name for blocks in written for name in blocks) == sorted(shards)
    loads = [sum(one.tensor.numel() for one in blocks.values()) for blocks in written]
    assert max(loads) - min(loads) <= 2  # in turn, it would be 6
    shards = {"tied": (torch.zeros(4), ParamShard((4,), (0,), stages=(1, 3)))}
    stages = [bool(written_here(shards, Axes(pp=Axis("pp", 4, index)))) for index in range(4)]
    assert stages == [False, True, False, False]
    for size, writes in ((9, True), (6, False)):  # parts of replicas; the last of 6 is padding
        part = {"part": (torch.zeros(3), ParamShard((size,), (6,), replicas=None))}
        assert bool(written_here(part, Axes(dp=Axis("dp", 3, 2)))) == writes


def test_memory_that_was_reserved_is_not_pinned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[int] = []

    def register(_: int, n_bytes: int, __: int) -> int:
        pinned.append(n_bytes)
        return 0

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=lambda _: 0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    values = {"x": torch.arange(6.0), "y": torch.ones(3)}
    blocks = {name: TensorBlock(x, tuple(x.shape), (0,)) for name, x in values.items()}
    snapshot = Snapshot()
    snapshot.reserve(bytes_of(blocks), pinned=True)
    copies = snapshot.take(blocks)
    snapshot.reserve(bytes_of(blocks), pinned=True)
    assert pinned == [bytes_of(blocks)]
    assert all(torch.equal(copies[name].tensor, x) for name, x in values.items())
