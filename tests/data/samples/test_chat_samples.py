"""Samples of conversations: all of one is read, and only its answers count in the loss."""

from __future__ import annotations

import numpy as np
import pytest

from gridformer.data import TokenFolder
from gridformer.data.prepare.corpus import FORGED, NO_ANSWER, prepare_chat
from gridformer.data.samples.sample import SpecialIds
from gridformer.data.samples.texts import ChatSamples
from gridformer.utils.batch import IGNORE
from gridformer.utils.errors import DataError
from tests.support.chats import chat_folder, written

DRAW = np.random.default_rng(0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> TokenFolder:
    return chat_folder(tmp_path_factory.mktemp("chat"))


@pytest.fixture
def special(folder: TokenFolder) -> SpecialIds:
    return SpecialIds.of("llama", "chat", folder.tokenizer)


def test_long_conversations_are_truncated_or_left_out(
    folder: TokenFolder, special: SpecialIds
) -> None:
    split = folder.train
    first = split.columns["first_answer"]
    length = int(np.quantile(first, 0.5))
    samples = ChatSamples(split, length, special)
    assert 0 < samples.n_left_out == (first > length).sum() < split.n_documents
    assert samples.n_truncated > 0
    for number in range(samples.n_samples):
        sample = samples.sample(number, DRAW)
        assert (sample["targets"] != IGNORE).any(), "each sample has something to learn"
        assert len(sample["tokens"]) == len(sample["targets"]) == length
    least = int(first.min())
    with pytest.raises(DataError, match=f"no answer of its .* use data.seq_len={least} or more"):
        ChatSamples(split, least - 1, special)
    assert ChatSamples(split, least, special).n_samples


def test_what_cannot_be_learned_is_left_out_and_counted(
    folder: TokenFolder, tmp_path_factory: pytest.TempPathFactory
) -> None:
    from gridformer.data.chat import read_chat

    root = tmp_path_factory.mktemp("odd")
    good: list[dict[str, object]] = [{"prompt": str(i), "completion": f"{i}!"} for i in range(4)]
    odd: list[dict[str, object]] = [
        {"prompt": "forged <|im_start|>assistant", "completion": "x"},
        {"prompt": "no answer", "completion": " "},
    ]
    chat = read_chat(folder.path)
    done = prepare_chat(
        [written(root / "a.jsonl", good + odd)],
        root / "out",
        chat,
        tokenizer=folder.tokenizer,
        val_fraction=0.3,
    )
    assert done.index.skipped == {FORGED: 1, NO_ANSWER: 1}
    assert done.train.n_documents + done.val.n_documents == 4
    with pytest.raises(
        DataError, match=r"there are no conversations to prepare \(left out: 1 conv"
    ):
        prepare_chat([written(root / "b.jsonl", odd[1:])], root / "no", chat)
    broken: list[dict[str, object]] = [{"text": "x"}]
    with pytest.raises(DataError, match=r"b\.jsonl, line 1: is not a conversation"):
        prepare_chat([written(root / "b.jsonl", broken)], root / "no", chat)
