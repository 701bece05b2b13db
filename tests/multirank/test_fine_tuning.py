"""Fine-tuning from Hugging Face's weights to scores and back, on any layout; BLEU of a run."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gridformer.checkpoint.convert.exporting import export_run
from gridformer.checkpoint.convert.importing import import_folder
from gridformer.config import RunConfig
from gridformer.data import TokenFolder, Tokenizer
from gridformer.data.samples.batches import SequentialBatches, open_samples
from gridformer.data.side_texts import read_label_names
from gridformer.evaluate.beams import BeamSearch, translate
from gridformer.evaluate.bleu import SAMPLES_FILE, Bleu
from gridformer.evaluate.examples import measure_set, score_examples
from gridformer.evaluate.loading import load_model
from gridformer.launch.plan import check_run, plan_run
from gridformer.mesh.process_group import World
from gridformer.train.metrics import read_metrics
from gridformer.train.plan import Plan
from gridformer.train.trainer import Trainer
from gridformer.utils.errors import ConfigError
from tests.support.data import pairs_source
from tests.support.marks import extra, full_unless
from tests.support.multirank.pool import WorkerPool
from tests.support.multirank.runs import train
from tests.support.reference.folders import opened_by_them, save
from tests.support.reference.heads import inputs_of
from tests.support.reference.shared import assert_close, pair, widened
from tests.support.tasks import examples, words_tokenizer

SEQ = 48
SIZE = f"n_layers: 1, hidden_size: 48, n_heads: 4, max_seq_len: {SEQ}"
MODELS = {
    "bert": f"{{family: bert, norm_eps: 1.0e-12, {SIZE}}}",
    "gpt2": f"{{family: gpt2, {SIZE}}}",
    "llama": f"{{family: llama, n_kv_heads: 2, ffn_size: 80, norm_eps: 1.0e-6, tied_head: false, "
    f"{SIZE}}}",
    "t5": f"{{family: t5, n_decoder_layers: 1, norm_eps: 1.0e-6, {SIZE}}}",
}
# The scores that a run reports, by the name of its shipped run file.
SCORES: dict[str, set[str]] = {
    "mnli": {"accuracy"},
    "qqp": {"accuracy", "f1", "matthews"},
    "sts-b": {"pearson", "spearman"},
    "squad": {"exact_match", "f1"},
    "squad2": {
        f"{n}{of}" for n in ("exact_match", "f1") for of in ("", "_has_answer", "_no_answer")
    },
    "race": {"accuracy"},
}
LABELS = {
    "mnli": ["model.n_labels=3", "data.validation=[]"],
    "qqp": ["model.n_labels=2"],
    "squad": ["data.stride=32"],
    "squad2": ["data.stride=32"],
}
SAME_HEADS = ("qqp", "squad")  # those of other tasks, so one family is enough
ROUND_TRIPS = [
    (name, family)
    for name in SCORES
    for family in MODELS
    if family == "bert" or name not in SAME_HEADS
]
QUICK_TRIPS = {("squad2", "bert"), ("mnli", "gpt2"), ("sts-b", "t5"), ("race", "llama")}


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the run directories of imported models, whose tokenizer knows the words.

    GPT-2 and Llama pad with the end-of-text token, since the tokenizer has no other.
    """
    root, tokenizer = tmp_path_factory.mktemp("models"), words_tokenizer()
    for family in MODELS:
        size: dict[str, Any] = {"max_seq_len": SEQ, "n_layers": 1}
        size |= {"vocab_size": tokenizer.vocab_size + {"bert": 4, "t5": 1}.get(family, 0)}
        size |= {"n_decoder_layers": 1} if family == "t5" else {}
        _, theirs = pair(family, **size)
        tokenizer.save(save(theirs, root / "theirs" / family) / "tokenizer.json")
        import_folder(root / "theirs" / family, root / family)
    return root


def planned(
    name: str, imported: Path, root: Path, out: str, *overrides: str, family: str = "bert"
) -> Any:
    """Plan a shipped run with a small model on a small data set in its format."""
    data = root / f"{name}-tokens"
    if not data.exists():
        examples(name, root, Tokenizer.load(imported / family))
    values = [
        *(f"model={MODELS[family]}", *LABELS.get(name, ())),
        *(f"data.path={data}", f"data.seq_len={SEQ}", f"train.init_from={imported / family}"),
        *("train.epochs=1", "train.global_batch=8", "train.lr=1e-3"),
        *("train.dtype=float64", "train.device=cpu", *overrides),
    ]
    return plan_run(name, values, out=root / out)


