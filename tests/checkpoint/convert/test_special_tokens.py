"""Special tokens mean the same in a folder of Hugging Face and in a run, in both directions."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from gridformer.checkpoint.convert.exporting import export_run, write_tokenizer
from gridformer.checkpoint.convert.importing import import_folder
from gridformer.checkpoint.manifest import KEPT
from gridformer.config import RunConfig, parse_run
from gridformer.data import Tokenizer, special_ids
from gridformer.data.chat import read_chat, write_chat
from gridformer.data.samples.examples import Reading
from gridformer.data.tokenizer import SETTINGS
from gridformer.evaluate.beams import BeamSearch
from gridformer.evaluate.continuing import Prompt, Sampling
from gridformer.evaluate.examples import predicted
from gridformer.evaluate.generate import Generation, continued_ids, stream
from gridformer.evaluate.loading import load_model
from gridformer.evaluate.scoring import prefix_id
from tests.support.chats import chat_folder
from tests.support.reference.shared import transformers

CPU, END = torch.device("cpu"), "<|endoftext|>"
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
TEXTS = ("hello world", "the cat sat on the mat", "a", "world the hello mat cat")


def bytes_with(*special: str) -> Any:
    """Return a byte-level tokenizer whose first tokens are special ones."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=270,
        special_tokens=list(special),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS, trainer)
    return backend


def model_of(name: str, tokenizer: Any, **settings: Any) -> Any:
    """Return a small model of a class of transformers with large random weights."""
    config = getattr(transformers, name.partition("For")[0] + "Config")
    size = {**SIZES, "vocab_size": tokenizer.get_vocab_size()}
    model = getattr(transformers, name)(config(**size, **settings)).eval()
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=draw))
    return model


def save(folder: Path, model: Any, tokenizer: Any, **names: Any) -> Path:
    """Write a folder of Hugging Face, with the names of its special tokens."""
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    (folder / SETTINGS).write_text(json.dumps(settings), encoding="utf-8")
    return folder


def run_of(family: str, task: str) -> RunConfig:
    """Return the config of a small run."""
    model = {"family": family, "n_layers": 1, "hidden_size": 16, "n_heads": 2, "vocab_size": 400}
    if task == "classify":
        model |= {"token_head": False, "n_labels": 2}
    return parse_run({"model": model, "data": {"path": "x"}}, [f"data.task={task}"])


def test_an_import_ends_texts_where_transformers_does(tmp_path: Path) -> None:
    """tokenizer_config.json names the end of text, and generation_config.json further ends."""
    tokenizer = bytes_with(END, "<|im_start|>", "<|im_end|>", "<|other|>")
    model = model_of("Qwen2ForCausalLM", tokenizer, eos_token_id=2, num_key_value_heads=2)
    with torch.no_grad():
        model.lm_head.weight[1:4] *= 3  # so that both ends are likely
    model.generation_config.eos_token_id = [2, 3]
    save(tmp_path / "theirs", model, tokenizer, eos_token={"content": "<|im_end|>"})
    import_folder(tmp_path / "theirs", tmp_path / "run")
    trained = load_model(tmp_path / "run", CPU)
    assert trained.tokenizer.eos_token == "<|im_end|>"
    # as prepare --tokenizer reads it
    assert Tokenizer.load(tmp_path / "run").eos_token == "<|im_end|>"
    last, how = set(), Generation(Sampling(temperature=0.0), BeamSearch(max_tokens=12))
    for text in map(chr, range(ord("a"), ord("m"))):
        ids = trained.tokenizer.encode(text)
        given = torch.tensor([ids])
        out = model.generate(given, attention_mask=given >= 0, max_new_tokens=12, do_sample=False)
        want = out[0, len(ids) :].tolist()
        if want[-1] in (2, 3):
            last.add(want.pop())
            assert "".join(stream(trained, text, how)) == trained.tokenizer.decode(want)
        assert continued_ids(trained, [Prompt(ids, 12, 0)], how) == [want]
    assert last == {2, 3}


def test_an_end_of_text_that_only_the_settings_name(tmp_path: Path) -> None:
    tokenizer = bytes_with("<|begin|>", "<|end|>", "<|eot|>")
    model = model_of("LlamaForCausalLM", tokenizer, bos_token_id=0, eos_token_id=1)
    save(tmp_path / "theirs", model, tokenizer, bos_token="<|begin|>", eos_token="<|end|>")
    import_folder(tmp_path / "theirs", tmp_path / "run")
    read = load_model(tmp_path / "run", CPU).tokenizer
    # Their begin-of-text token is for prompts, so it does not begin documents of a corpus.
    assert (read.eos_id, read.bos_id) == (1, None)


