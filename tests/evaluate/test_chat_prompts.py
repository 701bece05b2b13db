"""generate --chat: prompts are rendered as in training, and answers end where turns do."""

import json
from pathlib import Path

import pytest
import torch

from gridformer.checkpoint import find
from gridformer.checkpoint.manifest import KEPT
from gridformer.cli.trained import generate
from gridformer.config import parse_run
from gridformer.data import TokenFolder
from gridformer.data.chat import read_chat, write_chat
from gridformer.evaluate.beams import BeamSearch
from gridformer.evaluate.continuing import Prompt, Sampling
from gridformer.evaluate.generate import (
    Generation,
    check_options,
    continue_prompts,
    continued_ids,
    prompt_ids,
    stream,
)
from gridformer.evaluate.loading import load_model
from gridformer.evaluate.prompts import (
    chat_prompts,
    read_conversations,
    said_by_system,
    said_by_user,
    stored_chat,
)
from gridformer.utils.errors import ConfigError, DataError, UserError
from tests.support.chats import chat_folder
from tests.support.checkpoints import save_model

CPU = torch.device("cpu")
MODEL = {
    "family": "llama", "n_layers": 1, "hidden_size": 16, "n_heads": 2, "max_seq_len": 32,
    "init_std": 0.5,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> TokenFolder:
    return chat_folder(tmp_path_factory.mktemp("chat"), 30)


@pytest.fixture
def out(folder: TokenFolder, tmp_path: Path) -> Path:
    """Return the run directory of an untrained model, without a template."""
    sections = {"model": {**MODEL, "vocab_size": folder.vocab_size}, "data": {"path": "x"}}
    run = parse_run(sections, ["data.task=chat", "train.dtype=float64"])
    save_model(tmp_path / "run", run)
    (tmp_path / "run" / "tokenizer.json").write_bytes(folder.tokenizer_file.read_bytes())
    return tmp_path / "run"


def test_a_prompt_is_what_training_has_before_an_answer(folder: TokenFolder, out: Path) -> None:
    write_chat(out, read_chat(folder.path))
    talk = said_by_user("3 + 3?")
    texts, stops = chat_prompts(find.newest(out), [talk, said_by_system("be kind", talk)])
    assert texts == [
        "<|im_start|>user\n3 + 3?<|im_end|>\n<|im_start|>assistant\n",
        "<|im_start|>system\nbe kind<|im_end|>\n"
        "<|im_start|>user\n3 + 3?<|im_end|>\n<|im_start|>assistant\n",
    ]
    assert stops == {folder.tokenizer.id_of("<|im_end|>"), folder.eos_id}

    for number in range(folder.train.n_documents):
        whole = folder.train.document(number).tolist()
        asked = folder.tokenizer.decode(whole).partition("user\n")[2].partition("<|im_end|>")[0]
        (ids,) = prompt_ids(
            folder.tokenizer, *chat_prompts(find.newest(out), [said_by_user(asked)])
        )
        assert ids == whole[: int(folder.train.columns["first_answer"][number])]
        if number == 2:
            break  # each renders in a process of its own


def test_answers_end_at_stops(folder: TokenFolder, out: Path) -> None:
    trained, eos = load_model(out, CPU), folder.eos_id
    sampling, search = Sampling(temperature=1.5), BeamSearch(max_tokens=40)
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    how = Generation(sampling, search, 1, frozenset({eos}))
    (ids,) = prompt_ids(folder.tokenizer, [text], how.stops)
    work = [Prompt(ids, 40, 0)]
    (free,) = continued_ids(trained, work, how)
    stop = free[8]
    stopping = Generation(sampling, search, 1, frozenset({eos, stop}))
    (ended,) = continued_ids(trained, work, stopping)
    assert ended == free[: free.index(stop)]
    assert continue_prompts(trained, [text], stopping) == [folder.tokenizer.decode(ended)]
    assert "".join(stream(trained, text, stopping)) == folder.tokenizer.decode(ended)


def test_where_the_template_comes_from(folder: TokenFolder, out: Path) -> None:
    with pytest.raises(DataError, match="has no chat template: --chat is for models that were"):
        stored_chat(find.newest(out))
    (out / KEPT).mkdir()
    config = {"chat_template": "{{ bos_token }}", "bos_token": "<s>"}
    (out / KEPT / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    assert stored_chat(find.newest(out)).special == {"bos_token": "<s>"}
    write_chat(out, read_chat(folder.path))
    assert stored_chat(find.newest(out)).origin == "chatml"


def test_conversations_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "asked.jsonl"
    talk = [*said_by_user("a"), {"role": "assistant", "content": "b"}, *said_by_user("c")]
    file.write_text(json.dumps({"messages": talk}) + "\n" + json.dumps({"prompt": "d"}) + "\n")
    assert read_conversations(file) == [talk, said_by_user("d")]
    file.write_text('{"text": "x"}\n')
    with pytest.raises(DataError, match="record 1 must be an object with a text under prompt"):
        read_conversations(file)


def test_what_has_no_chat(folder: TokenFolder, out: Path) -> None:
    bert = parse_run({"model": {**MODEL, "family": "bert"}, "data": {"path": "x"}}).model
    with pytest.raises(ConfigError, match="--chat is for gpt2 and llama, and this model is a bert"):
        check_options(bert, [], chat=True)
    with pytest.raises(UserError, match="--system is a message of a conversation"):
        generate(out, system="x", prompt="y")
