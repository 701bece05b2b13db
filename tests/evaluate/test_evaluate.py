"""`gridformer evaluate`: numbers by their plain definitions, and requests that are refused."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from typer.testing import CliRunner

from gridformer.checkpoint.convert.exporting import export_run
from gridformer.cli.app import app
from gridformer.config import Family, ModelConfig, RunConfig, parse_run
from gridformer.config.data import Task
from gridformer.data import Tokenizer
from gridformer.evaluate.beams import BeamSearch, translate
from gridformer.evaluate.generate import Generation, answer, answers, check_options
from gridformer.evaluate.loading import Job, Trained, load_model, plan_job
from gridformer.evaluate.measures import restored
from gridformer.evaluate.prompts import read_prompts, read_texts
from gridformer.evaluate.tasks import Options, as_dict, check_tasks, measure, parse_tasks, show
from gridformer.utils.errors import ConfigError, DataError, UserError
from tests.support.checkpoints import built, save_model
from tests.support.commands import gridformer_alone
from tests.support.marks import extra

LENGTH = 24
CPU = torch.device("cpu")
MODEL: dict[str, Any] = {
    "n_layers": 1, "hidden_size": 16, "n_heads": 2, "max_seq_len": LENGTH, "vocab_size": 301,
    "init_std": 0.3,
}  # fmt: skip


@pytest.fixture(scope="module")
def run_dir(token_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of an untrained GPT-2 in float64."""
    out = tmp_path_factory.mktemp("run")
    train = {"dtype": "float64"}
    run = parse_run({"model": MODEL, "data": {"path": str(token_folder)}, "train": train})
    save_model(out, run, 0, seed=3)
    shutil.copy(token_folder / "tokenizer.json", out)
    return out