@pytest.mark.parametrize(
    ("name", "family"), full_unless(QUICK_TRIPS.__contains__, ROUND_TRIPS, unpack=True)
)
def test_from_hugging_face_to_scores_and_back(
    pool: WorkerPool, imported: Path, tmp_path: Path, name: str, family: str
) -> None:
    plan = planned(name, imported, tmp_path, "run", family=family)
    folder = TokenFolder.open(plan.run.data.path)
    n = open_samples(plan.run, folder.train, folder.tokenizer).n_samples
    assert plan.run.train.steps == math.ceil(n / 8), "one epoch"
    assert plan.run.train.warmup_steps == round(0.1 * plan.run.train.steps)
    assert plan.start is not None
    if family == "bert":
        assert not any("pooler" in fresh for fresh in plan.start.fresh), "it comes with the weights"
    pool.run(1, train, plan)
    last = read_metrics(tmp_path / "run")[-1]
    assert last["step"] == plan.run.train.steps
    assert not any(key.startswith("loss_") for key in last), "the only loss is that of the task"

    trained = load_model(tmp_path / "run", torch.device("cpu"))
    path = plan.run.data.path
    scores = score_examples(trained, str(path), 5)
    assert scores.keys() == SCORES[name] | {"documents"}
    for key in SCORES[name]:
        assert last[f"val_{key}"] == pytest.approx(scores[key], rel=1e-9, abs=1e-12)
    again = measure_set(trained, "val")
    for key in SCORES[name]:
        assert again[key] == pytest.approx(scores[key], rel=1e-9, abs=1e-12)
    assert again["loss"] == pytest.approx(last["val_loss"], rel=1e-12)

    if name == "race" and family != "bert":  # tests/models/test_heads.py compares their scores
        with pytest.raises(ConfigError, match=r"no class of it .*, only BertForMultipleChoice"):
            export_run(tmp_path / "run", tmp_path / "exported")
        assert not (tmp_path / "exported").exists()
        return
    exported = export_run(tmp_path / "run", tmp_path / "exported")
    theirs = widened(opened_by_them(tmp_path / "exported").double())
    samples = open_samples(trained.run, folder.val, trained.tokenizer)
    read = {k: torch.from_numpy(v) for k, v in SequentialBatches(samples, 4).batch(0).items()}
    flat = {
        k: v.flatten(0, -2) if k in ("tokens", "valid", "segments") else v for k, v in read.items()
    }
    flat |= {"at": read["at"].flatten()} if "at" in read else {}
    with torch.no_grad():
        want, got = theirs(**inputs_of(read)), trained.model.logits(flat)
    if not name.startswith("squad"):  # whose stride a folder of theirs does not have
        import_folder(tmp_path / "exported", tmp_path / "again")
        same = score_examples(load_model(tmp_path / "again", torch.device("cpu")), str(path), 5)
        assert same == pytest.approx(scores, abs=1e-3), "in float32"
    if folder.index.labels:
        names = read_label_names(tmp_path / "again")
        assert names == folder.index.labels == tuple(theirs.config.id2label.values())
        assert theirs.config.label2id == {label: i for i, label in enumerate(names)}
    if name.startswith("squad"):
        assert exported.architecture.endswith("ForQuestionAnswering")
        assert_close(got["answer"], torch.stack((want.start_logits, want.end_logits), 1))
    else:
        assert_close(got["labels"].view(want.logits.shape), want.logits)


CHANCE = {("qqp", "bert"): 1 / 2, ("race", "gpt2"): 1 / 4}


@pytest.mark.parametrize(
    ("name", "family"), full_unless(("qqp", "bert").__eq__, CHANCE, unpack=True)
)
def test_what_can_be_learned_is_learned(
    pool: WorkerPool, imported: Path, tmp_path: Path, name: str, family: str
) -> None:
    """A word tells the answer, in examples that training has not seen, too."""
    longer = ("train.epochs=4", "train.lr=3e-3")
    plan = planned(name, imported, tmp_path, "run", *longer, family=family)
    pool.run(1, train, plan)
    last = read_metrics(tmp_path / "run")[-1]
    assert last["val_accuracy"] > CHANCE[name, family] + 0.2
    if name == "qqp":
        said = answers_of_transformers(tmp_path, plan.run)
        rows = (tmp_path / "qqp/dev.tsv").read_text(encoding="utf-8").splitlines()[1:]
        wanted = [row.endswith("\t1") for row in rows]
        assert said != wanted, "the scores would be 1 by any definition"
        right = sum(one == want for one, want in zip(said, wanted, strict=True))
        both = sum(one and want for one, want in zip(said, wanted))
        assert last["val_accuracy"] == pytest.approx(right / len(wanted))
        assert last["val_f1"] == pytest.approx(2 * both / (sum(said) + sum(wanted)))


