"""What a run does with the copies of its checkpoints, besides making them."""

from __future__ import annotations

from pathlib import Path

import pytest

from gridformer.checkpoint.copies import clash


@pytest.mark.parametrize(
    ("url", "clashes"),
    [
        ("{out}/checkpoints", True),
        ("file://{out}/checkpoints/", True),
        ("file://{out}/checkpoints/copies", True),
        ("{link}/checkpoints", True),
        ("local://{out}", True),
        ("{top}", True),  # the run directory is one of the folders of copies there
        ("{out}/copies", False),
        ("{out}/../far", False),
        ("{out}-far", False),
        ("{top}/..", False),
        ("memory://{out}/checkpoints", False),
        ("nonsense://{out}", False),
    ],
)
def test_copies_never_replace_what_the_run_writes(tmp_path: Path, url: str, clashes: bool) -> None:
    out, link = tmp_path / "step-00000004", tmp_path / "link"
    link.symlink_to(out)
    asked = url.format(out=out, link=link, top=tmp_path)
    said = clash(asked, out)
    assert said.startswith(f"train.checkpoint_to={asked} is where the run itself writes") == clashes
    assert bool(said) == clashes
    if clashes:
        assert "name a folder outside the run directory" in said
