"""Pages work as typed: each block of README and of the other pages, in its order.

Every page is read in a copy of a folder that has what README's commands leave, and the files that
pages expect of their readers. What takes long is changed: training takes few steps, plans trace few
layouts, and the text is small. A command of a new kind fails until it is added here, or to those of
tests/support/fenced.py that no test runs. `make test` reads some pages, and `make test-all` all.

docs/how-to/fine-tuning.md has a test of its own, with folders that transformers wrote and files in
the formats of the data sets.
"""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from sysconfig import get_path
from typing import Any

import pytest
import torch

from examples import own_model
from gridformer.data.prepare import gettext
from gridformer.data.prepare.corpus import prepare_corpus
from gridformer.data.prepare.sources import open_sources
from gridformer.memory import budget
from gridformer.train.metrics import read_metrics
from tests.support.commands import gridformer_here
from tests.support.data import sentences
from tests.support.fenced import PAGES, ROOT, fences, run_files, why_not_run, words_of
from tests.support.marks import extra, full_unless
from tests.support.reference.folders import save
from tests.support.reference.shared import transformers
from tests.support.tasks import WRITE, words_tokenizer

README = ROOT / "README.md"
PAGE = ROOT / "docs/how-to/fine-tuning.md"


def run_on(page: Path) -> list[str]:
    """Return the commands of a page that are run."""
    typed = (command for fence in fences(page) for command in fence.typed)
    return [command for command in typed if not why_not_run(page, command)]


READ = [page for page in PAGES if page != PAGE and run_on(page)]
# Pages that `make test` reads. Training of others, or their searches for layouts, take longer.
QUICK = {"README", "clusters", "coming-from", "evaluate", "planning", "seeing", "weights"}
# Pages whose Python runs, too.
PYTHON = {"from-scratch", "pretrained", "chat"}
# Runs that are there when a page is read, by their data, and their steps.
RUNS = {"data/mine": "runs/mine", "data/python-stdlib": "runs/demo"}
STEPS = 3
REFUSALS = [
    README,
    *(ROOT / f"docs/{name}.md" for name in ("how-to/run-files", "reference/memory")),
]
CONSOLES = [f.text for page in REFUSALS for f in fences(page) if f.language == "console"]
TRANSCRIPTS = list(dict.fromkeys(CONSOLES))


def trains(words: list[str]) -> bool:
    return words[:2] == ["gridformer", "train"] and "--explain" not in words


def shortened(words: list[str], steps: int) -> list[str]:
    """Return the words of a command that takes less time; training ends after so many steps."""
    words = ["docs/" if word == "python-stdlib" else word for word in words]
    if words[1] == "prepare":
        words.append("--overwrite")
    if trains(words):
        # It saves twice or more, so that a mean has parts.
        words += ["train.save_every=1", f"train.steps={steps}", "train.eval_batches=1"]
    if words[1] == "plan":
        words += ["--seconds", "5"]
    if words[1] == "calibrate":
        words += ["--quick", "--processes", "1,2"]
    return words