def answers_of_transformers(root: Path, run: RunConfig) -> list[bool]:
    """Return which validation samples the exported model gives label 1."""
    export_run(root / "run", root / "exported")
    theirs = opened_by_them(root / "exported").double()
    folder = TokenFolder.open(run.data.path)
    samples = open_samples(run, folder.val, folder.tokenizer)
    read = SequentialBatches(samples, samples.n_samples).batch(0)
    with torch.no_grad():
        logits = theirs(**inputs_of({k: torch.from_numpy(v) for k, v in read.items()})).logits
    return [bool(label) for label in logits.argmax(1)]


LAYOUTS: dict[str, dict[str, Any]] = {
    "optimus": {"scheme": "optimus", "rows": 2, "cols": 2},
    "sequence parallel": {"scheme": "megatron", "cols": 2, "sequence_parallel": True, "dp": 2},
    "2d": {"scheme": "megatron_2d", "rows": 2, "cols": 2},
    "rows over s": {"scheme": "megatron_2d", "rows": 2, "cols": 2, "rows_over": "sequence"},
    "d&sp": {"scheme": "subgraph", "branches": 2, "micro_batches": 2},
    "csub": {"scheme": "subgraph", "branches": 2, "common": "first"},
    "pipeline": {"pp": 2, "micro_batches": 2, "dp": 2, "dp_mode": "zero1"},
    "fsdp": {"dp": 4, "dp_mode": "fsdp"},
}
CASES = [(name, family, layout) for name, family in ROUND_TRIPS for layout in LAYOUTS]
QUICK = [
    ("race", "bert", "d&sp"),
    ("race", "gpt2", "sequence parallel"),
    ("race", "t5", "pipeline"),
    ("squad", "bert", "rows over s"),
    ("sts-b", "llama", "optimus"),
]


@pytest.mark.parametrize("case", full_unless(QUICK.__contains__, CASES), ids=" on ".join)
def test_every_layout_trains_and_scores_as_one_device(
    pool: WorkerPool, imported: Path, tmp_path: Path, case: tuple[str, str, str]
) -> None:
    """With dropout, also of what the pooler returns; the validation set fills no whole batches."""
    name, family, layout = case
    drops = ("model.dropout=0.1", "model.attention_dropout=0.1")
    want = planned(name, imported, tmp_path, "one", *drops, family=family)
    chosen = [f"layout.{key}={value}".lower() for key, value in LAYOUTS[layout].items()]
    got = planned(name, imported, tmp_path, "many", *drops, *chosen, family=family)
    for plan in (want, got):
        pool.run(plan.n_processes, train, plan)
    lines = zip(read_metrics(tmp_path / "one"), read_metrics(tmp_path / "many"), strict=True)
    for one, many in lines:
        for key in one:
            if key.startswith(("val_", "loss", "grad_norm")):
                assert math.isclose(one[key], many[key], rel_tol=1e-9), key


SIZE_BLEU = {"n_layers": 2, "hidden_size": 32, "n_heads": 4, "max_seq_len": 32, "dropout": 0.1}
TRAIN = {
    "steps": 4, "global_batch": 16, "lr": 1e-2, "eval_every": 1, "eval_batches": 1,
    "save_every": 0, "dtype": "float64", "bleu_every": 2, "bleu_beams": 2,
}  # fmt: skip
PACKED = {"document_mask": True, "packing": "documents"}
LAYOUTS_BLEU: dict[str, dict[str, Any]] = {
    "pipeline": {"scheme": "megatron", "cols": 2, "pp": 2, "micro_batches": 2},
    "sequence": {"scheme": "megatron", "cols": 2, "sequence_parallel": True},
    "optimus": {"scheme": "optimus", "rows": 2, "cols": 2},
    "rows": {"scheme": "optimus", "rows": 2, "cols": 1, "rows_over": "sequence"},
    "subgraph": {"scheme": "subgraph", "branches": 2, "common": "first"},
    "fsdp": {"scheme": "single", "dp": 2, "dp_mode": "fsdp"},
}


def trained(plan: Plan) -> None:
    """Train with what `gridformer train` measures; the work of one rank."""
    world = World(dist.get_rank(), 0, dist.get_world_size(), torch.device("cpu"), "gloo", "test")
    measures = [Bleu(plan.run, plan.out)] if plan.run.train.bleu_every else []
    Trainer(plan, world, measures).fit()