def padded_logits(folder: Path) -> tuple[Any, torch.Tensor]:
    """Return the tokens of texts of several lengths in a batch, and what transformers computes."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer([*TEXTS], return_tensors="pt", padding=True, return_token_type_ids=False)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        return tokens["input_ids"], model(**tokens).logits


CLASSIFIERS = {
    "unknown": (("<unk>", "<s>", "</s>"), "</s>", "<unk>"),
    "added": (("<s>", "</s>", "<pad_x>", "<pad>"), "</s>", "<pad_x>"),
    "end of text": (("<pad>", "<s>", "</s>"), "</s>", "</s>"),
}


def classifier(folder: Path, names: Sequence[str], eos: str, pad: str) -> Path:
    """Write a classifier of transformers whose tokenizer has these special tokens."""
    tokenizer = bytes_with(*names)
    ids = {"eos_token_id": names.index(eos), "pad_token_id": names.index(pad)}
    model = model_of("LlamaForSequenceClassification", tokenizer, num_labels=3, **ids)
    return save(folder, model, tokenizer, eos_token=eos, pad_token=pad)


@pytest.mark.parametrize("case", CLASSIFIERS)
def test_a_classifier_pads_by_one_token(case: str, tmp_path: Path) -> None:
    """As the imported one, or if it is tuned here: by the end of text only without another padding.

    That is where such a classifier reads its class, so that it does not pad.
    """
    theirs = classifier(tmp_path / "theirs", *CLASSIFIERS[case])
    run = import_folder(theirs, tmp_path / "run").run
    export_run(tmp_path / "run", tmp_path / "back")
    (ids_there, there), (ids_here, here) = map(padded_logits, (theirs, tmp_path / "back"))
    assert torch.equal(ids_here, ids_there)
    assert torch.equal(here, there)
    (tmp_path / "out").mkdir()
    written = write_tokenizer(tmp_path / "out", tmp_path / "run", run)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert written["pad_token_id"] == loaded.pad_token_id
    assert loaded.pad_token == ("<pad>" if case == "end of text" else CLASSIFIERS[case][-1])


@pytest.mark.parametrize("kept", [False, True])
def test_an_exported_chat_model_stops_after_its_answer(kept: bool, tmp_path: Path) -> None:
    """The ends that an import lists remain, and so do its other settings of generation."""
    folder = chat_folder(tmp_path, 30)
    root, out = tmp_path / "run", tmp_path / "out"
    (root / KEPT).mkdir(parents=True)
    out.mkdir()
    (root / "tokenizer.json").write_bytes(folder.tokenizer_file.read_bytes())
    write_chat(root, read_chat(folder.path))
    if kept:
        (root / KEPT / "config.json").write_text('{"eos_token_id": 7}')
        values = {"eos_token_id": [7, 9], "max_new_tokens": 5}
        (root / KEPT / "generation_config.json").write_text(json.dumps(values))
    ids = write_tokenizer(out, root, run_of("llama", "chat"))
    read = transformers.GenerationConfig.from_pretrained(out)
    ends = [folder.eos_id, folder.tokenizer.id_of("<|im_end|>")]
    assert read.eos_token_id == ([7, 9, *ends] if kept else ends)
    assert read.max_new_tokens == (5 if kept else None)
    assert read.pad_token_id == ids.get("pad_token_id")
    assert (out / "chat_template.jinja").read_text() == read_chat(root).template


def exported(run: RunConfig, root: Path, tokenizer: Tokenizer) -> tuple[Any, dict[str, Any]]:
    """Write the tokenizer of a run, and return it in transformers and what config.json says."""
    (root / "out").mkdir(parents=True)
    tokenizer.save(root / "tokenizer.json")
    ids = write_tokenizer(root / "out", root, run)
    return transformers.AutoTokenizer.from_pretrained(root / "out"), ids


def of_gpt2(tokenizer: Any) -> Any:
    """Return a tokenizer with the post-processor of GPT-2, which adds no tokens."""
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


READ = [
    ("bert", "classify", (END,)),
    ("bert", "masked", ("[CLS]", "[SEP]", "[PAD]", "[MASK]")),
    ("t5", "classify", (END,)),
    ("gpt2", "classify", (END,)),
    ("llama", "classify", (END, "<pad>")),
]


@pytest.mark.parametrize(("family", "task", "names"), READ)
@pytest.mark.parametrize("change", [lambda tokenizer: tokenizer, of_gpt2], ids=["plain", "gpt2"])
def test_transformers_puts_special_tokens_where_the_model_has_read_them(
    family: str, task: str, names: tuple[str, ...], change: Any, tmp_path: Path
) -> None:
    own = Tokenizer(change(bytes_with(*names)), "ours")
    run, root = run_of(family, task), tmp_path / "run"
    loaded, _ = exported(run, root, own)
    special = special_ids(run, Tokenizer.load(root / "tokenizer.json"))
    reading = Reading(64, special, family == "t5")
    texts = own.encode_batch(TEXTS)
    for text, a in zip(TEXTS, texts):
        assert loaded(text).input_ids == reading.joined(a)[0]
        ids, n_first = reading.joined(a, texts[0])
        both = loaded(text, TEXTS[0], return_token_type_ids=True)
        assert both.input_ids == ids
        if family == "bert":
            assert both.token_type_ids == [int(i >= n_first) for i in range(len(ids))]
    # Texts that are read here get special tokens from the model, and not from the tokenizer too.
    assert Tokenizer.load(root / "out").encode_batch(TEXTS) == texts


# Special tokens, the one that begins documents (`prepare --bos`), and what is put around a text.
AROUND: dict[str, tuple[str, str, tuple[str, ...], str | None, list[int], list[int]]] = {
    "sources of a t5 end": ("t5", "pairs", (END,), None, [], [0]),
    "also those with spans": ("t5", "spans", (END,), None, [], [0]),
    "texts begin as documents did": ("llama", "causal", (END, "<start>"), "<start>", [1], []),
    "or not at all": ("llama", "causal", (END, "<start>"), None, [], []),
    "a name that is no type": ("llama", "causal", (END, "<a:b>"), "<a:b>", [], []),
    "a name like a text's": ("llama", "causal", (END, "$s"), "$s", [], []),
    "a tokenizer with its own way": ("bert", "classify", ("[CLS]", "[SEP]", "[X]"), None, [2], []),
}


@pytest.mark.parametrize("case", AROUND)
def test_what_is_put_around_a_text(case: str, tmp_path: Path) -> None:
    family, task, names, bos, before, after = AROUND[case]
    backend = bytes_with(*names)
    if "[X]" in names:
        backend.post_processor = processors.TemplateProcessing(
            single="[X] $A", pair="[X] $A $B", special_tokens=[("[X]", 2)]
        )
    own = Tokenizer(backend, "ours", None, bos)
    loaded, _ = exported(run_of(family, task), tmp_path / "run", own)
    assert loaded(TEXTS[0]).input_ids == [*before, *own.encode(TEXTS[0]), *after]


def test_an_imported_classifier_reads_the_begin_of_text(tmp_path: Path) -> None:
    """In evaluation, as it does in transformers, and when it is tuned further."""
    backend = bytes_with("<unk>", "<s>", "</s>")
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    model = model_of("LlamaForSequenceClassification", backend, num_labels=7, **ids)
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<unk>"}
    save(tmp_path / "theirs", model, backend, **names)
    import_folder(tmp_path / "theirs", tmp_path / "run")
    trained = load_model(tmp_path / "run", CPU)
    texts = [a + b for a in TEXTS for b in ("", *TEXTS, *"dgxyz")]
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    want, without = [], []
    with torch.no_grad():
        for text in texts:
            whole = theirs(text).input_ids
            want.append(int(model(torch.tensor([whole])).logits.argmax()))
            without.append(int(model(torch.tensor([whole[1:]])).logits.argmax()))
            assert Reading(64, trained.special).joined(trained.tokenizer.encode(text))[0] == whole
    assert predicted(trained, texts, 4) == want != without


@pytest.mark.parametrize("kept", [False, True])
def test_the_begin_of_documents_comes_back(kept: bool, tmp_path: Path) -> None:
    """An import of the export begins texts as the run did, and so does transformers."""
    root, backend = tmp_path / "run", bytes_with(END, "<start>")
    if kept:  # of an import with which the run began
        (root / KEPT).mkdir(parents=True)
        backend.save(str(root / KEPT / "tokenizer.json"))
        (root / KEPT / "config.json").write_text('{"bos_token_id": 0}')
        settings = json.dumps({"bos_token": END, "model_max_length": 64})
        (root / KEPT / SETTINGS).write_text(settings)
    run = run_of("llama", "causal")
    loaded, ids = exported(run, root, Tokenizer(backend, "ours", None, "<start>"))
    assert ids["bos_token_id"] == loaded.bos_token_id == 1
    assert loaded.model_max_length == (64 if kept else run.model.max_seq_len)
    back = Tokenizer.load(root / "out")
    assert (back.begin_ids, prefix_id(back), back.eos_id) == ([1], 1, 0)