def run(words: list[str]) -> str:
    """Run a command and return what it prints."""
    assert words[0] == "gridformer", "a new kind of command: say in this file how it is tested"
    # A process takes seconds to import torch, so one command that does not need torch represents
    # all; tests/cli/test_train.py starts others as a user does. Where gridformer is only on
    # PYTHONPATH, no shell finds it.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    if words[1:3] == ["prepare", "docs/"] and shutil.which("gridformer", path=path):
        env = {**os.environ, "PATH": path}
        done = subprocess.run(words, capture_output=True, text=True, env=env, check=False)
    else:
        done = gridformer_here(*words[1:])
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def messages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A catalog of translated messages, which not every machine has."""
    polib = extra("polib")
    catalog = polib.POFile()
    for number in range(100):
        english = f"Cannot open the file number {number}"
        german = f"Die Datei Nummer {number} kann nicht geöffnet werden"
        catalog.append(polib.POEntry(msgid=english, msgstr=german))
    folder = tmp_path_factory.mktemp("locale")
    catalog.save_as_mofile(str(folder / "programs.mo"))
    return folder


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory, messages: Path) -> Iterator[Path]:
    """A folder with what README's commands leave, and with files of a reader's own."""
    here = tmp_path_factory.mktemp("checkout")
    shutil.copy(README, here)
    for folder in ("docs", "examples"):
        shutil.copytree(ROOT / folder, here / folder)
    shutil.copytree(ROOT / "src/gridformer/utils", here / "src")
    write_own_files(here)
    sources = sorted(Path(get_path("stdlib")).glob("[a-d]*.py"))
    with contextlib.chdir(here), pytest.MonkeyPatch.context() as patch:
        patch.setattr(gettext, "system_folders", lambda language: [messages])
        patch.setattr(budget, "SEARCH_S", 1e9)  # answers must not depend on the machine's load
        corpus = open_sources([str(path) for path in sources])
        prepare_corpus(corpus, Path("data/python-stdlib"), vocab_size=512)
        shutil.copytree("data/python-stdlib", "data/mine")
        one_process = "layout.scheme=single layout.rows=1 layout.cols=1"
        for name in ("demo", "mine.yaml"):
            run([*shortened(["gridformer", "train", name], STEPS), *one_process.split()])
        for name in ("wide", "deep"):
            shutil.copytree("runs/mine", f"runs/{name}")
        run(["gridformer", "export", "runs/mine", "--out", "FOLDER"])
        yield here


def write_own_files(here: Path) -> None:
    """Write the files that pages call as a reader would call his own."""
    (here / "mine.yaml").write_text(typed_run_file())
    shutil.copy(ROOT / "configs/clusters/dgx-h100.yaml", here / "local.yaml")
    texts = sentences(100)
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day"}]
    records = [
        {"messages": turns, "body": text, "stars": i % 5 + 1, "en": text, "de": text}
        for i, text in enumerate(texts)
    ]
    for name in ("talks", "corpus", "reviews", "pairs"):
        (here / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    for name in ("prompts.txt", "train.en", "train.de"):
        (here / name).write_text("".join(texts[:20]))
    for label in ("spam", "other"):
        (here / "mail" / label).mkdir(parents=True)
        for number, text in enumerate(texts[:10]):
            (here / "mail" / label / f"{number}.txt").write_text(text)
    (here / "shards").mkdir()
    extra("datasets").Dataset.from_dict({"text": texts}).to_parquet(here / "shards/0.parquet")


def typed_run_file() -> str:
    """Return the first run file in README, which it tells readers to save as mine.yaml."""
    name, fence = next(run_files(README))
    assert name == "mine.yaml"
    return fence.text


@pytest.mark.parametrize(
    "page",
    full_unless(lambda page: page.stem in QUICK, READ),
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_blocks_work_in_this_order(page: Path, checkout: Path, tmp_path: Path) -> None:
    here = tmp_path / "here"
    shutil.copytree(checkout, here)
    named = {fence.line: name for name, fence in run_files(page)}
    names: dict[str, Any] = {}
    trained = 0
    with contextlib.chdir(here):
        for fence in fences(page):
            if fence.line in named:
                Path(named[fence.line]).write_text(fence.text)
            elif fence.language == "python" and page.stem in PYTHON:
                exec(fence.text, names)
            for command in fence.typed:
                if why_not_run(page, command):
                    continue
                words = words_of(command)
                if words[1] == "prepare" and (old := RUNS.get(words[-1])):
                    shutil.rmtree(old, ignore_errors=True)  # a run on other data
                trained += trains(words)
                run(shortened(words, STEPS + trained))  # so that training goes on


@pytest.mark.parametrize("transcript", TRANSCRIPTS, ids=lambda text: text.splitlines()[0])
def test_commands_print_what_pages_say(transcript: str, checkout: Path) -> None:
    """Refusals are whole. Numbers of predictions may differ by 5%, and `...` stands for lines."""
    command, *printed = transcript.replace("\\\n", " ").removeprefix("$ ").splitlines()
    with contextlib.chdir(checkout):
        done = gridformer_here(*words_of(command)[1:])
    if printed[0].startswith("error:"):
        assert done.returncode == 2
        assert " ".join(printed).split() == done.stderr[done.stderr.index("error:") :].split()
        return
    assert done.returncode == 0, done.stderr
    lines = iter(done.stdout.splitlines())
    for line in filter("...".__ne__, printed):
        words, numbers = words_and_numbers(line)
        same = next((n for w, n in map(words_and_numbers, lines) if w == words), None)
        assert same == pytest.approx(numbers, rel=0.05), line


def words_and_numbers(line: str) -> tuple[list[str], list[float]]:
    numbers = [float(n.replace(",", "")) for n in re.findall(r"\d[\d,]*(?:\.\d+)?", line)]
    return re.sub(r"\d[\d,]*(?:\.\d+)?", "N", line).split(), numbers


def test_every_block_of_readme_is_one_that_is_tested() -> None:
    """Every block names its language; blocks in another language need their own test."""
    assert {fence.language for fence in fences(README)} == {"bash", "console", "yaml", "python"}
    assert all(command.startswith("$ gridformer ") for command in TRANSCRIPTS)


def test_the_library_example_runs(checkout: Path) -> None:
    example = next(f.text for f in fences(README) if f.language == "python")
    names: dict[str, Any] = {}
    torch.manual_seed(0)
    exec(example, names)
    torch.manual_seed(0)
    alone, words = own_model.network()[0], names["words"]
    want = own_model.loss_of(alone(words[:, :-1]), {"targets": words[:, 1:]})
    assert float(names["loss"]) == pytest.approx(want.item(), rel=1e-5)


@pytest.mark.full
def test_files_of_an_imported_model_come_back_after_training(tmp_path: Path) -> None:
    """The chat template and the ids of tokens, if the data have the model's tokenizer."""
    with contextlib.chdir(tmp_path):
        Path("text.txt").write_text("Some words, and some more words.\n" * 200)
        run(shortened(words_of("gridformer prepare text.txt --vocab-size 300 --out data"), 2))
        vocabulary = json.loads(Path("data/index.json").read_text())["vocab_size"]
        sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16}
        config = transformers.GPT2Config(vocab_size=vocabulary, bos_token_id=3, **sizes)
        transformers.GPT2LMHeadModel(config).save_pretrained("theirs")
        shutil.copy("data/tokenizer.json", "theirs")
        Path("theirs/chat_template.jinja").write_text("{{ messages }}")
        run(shortened(words_of("gridformer import theirs --out imported"), 2))
        model = "model.n_layers=1 model.hidden_size=8 model.n_heads=2 model.max_seq_len=16"
        Path("run.yaml").write_text("data: {path: data}\ntrain: {init_from: imported}\n")
        run(shortened(words_of(f"gridformer train run.yaml {model} --out trained"), 2))
        run(shortened(words_of("gridformer export trained --out back"), 2))
        assert Path("back/chat_template.jinja").read_text() == "{{ messages }}"
        assert json.loads(Path("back/config.json").read_text())["bos_token_id"] == 3