def plan(folder: TokenFolder, out: Path, layout: dict[str, Any], **train: Any) -> Plan:
    sections = {
        "model": {"family": "transformer", "label_smoothing": 0.1, **SIZE_BLEU},
        # Texts are translated one by one, whatever the rows of training hold.
        "data": {"path": str(folder.path), **(PACKED if "pp" in layout else {})},
        "layout": layout,
        "train": {**TRAIN, **train},
    }
    file = out.with_suffix(".yaml")
    file.write_text(json.dumps(sections))  # JSON is also YAML
    return plan_run(file, out=out)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> TokenFolder:
    from gridformer.data.prepare.corpus import prepare_corpus

    out = tmp_path_factory.mktemp("pairs") / "t"
    return prepare_corpus([pairs_source(60)], out, vocab_size=270, val_fraction=0.2)


@pytest.mark.parametrize("name", full_unless("pipeline".__eq__, LAYOUTS_BLEU))
def test_bleu_is_that_of_the_saved_model(
    pool: WorkerPool, folder: TokenFolder, tmp_path: Path, name: str
) -> None:
    sacrebleu = extra("sacrebleu")
    steps = {"steps": 6, "eval_every": 2}  # so every second evaluation is after steps 4, 8, ...
    with_bleu = plan(folder, tmp_path / "with", LAYOUTS_BLEU[name], save_every=2, **steps)
    without = plan(folder, tmp_path / "without", LAYOUTS_BLEU[name], bleu_every=0, **steps)
    for one in (with_bleu, without):
        pool.run(one.n_processes, trained, one)
    found = {m["step"]: m for m in read_metrics(with_bleu.out)}
    assert [step for step, m in found.items() if "val_bleu" in m] == [4, 6]
    plain = {m["step"]: m for m in read_metrics(without.out)}
    for step, m in found.items():
        assert (
            m["val_loss" if step == 0 else "loss"]
            == plain[step]["val_loss" if step == 0 else "loss"]
        ), "translating changes nothing of a run"

    val, decode = folder.val, folder.tokenizer.decode
    texts = [decode(val.document(i)[:-1].tolist()) for i in range(val.n_documents)]
    for step in (4, 6):  # each checkpoint's folder is evaluated as a run directory is
        checkpoint = with_bleu.out / "checkpoints" / f"step-{step:08d}"
        model = load_model(checkpoint, torch.device("cpu"))
        said = translate(model, texts[::2], BeamSearch(2, max_tokens=32))
        want = sacrebleu.corpus_bleu(said, [texts[1::2]]).score
        assert found[step]["val_bleu"] == pytest.approx(want, abs=1e-9)
        loss = measure_set(model, "val")["loss"]
        assert loss == pytest.approx(found[step]["val_loss"], rel=1e-12)
    lines = (with_bleu.out / SAMPLES_FILE).read_text(encoding="utf-8").splitlines()
    last = [one for line in lines if (one := json.loads(line))["step"] == 6]
    assert [(one["prompt"], one["reference"]) for one in last] == [
        *zip(texts[:10:2], texts[1:10:2])
    ]
    assert [one["text"] for one in last] == said[:5]


def test_translations_of_steps_that_run_again_are_replaced(
    pool: WorkerPool, folder: TokenFolder, tmp_path: Path
) -> None:
    extra("sacrebleu")
    out = tmp_path / "resumed"
    layout = {"scheme": "megatron", "cols": 2}
    pool.run(2, trained, plan(folder, out, layout, save_every=1))
    file = out / SAMPLES_FILE
    whole = file.read_text(encoding="utf-8")
    assert [json.loads(line)["step"] for line in whole.splitlines()] == [2] * 5 + [4] * 5

    # As if the run had been killed while it wrote its last line, after the checkpoint of step 3.
    shutil.rmtree(out / "checkpoints" / "step-00000004")
    file.write_text(whole[:-9], encoding="utf-8")
    pool.run(2, trained, plan(folder, out, layout, save_every=1))
    assert file.read_text(encoding="utf-8") == whole


def test_other_tasks_have_no_bleu(folder: TokenFolder, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    model = {"family": "gpt2", "n_layers": 1, "hidden_size": 8, "n_heads": 2}
    file.write_text(json.dumps({"model": model, "data": {"path": str(folder.path)}}))
    with pytest.raises(
        ConfigError, match=r"data\.task=causal has no pairs to translate; use train"
    ):
        check_run(file, ["train.bleu_every=1"])
