"""From sources to a token folder: contents, memory, interruptions, overwriting."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gridformer.data import TokenFolder, Tokenizer
from gridformer.data.prepare import reading
from gridformer.data.prepare.corpus import prepare_corpus, sampled_text
from gridformer.data.prepare.reading import TextSource
from gridformer.data.prepare.records import NO_PAIR
from gridformer.data.prepare.writer import PrepareProgress
from gridformer.utils.errors import DataError, UserError
from tests.support.data import Stop, documents, list_source, listed, pairs_source, sentences, texts

TOKENIZER = Tokenizer.train(sentences(200), 300)


@settings(max_examples=50)
@given(
    texts=st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=12).filter(any),
    seed=st.integers(0, 2**63 - 1),
    fraction=st.floats(0.01, 0.99),
)
@example(texts=["one<|endoftext|>still one", "two"], seed=0, fraction=0.5)
def test_every_document_is_there_once(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], seed: int, fraction: float
) -> None:
    out = tmp_path_factory.mktemp("t") / "tokens"
    folder = prepare_corpus(
        [listed(*texts)], out, tokenizer=TOKENIZER, seed=seed, val_fraction=fraction
    )
    got = documents(folder)
    held = [text for text in texts if text]
    assert got["train"]
    assert got["val"]
    if len(held) > 1:
        assert sorted(got["train"] + got["val"]) == sorted(held)
    else:
        ids = np.concatenate([folder.train.tokens, folder.val.tokens]).tolist()
        assert ids == [*TOKENIZER.encode(held[0]), TOKENIZER.eos_id]
    n_bytes = sum(len(text.encode()) for text in held)
    assert [source.bytes for source in folder.index.sources] == [n_bytes]


def test_large_vocabularies_take_four_bytes(tmp_path: Path) -> None:
    import tokenizers
    from tokenizers import models

    for size, dtype in ((1 << 16, "uint16"), ((1 << 16) + 1, "int32")):
        vocab = {f"w{i}": i for i in range(size - 1)} | {"</s>": size - 1}
        backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="w0"))
        wide = Tokenizer(backend, "words")
        folder = prepare_corpus([listed("w5", "w6")], tmp_path / dtype, tokenizer=wide)
        assert folder.index.dtype == folder.train.tokens.dtype.name == dtype
        assert sorted([*folder.train.tokens, *folder.val.tokens]) == [5, 6, size - 1, size - 1]


# --------------------------------------------------------------------------- streaming


def test_documents_are_consumed_lazily(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "BATCH_CHARS", 1000)
    given_out, reported, ahead = 0, 0, []

    def endless_looking() -> Iterator[str]:
        nonlocal given_out
        for text in itertools.islice(itertools.cycle(sentences(50)), 3000):
            given_out += len(text)
            ahead.append(given_out - reported)
            yield text

    def watch(now: PrepareProgress) -> None:
        nonlocal reported
        reported = now.bytes

    source = list_source(endless_looking)
    folder = prepare_corpus([source], tmp_path / "t", tokenizer=TOKENIZER, on_progress=watch)
    assert folder.train.n_documents + folder.val.n_documents == 3000
    assert reported == given_out
    assert max(ahead) < 1200  # characters read but not yet written: one batch


def test_the_sample_stops_at_its_limit_and_is_fair() -> None:
    def endless(word: str) -> TextSource:
        return list_source(lambda: itertools.repeat(word))

    short = listed("s" * 100)
    texts = list(sampled_text([endless("a" * 10), short, endless("é" * 5)], 2000))
    assert sum(len(text.encode()) for text in texts) == 2000
    assert texts.count("s" * 100) == 1
    assert abs(texts.count("a" * 10) - texts.count("é" * 5)) <= 1


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    n_bytes = sum(len(text) for text in sentences(30))
    source = list_source(lambda: sentences(30), n_bytes=n_bytes)
    seen: list[PrepareProgress] = []
    folder = prepare_corpus([source], tmp_path / "t", vocab_size=280, on_progress=seen.append)
    assert [now.phase for now in seen] == ["sampling", "training the tokenizer", "tokenizing"]
    assert seen[-1].bytes == seen[-1].total == source.n_bytes
    assert seen[-1].documents == 30
    assert seen[-1].tokens == folder.train.n_tokens + folder.val.n_tokens


# --------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("texts", [[], [""], ["", ""]])
@pytest.mark.parametrize("tokenizer", [None, TOKENIZER])
def test_nothing_to_prepare(tmp_path: Path, texts: list[str], tokenizer: Tokenizer | None) -> None:
    with pytest.raises(DataError, match="a list: there is no text to prepare"):
        prepare_corpus([listed(*texts)], tmp_path / "t", tokenizer=tokenizer)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fraction", [0.0, 1.0, -1.0, float("nan")])
def test_fractions(tmp_path: Path, fraction: float) -> None:
    with pytest.raises(UserError, match="must be between 0 and 1"):
        prepare_corpus([listed("x")], tmp_path / "t", val_fraction=fraction)


def interrupted() -> TextSource:
    def texts() -> Iterator[str]:
        yield from sentences(20)
        raise Stop

    return list_source(texts)


def test_an_interruption_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "BATCH_CHARS", 10)
    out = tmp_path / "t"
    with pytest.raises(Stop):
        prepare_corpus([interrupted()], out, tokenizer=TOKENIZER)
    assert list(tmp_path.iterdir()) == []
    # The folder that was to be replaced is still intact.
    kept = prepare_corpus([listed(*sentences(9))], out, tokenizer=TOKENIZER)
    with pytest.raises(Stop):
        prepare_corpus([interrupted()], out, tokenizer=TOKENIZER, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["t"]
    assert documents(TokenFolder.open(out)) == documents(kept)


def test_existing_folders_need_overwrite(tmp_path: Path) -> None:
    out = tmp_path / "t"
    out.mkdir()  # an empty folder does not need it
    prepare_corpus([pairs_source(9)], out, tokenizer=TOKENIZER)
    with pytest.raises(UserError, match="add --overwrite"):
        prepare_corpus([listed(*sentences(5))], out, tokenizer=TOKENIZER)
    folder = prepare_corpus([listed(*sentences(5))], out, tokenizer=TOKENIZER, overwrite=True)
    assert folder.index.sources[0].documents == 5
    assert len(list(out.iterdir())) == 6, "files of the pairs are left"
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_folders_that_are_not_ours_stay(tmp_path: Path, overwrite: bool) -> None:
    def refuse(match: str) -> None:
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(UserError, match=match):
            prepare_corpus([listed(*sentences(9))], out, tokenizer=TOKENIZER, overwrite=overwrite)
        assert sorted(tmp_path.rglob("*")) == before

    out = tmp_path / "precious"
    out.mkdir()
    (out / "thesis.tex").write_text("x")
    refuse(r"holds thesis\.tex, which prepare did not write")
    (out / "thesis.tex").rename(out / "index.json")
    refuse(r"index\.json does not make it a token folder")

    out = tmp_path / "file"
    out.write_text("x")
    refuse("is a file")

    out = tmp_path / "tokens"
    prepare_corpus([listed(*sentences(9))], out, tokenizer=TOKENIZER)
    (out / "notes.txt").write_text("x")
    refuse(r"holds notes\.txt, which prepare did not write")


def test_files_that_appear_meanwhile_stay(tmp_path: Path) -> None:
    out = tmp_path / "t"

    def texts() -> Iterator[str]:
        out.mkdir()
        (out / "precious").write_text("x")
        yield from sentences(5)

    with pytest.raises(UserError, match="holds precious"):
        prepare_corpus([list_source(texts)], out, tokenizer=TOKENIZER)
    assert [path.name for path in tmp_path.rglob("*")] == ["t", "precious"]


def test_a_symbolic_link_is_kept(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "t").symlink_to(tmp_path / "disk" / "t")
    prepare_corpus([listed(*sentences(9))], tmp_path / "t", tokenizer=TOKENIZER)
    assert (tmp_path / "t").is_symlink()
    assert (tmp_path / "disk" / "t" / "index.json").is_file()


# --------------------------------------------------------------------------- pairs and labels


def test_pairs(tmp_path: Path) -> None:
    source = pairs_source(40)
    folder = prepare_corpus([source], tmp_path / "t", vocab_size=300, val_fraction=0.2)
    assert (folder.kind, folder.index.languages) == ("pairs", ("small", "LARGE"))
    got = documents(folder)
    found = [pair for some in got.values() for pair in zip(some[::2], some[1::2], strict=True)]
    both = texts([source])
    assert sorted(found) == sorted(zip(both[::2], both[1::2]))
    assert folder.index.sources[0].documents == 80
    # The tokenizer was trained on both texts.
    assert len(folder.tokenizer.encode("QUICK")) < 5
    assert len(folder.tokenizer.encode("quick")) < 5


def test_pairs_without_tokens_on_one_side_are_left_out(tmp_path: Path) -> None:
    both = ["a", "b", "", "x", "c", "d", "e", "", "", ""]
    source = list_source(lambda: both, "pairs", languages=("x", "y"))
    folder = prepare_corpus([source], tmp_path / "t", tokenizer=TOKENIZER)
    assert folder.index.skipped == {NO_PAIR: 3}
    got = documents(folder)
    assert sorted([got["train"], got["val"]]) == [["a", "b"], ["c", "d"]]


def test_texts_longer_than_a_piece_keep_their_tokens(tmp_path: Path) -> None:
    """As documents, and as texts of a pair."""
    long = "".join(sentences(3000))
    n = {text: len(TOKENIZER.encode(text)) + 1 for text in (long, "short", "a")}
    pairs = list_source(lambda: [long, "short", "a", long], "pairs", languages=("x", "y"))
    for source, want in (
        (listed(long, "short"), [[n[long]], [n["short"]]]),
        (pairs, [[n[long], n["short"]], [n["a"], n[long]]]),
    ):
        folder = prepare_corpus([source], tmp_path / source.kind, tokenizer=TOKENIZER)
        lengths = [np.diff(split.offsets).tolist() for split in (folder.train, folder.val)]
        assert sorted(lengths) == sorted(want)


# --------------------------------------------------------------------------- ends of documents


def test_tokens_at_the_ends_of_documents_that_cannot_be_had(tmp_path: Path) -> None:
    tokenizer = Tokenizer.train(sentences(20), 300)
    tokenizer.bos_token = "a"
    with pytest.raises(UserError, match="--eos none is for running text"):
        prepare_corpus([pairs_source(9)], tmp_path / "t", tokenizer=TOKENIZER, ends=False)
    with pytest.raises(UserError, match="--bos is not for pairs: a decoder already begins"):
        prepare_corpus([pairs_source(9)], tmp_path / "t", tokenizer=tokenizer)