COMMANDS = [line for fence in fences(PAGE) if not fence.language for line in fence.lines]
SIZES = "model.n_layers=1 model.hidden_size=48 model.n_heads=4 model.max_seq_len=512"
SMALLER = "train.epochs=1 train.global_batch=8 train.eval_every=100 layout.dp=1 train.device=cpu"


def write_models(folder: Path) -> None:
    """Write the two folders of Hugging Face that the page names, with tiny models."""
    tokenizer = words_tokenizer()
    n = tokenizer.vocab_size + 4  # BERT's special tokens
    sizes: dict[str, Any] = {"vocab_size": n, "hidden_size": 48, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 4, "max_position_embeddings": 512}
    bert = transformers.BertForPreTraining(
        transformers.BertConfig(**sizes, intermediate_size=192, layer_norm_eps=1e-12)
    )
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            **sizes,
            num_key_value_heads=2,
            intermediate_size=80,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
        )
    )
    for name, model in (("bert-base-uncased", bert), ("SmolLM2-135M", llama)):
        tokenizer.save(save(model, folder / name) / "tokenizer.json")


@pytest.mark.full
@pytest.mark.timeout(600)
def test_every_command_of_the_page_on_fine_tuning_runs(tmp_path: Path) -> None:
    write_models(tmp_path)
    for name, write in WRITE.items():
        write(tmp_path / name.upper())
    vocabulary = json.loads((tmp_path / "SmolLM2-135M" / "config.json").read_text())["vocab_size"]
    ran = set()
    with contextlib.chdir(tmp_path):
        for command in COMMANDS:
            words = words_of(command)
            if words[1] == "train":
                words += [*SIZES.split(), *SMALLER.split(), f"model.vocab_size={vocabulary}"]
                words += ["model.n_kv_heads=2", "model.ffn_size=80", "model.rope_theta=10000.0"] * (
                    "model=smollm2-135m" in words
                )
            printed = run(words)
            if words[1] == "prepare" and "squad" in words:
                assert f"next: gridformer train {Path(words[-1]).name} " in printed
            ran.add(words[1])
        for folder in (tmp_path / "runs").iterdir():
            last = read_metrics(folder)[-1:]
            if last:  # an imported model has not been trained
                assert any(key.startswith("val_") for key in last[0]), folder
        classes = {
            json.loads(path.read_text())["architectures"][0]
            for path in (tmp_path / "exported").rglob("config.json")
        }
    assert ran == {"import", "prepare", "train", "evaluate", "export"}
    assert classes == {"BertForSequenceClassification", "LlamaForSequenceClassification"}