def untrained(run: RunConfig, token_folder: Path) -> Trained:
    return Trained(run, built(run, 3).eval(), Tokenizer.load(token_folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("".join(f"line {i} of a file: {7 * i} and öther words\n" for i in range(12)))
    return file


def log_likelihood(run_dir: Path, ids: list[int], stride: int, length: int = LENGTH) -> float:
    """Return the sum over windows of torch's cross entropy, one window at a time."""
    loaded = load_model(run_dir, CPU)
    whole, total, done = [loaded.tokenizer.eos_id, *ids], 0.0, 0
    while done < len(ids):
        new = min(stride if done else length, len(ids) - done)
        done += new
        window = torch.tensor(whole[max(0, done - length) : done + 1])
        with torch.no_grad():
            logits = loaded.model(window[None, :-1])[0]
        total -= float(F.cross_entropy(logits[-new:], window[-new:], reduction="sum"))
    return total


@pytest.mark.parametrize(("stride", "length"), [(0, 0), (7, 0), (5, 9)])
def test_perplexity_of_a_text(run_dir: Path, text_file: Path, stride: int, length: int) -> None:
    loaded, text = load_model(run_dir, CPU), text_file.read_text()
    ids = loaded.tokenizer.encode(text)
    assert len(ids) % LENGTH, "the last window is shorter"
    options = Options(5, stride, length=length)
    (found,) = measure(loaded, parse_tasks(f"text:{text_file}"), options).values()
    total = log_likelihood(run_dir, ids, stride or LENGTH, length or LENGTH)
    assert found["tokens"] == len(ids)
    assert found["token_perplexity"] == pytest.approx(math.exp(-total / len(ids)), rel=1e-12)
    assert found["word_perplexity"] == pytest.approx(math.exp(-total / len(text.split())))
    n_bytes = len(text.encode())
    assert n_bytes > len(text)
    assert found["byte_perplexity"] == pytest.approx(math.exp(-total / n_bytes))
    assert found["bits_per_byte"] == pytest.approx(-total / n_bytes / math.log(2))


def test_a_text_without_spaces_and_numbers_that_are_not_finite(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The perplexity of a word of hundreds of characters is beyond any number."""
    file = tmp_path / "text.txt"
    file.write_text("\u4e16\u754c" * 200, encoding="utf-8")
    loaded = load_model(run_dir, CPU)
    (found,) = measure(loaded, parse_tasks(f"text:{file}"), Options()).values()
    assert found["words"] == 1
    assert found["token_perplexity"] < found["word_perplexity"] == math.inf
    numbers = {"a": math.nan, "b": math.inf, "c": 1.0, "d": 1.5e200, "e": 12_345}
    job = Job(run_dir, loaded.run, "cpu")
    shown = as_dict(job, {"text:x": numbers}, 1.0)
    as_read = {"a": None, "b": None, "c": 1.0, "d": 1.5e200, "e": 12_345}
    assert shown["tasks"] == {"text:x": as_read}
    assert json.loads(json.dumps(shown, allow_nan=False))["tasks"] == shown["tasks"]
    show(job, {"text:x": numbers}, 1.0)
    lines = [line.split()[-2:] for line in capsys.readouterr().out.splitlines()[1:-1]]
    assert lines[1:] == [["b", "inf"], ["c", "1.0000"], ["d", "1.5000e+200"], ["e", "12,345"]]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_only_ends_of_lines_end_a_line(tmp_path: Path, end: str) -> None:
    """Unicode has other ones, which JSON may contain, and a mark of the order of bytes."""
    texts = ["one\u2028two", "three\x85four", "five"]
    lines = [json.dumps({"prompt": text}, ensure_ascii=False) for text in texts]
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(("\ufeff" + end.join(lines) + end).encode())
    assert read_prompts(file) == texts
    plain = tmp_path / "prompts.txt"
    plain.write_bytes(("\ufeff" + end.join(texts)).encode())
    assert read_prompts(plain) == texts


def test_a_number_in_place_of_a_text_is_named(tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    file.write_text('{"text": "fine"}\n{"text": 5}\n')
    with pytest.raises(DataError, match="record 2: text must be a text and is int"):
        read_texts(file, "text")


def test_last_words(run_dir: Path, tmp_path: Path) -> None:
    """A long text loses its first tokens; one of a single word is predicted from nothing."""
    texts = ["line 1 of file 2", "word", "a " * 40 + "line", "line 3 of a file"]
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    loaded = load_model(run_dir, CPU)
    (found,) = measure(loaded, parse_tasks(f"lambada:{file}"), Options(3)).values()
    total, right, encode = 0.0, 0, loaded.tokenizer.encode
    for text in texts:
        before, word = text.split(" ")[:-1], text.split(" ")[-1]
        context = encode(" ".join(before)) or [loaded.tokenizer.eos_id]
        wanted = encode(" ".join(before) + " " + word)[len(encode(" ".join(before))) :]
        window = torch.tensor([*context, *wanted][-(LENGTH + 1) :])
        with torch.no_grad():
            logits = loaded.model(window[None, :-1])[0, -len(wanted) :]
        total += float(F.cross_entropy(logits, window[-len(wanted) :], reduction="sum"))
        right += bool((logits.argmax(-1) == window[-len(wanted) :]).all())
    assert found["perplexity"] == pytest.approx(math.exp(total / len(texts)), rel=1e-12)
    assert found["accuracy"] == right / len(texts)


def test_wikitext_is_restored_and_divided_by_original_words(run_dir: Path, tmp_path: Path) -> None:
    first = ' = A page = \n \n The " well @-@ known " 1 @,@ 000 @.@ 5 ( of it ) ; it \'s here . \n'
    want = ' = A page =\n\nThe "well-known" 1,000.5 (of it); it\'s here.\n'
    assert restored(first) == want
    second = " = Another = \n \n = = Section = = \n \n More words , indeed . \n"
    assert "== Section ==" in restored(second)
    file = tmp_path / "wiki.test.tokens"
    file.write_text(first + second)
    records = tmp_path / "pages.jsonl"
    records.write_text("".join(json.dumps({"page": page}) + "\n" for page in (first, second)))
    loaded = load_model(run_dir, CPU)
    asked = parse_tasks(f"wikitext:{file},wikitext:{records}")
    found, again = measure(loaded, asked, Options()).values()
    assert found == again
    total = sum(
        log_likelihood(run_dir, loaded.tokenizer.encode(restored(page)), LENGTH)
        for page in (first, second)
    )
    words = sum(
        len([*page.split(), "", ""]) for page in (first, second)
    )  # as a split at \s+ counts
    assert (found["words"], found["documents"]) == (words, 2)
    assert found["word_perplexity"] == pytest.approx(math.exp(-total / words))
    limited = measure(loaded, asked[:1], Options(limit=1))
    assert limited[str(asked[0])]["documents"] == 1


def test_pages_without_text(run_dir: Path, tmp_path: Path) -> None:
    """A file of such pages is refused; some of them between others count as documents."""
    file = tmp_path / "pages.jsonl"
    file.write_text('{"page": ""}\n{"page": " \\n"}\n')
    loaded, asked = load_model(run_dir, CPU), parse_tasks(f"wikitext:{file}")
    for use in (check_tasks, lambda *_: measure(loaded, asked, Options())):
        with pytest.raises(DataError, match=r"pages\.jsonl: has no text"):
            use(loaded.run, asked, Options())
    with file.open("a") as lines:
        lines.write('{"page": "some words"}\n')
    check_tasks(loaded.run, asked, Options())
    assert measure(loaded, asked, Options())[str(asked[0])]["documents"] == 3
    with pytest.raises(DataError, match="its first 2 pages have no text: use a larger --limit"):
        measure(loaded, asked, Options(limit=2))


# --------------------------------------------------------------------------- the command


def command(*words: str) -> tuple[str, str]:
    """Run a command of gridformer; return what it prints, and the text of its error."""
    found = CliRunner().invoke(app, [*words])
    if found.exception is not None and not isinstance(found.exception, UserError):
        raise found.exception
    return found.stdout, str(found.exception or "")


def test_the_command_prints_json(run_dir: Path, text_file: Path) -> None:
    out, error = command("evaluate", str(run_dir), "--tasks", f"text:{text_file}", "--json")
    assert not error
    found = json.loads(out)
    (want,) = measure(
        load_model(run_dir, CPU), parse_tasks(f"text:{text_file}"), Options()
    ).values()
    assert found["tasks"] == {f"text:{text_file}": want}
    assert found["layout"] == {}
    shown, _ = command("evaluate", str(run_dir), "--tasks", f"text:{text_file}")
    assert "token_perplexity" in shown
    assert "single device" in shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tasks", "", "--stride", "8"], "has no effect on set:val: leave it out"),
        (["--tasks", "txt:FILE"], "unknown task 'txt': did you mean 'text'?"),
        (["--tasks", "text"], "--tasks text: write text:FILE"),
        (["--tasks", "text:no-such-file"], "no-such-file: cannot be read"),
        (["--tasks", "text:FILE", "--stride", "25"], "use --stride 24 or less"),
        (["--tasks", "text:FILE", "--length", "25"], "the model reads 24 tokens at once"),
        (["--tasks", "lambada:FILE"], "FILE:1: is not JSON"),
        (["train.steps=3", "--tasks", "text:FILE"], "a trained model keeps its settings"),
        (
            ["layout.scheme=optimus", "layout.rows=2", "layout.rows_over=sequence", "--set", "val"],
            "divides texts over rows; use layout.rows_over=batch",
        ),
        (["layout.colls=3", "--tasks", "text:FILE"], "did you mean 'cols'?"),
        (["--device", "tpu", "--tasks", "text:FILE"], "--device tpu is no device"),
        (["--set", "val", "--length", "8"], "--length 8 is for text:FILE, wikitext:FILE, "),
        (["--set", "val", "--stride", "8"], "has no effect on set:val: leave it out"),
        (["--set", "val", "--limit", "8"], "has no effect on set:val: leave it out"),
        (["--tasks", "text:FILE", "--limit", "8"], "--limit 8 is for wikitext:"),
        (
            ["--beams", "2", "--tasks", "text:FILE"],
            "--beams is for t5 and transformer, which use beam search; this model is a gpt2: leave",
        ),
        (["--beams", "0", "--tasks", "text:FILE"], "--beams 0 must be at least 1"),
    ],
)
def test_wrong_requests_are_refused_before_a_process_starts(
    run_dir: Path, text_file: Path, words: list[str], said: str
) -> None:
    words = [word.replace("FILE", str(text_file)) for word in words]
    _, error = command("evaluate", str(run_dir), *words)
    assert said.replace("FILE", str(text_file) if "FILE:1" in said else "FILE") in error


def test_a_layout_that_does_not_fit_is_refused_with_layouts_that_do(run_dir: Path) -> None:
    """What a trained model is made of cannot be offered to change."""
    _, error = command("generate", str(run_dir), "layout.scheme=megatron", "layout.cols=3")
    said = "model.n_heads=2 does not divide over layout.cols=3: use layout.cols=1 or 2"
    assert error.splitlines()[0] == said
    assert "or model." not in error


def test_a_missing_run_directory_is_named_and_may_be_one_beside_it(run_dir: Path) -> None:
    typed = run_dir.with_name(f"{run_dir.name}s")
    _, error = command("evaluate", str(typed), "--tasks", "text:x")
    assert f"{typed} has no checkpoint (did you mean '{run_dir}'?): train first" in error


def test_prompts_of_a_file_are_continued(run_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("line 1\n\nline 22 of\n")
    out, error = command("generate", str(run_dir), "--prompts", str(file), "--max-tokens", "4")
    assert not error
    found = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert [one["prompt"] for one in found] == ["line 1", "line 22 of"]
    records = tmp_path / "prompts.jsonl"
    records.write_text('{"prompt": "line 1"}\n"line 22 of"\n')
    again, _ = command("generate", str(run_dir), "--prompts", str(records), "--max-tokens", "4")
    assert [json.loads(line) for line in again.splitlines() if line.startswith("{")] == found
    # Prompt i is continued as alone with the seed + i.
    alone, _ = command(
        "generate", str(run_dir), "-p", "line 22 of", "--seed", "1", "--max-tokens", "4"
    )
    assert alone.startswith(found[1]["prompt"] + found[1]["text"])
    records.write_text('{"text": "line 1"}\n')
    assert (
        "record 1 must be a text" in command("generate", str(run_dir), "--prompts", str(records))[1]
    )


def test_a_folder_of_hugging_face_is_evaluated_as_the_run(
    run_dir: Path, text_file: Path, tmp_path: Path
) -> None:
    export_run(run_dir, tmp_path / "exported", "float32")
    words = ["--tasks", f"text:{text_file}", "--json"]
    found, want = (
        json.loads(command("evaluate", str(folder), *words)[0])
        for folder in (tmp_path / "exported", run_dir)
    )
    assert found["model"] == str(tmp_path / "exported")
    for task, numbers in want["tasks"].items():
        assert found["tasks"][task] == pytest.approx(numbers, rel=1e-5)
    (tmp_path / "exported" / "tokenizer.json").unlink()
    _, error = command("evaluate", str(tmp_path / "exported"), *words)
    said = f"{tmp_path / 'exported'} has no tokenizer.json, which generation and evaluation need"
    assert error.startswith(said)


# --------------------------------------------------------------------------- classifiers


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_accuracy_of_a_classifier(family: Family, token_folder: Path, tmp_path: Path) -> None:
    """Labels are those of the model's own logits, one text at a time, with some of them wrong."""
    sections = {"data": {"path": str(token_folder), "seq_len": 16}, "train": {"dtype": "float64"}}
    model = {**MODEL, "family": family, "n_labels": 5, "vocab_size": 305, "init_std": 1.0}
    run = parse_run({"model": model, **sections})
    loaded = untrained(run, token_folder)
    texts = [f"file {'and ' * i}line {i}" for i in range(9)]
    special, labels = loaded.special, []
    for text in texts:
        ids = loaded.tokenizer.encode(text)
        if family == "bert":
            ids = [special.cls or 0, *ids[:14], special.sep or 0]
        else:
            ids = [*ids, special.eos][:16]
        at = torch.tensor([0 if family == "bert" else len(ids) - 1])
        with torch.no_grad():
            logits = loaded.model.logits({"tokens": torch.tensor([ids]), "at": at})["labels"]
        labels.append(int(logits.argmax()))
    assert len(set(labels)) > 1
    file = tmp_path / "labels.jsonl"
    given = [(label + (i % 3 == 0)) % 5 for i, label in enumerate(labels)]
    lines = [json.dumps({"text": t, "label": label}) + "\n" for t, label in zip(texts, given)]
    file.write_text("".join(lines))
    asked = parse_tasks(f"labels:{file}")
    check_tasks(run, asked, Options())
    (found,) = measure(loaded, asked, Options(4)).values()
    assert found == {"accuracy": 6 / 9, "documents": 9}
    file.write_text(json.dumps({"text": "a", "label": 5}))
    with pytest.raises(DataError, match="has the label 5: write a number from 0 to 4"):
        check_tasks(run, asked, Options())
    with pytest.raises(ConfigError, match="labels needs a model with a classifier"):
        check_tasks(parse_run({"model": MODEL, **sections}), asked, Options())


def translator(family: Family, task: Task, vocab_size: int, token_folder: Path) -> Trained:
    model = {**MODEL, "family": family, "vocab_size": vocab_size}
    del model["init_std"]
    data = {"path": str(token_folder), "task": task}
    run = parse_run({"model": model, "data": data, "train": {"dtype": "float64"}})
    return untrained(run, token_folder)


def test_bleu_is_that_of_the_texts_that_a_model_generates(
    token_folder: Path, tmp_path: Path
) -> None:
    sacrebleu = extra("sacrebleu")
    loaded = translator("transformer", "pairs", 302, token_folder)
    sources, targets = ["line 1", "a file"], ["line 2 of a file", "file"]
    file = tmp_path / "pairs.jsonl"
    pairs = [{"source": s, "target": t} for s, t in zip(sources, targets)]
    file.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    (found,) = measure(loaded, parse_tasks(f"bleu:{file}"), Options()).values()
    how = BeamSearch(max_tokens=256)
    said = [translate(loaded, [source], how)[0] for source in sources]
    assert found["bleu"] == sacrebleu.corpus_bleu(said, [targets]).score


@pytest.mark.parametrize("task", ["pairs", "spans"])
def test_prompts_of_a_file_have_the_texts_that_each_has_alone(
    token_folder: Path, task: Task
) -> None:
    loaded = translator("t5", task, 302 + 32 * (task == "spans"), token_folder)
    for parameter in loaded.model.parameters():
        parameter.data.mul_(6)  # so that texts depend on prompts
    blank = "___" * (task == "spans")
    prompts = [f"line 1{blank}", f"a file and 2{blank} lines", f"of{blank}"]
    how = Generation(search=BeamSearch(2, max_tokens=6), batch_size=2)
    alone = ["".join(answer(loaded, prompt, how)) for prompt in prompts]
    assert len({*alone}) == 3, "the test must tell prompts apart"
    assert [*answers(loaded, prompts, how)] == alone


def test_a_model_is_evaluated_in_another_type(run_dir: Path) -> None:
    """It was trained in float64, and its weights are read as they are."""
    job = plan_job(run_dir, dtype="bfloat16")
    assert job.run.train.dtype == "bfloat16"
    wide, narrow = load_model(run_dir, CPU), load_model(run_dir, CPU, dtype="bfloat16")
    tokens = torch.arange(6)[None]
    with torch.no_grad():
        want, found = wide.model(tokens), narrow.model(tokens)
    assert (want.dtype, found.dtype) == (torch.float64, torch.bfloat16)
    assert {p.dtype for p in narrow.model.parameters()} == {torch.float32}
    assert 0 < float((found - want).abs().max()) < 0.05 * float(want.abs().max())


# --------------------------------------------------------------------------- several processes


@pytest.mark.full
def test_the_commands_start_processes(run_dir: Path, text_file: Path, tmp_path: Path) -> None:
    layout = ["layout.scheme=optimus", "layout.rows=2", "layout.pp=2"]
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("line 1\nline 22 of\nfile\n")
    generate = ["generate", str(run_dir), "--prompts", str(prompts), "--max-tokens", "9"]
    evaluate = ["evaluate", str(run_dir), "--tasks", f"text:{text_file}", "--json"]
    alone = gridformer_alone(*generate, check=True)
    several = gridformer_alone(*generate, *layout, check=True)
    assert several.stdout == alone.stdout
    assert several.stdout.count("\n") == 3
    assert "tokens/s" in several.stderr
    assert "layout: optimus 2x1, stationary weights, pp=2" in several.stderr
    want = json.loads(gridformer_alone(*evaluate, check=True).stdout)
    found = json.loads(gridformer_alone(*evaluate, *layout, check=True).stdout)
    for task, numbers in want["tasks"].items():
        assert found["tasks"][task] == pytest.approx(numbers, rel=1e-9)
    assert found["layout"] == {"scheme": "optimus", "rows": 2, "pp": 2}


# --------------------------------------------------------------------------- options

SAMPLING, SEARCH = {"temperature", "top_k", "top_p", "seed"}, {"beams", "length_penalty"}
USED: dict[Family, set[str]] = {
    "gpt2": SAMPLING,
    "bert": set(),
    "t5": SEARCH,
    "transformer": SEARCH,
}


@pytest.mark.parametrize("family", USED)
def test_generate_refuses_exactly_the_options_that_a_model_does_not_use(family: Family) -> None:
    model = ModelConfig(family=family, n_layers=1, hidden_size=8, n_heads=2)
    check_options(model, sorted(USED[family]))
    for name in (SAMPLING | SEARCH) - USED[family]:
        with pytest.raises(ConfigError, match=f"this model is a {family}: .*leave it out") as e:
            check_options(model, [name])
        assert e.value.problems[0].startswith(f"--{name.replace('_', '-')} is for ")
