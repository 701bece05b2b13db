"""Every part that a page promises is there and says what the runs have recorded.

Two small runs of two processes train for it, with validation, translations and a traced step. What
the page shows is computed again from their files here, without the report's own code. A run on CPUs
measures no memory, so that metric is added as a run on GPUs writes it.
"""

import html
import json
import re
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gridformer.data.prepare.corpus import prepare_corpus
from gridformer.evaluate.bleu import Bleu
from gridformer.launch.plan import plan_run
from gridformer.mesh.process_group import World
from gridformer.train.plan import Plan
from gridformer.train.trainer import Trainer
from tests.support.commands import gridformer_here
from tests.support.data import pairs_source
from tests.support.marks import extra
from tests.support.multirank.pool import WorkerPool

STEPS, TRACED = 4, 3
LAYOUTS: dict[str, dict[str, Any]] = {
    "split": {"scheme": "megatron", "cols": 2},
    "copies": {"scheme": "single", "dp": 2, "dp_mode": "zero1"},
}
ON = {"split": "megatron 1x2", "copies": "dp=2 (zero1)"}
RATES = {"split": 0.01, "copies": 0.002}
MEMORY = {"split": 1.25, "copies": 1.75}  # GiB


def plain(text: str) -> str:
    return html.unescape(re.sub("<[^>]*>", "", text))


class Part:
    """A section of the page, below one heading."""

    def __init__(self, text: str, figures: dict[str, Any]) -> None:
        self.text = plain(text)
        rows = re.findall("<tr>(.*?)</tr>", text, re.DOTALL)
        self.rows = [
            [plain(cell) for cell in re.findall("<t[dh][^>]*>(.*?)</t[dh]>", row, re.DOTALL)]
            for row in rows
        ]
        self.blocks = [plain(block) for block in re.findall("<pre>(.*?)</pre>", text, re.DOTALL)]
        self.figures = [name for name in re.findall('id="([^"]+)"', text) if name in figures]
        bars = [bar for name in self.figures for bar in figures[name]["data"]]
        self.titles = [
            title
            for bar in bars
            if bar["type"] == "bar"
            for value, title in zip(bar["x"], bar["hovertext"])
            if value
        ]


class Page:
    """A page: its sections by heading, and the data of its figures."""

    def __init__(self, path: Path) -> None:
        whole = path.read_text(encoding="utf-8").partition("<body>")[2]
        body, _, rest = whole.partition('<script type="application/json" id="figures">')
        self.figures: dict[str, Any] = json.loads(rest.partition("</script>")[0])
        first, *others = re.split("<h2>(.*?)</h2>", body)
        headings = zip(["", *others[::2]], [first, *others[1::2]])
        self.parts = {name: Part(text, self.figures) for name, text in headings}

    def table(self, heading: str) -> dict[str, list[str]]:
        """Return the rows of the tables of a section by their first cell."""
        return {first: rest for first, *rest in self.parts[heading].rows}

    def curves(self, title: str) -> dict[tuple[int, str], tuple[list[int], list[float]]]:
        """Return the curves of a chart by run and metric, not smoothed: steps and values."""
        figure = self.figures["curves"]
        notes = figure["layout"]["annotations"]
        titles = [one["text"].removesuffix("</sup>") for one in notes]
        number = titles.index(title) + 1
        axis = f"x{number}" if number > 1 else "x"
        curves, raw = {}, None
        for trace in figure["data"]:
            if trace["xaxis"] != axis:
                continue
            if trace.get("opacity"):
                raw = trace["y"]  # of the smoothed curve that follows
                continue
            metric = trace["hovertemplate"].partition(" ")[2].partition("<")[0]
            run = self.runs.index(trace["name"]) if len(self.runs) > 1 else 0
            curves[run, metric] = trace["x"], raw or trace["y"]
            raw = None
        return curves

    @property
    def runs(self) -> list[str]:
        """The labels of its runs, as the summary has them."""
        return self.parts[""].rows[0][1:]


def trained(plan: Plan) -> None:
    world = World(dist.get_rank(), 0, dist.get_world_size(), torch.device("cpu"), "gloo", "test")
    Trainer(plan, world, [Bleu(plan.run, plan.out)]).fit()


@pytest.fixture(scope="module")
def folders(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The run directories."""
    extra("sacrebleu")
    folder = tmp_path_factory.mktemp("runs")
    prepare_corpus([pairs_source(60)], folder / "data", vocab_size=270, val_fraction=0.2)
    found = {}
    for name, layout in LAYOUTS.items():
        sections = {
            "name": name,
            "model": {
                "family": "transformer",
                **{"n_layers": 1, "hidden_size": 16, "n_heads": 2, "max_seq_len": 32},
            },
            "data": {"path": str(folder / "data")},
            "layout": layout,
            "train": {
                **{"steps": STEPS, "global_batch": 8, "lr": RATES[name], "warmup_steps": 2},
                **{"eval_every": 2, "eval_batches": 1, "bleu_every": 1, "save_every": 0},
                **{"trace_step": TRACED, "peak_tflops": 1e-4},
            },
        }
        file = folder / f"{name}.yaml"
        file.write_text(json.dumps(sections))
        plan = plan_run(file, out=folder / name)
        pool.run(2, trained, plan)
        lines = metrics_of(plan.out)
        for line in lines:
            if "val_loss" in line and line["step"]:
                line["peak_memory_gib"] = MEMORY[name] * line["step"] / STEPS
        (plan.out / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
        found[name] = plan.out
    return found


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module", params=[1, 2], ids=["alone", "compared"])
def page(
    request: pytest.FixtureRequest,
    folders: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Page:
    out, shown = tmp_path_factory.mktemp("page") / "page.html", [*folders.values()][: request.param]
    done = gridformer_here("report", *shown, "--html", out, "--seconds", "600")
    assert done.returncode == 0, done.stderr
    return Page(out)


@pytest.fixture
def shown(page: Page, folders: dict[str, Path]) -> list[Path]:
    """The run directories that the page shows."""
    return [*folders.values()][: len(page.runs)]


CHARTS = {
    # title with its unit: names of the metrics, by what their values are multiplied
    "Loss<br><sup>nats per target": ({"Training loss": "loss", "Validation loss": "val_loss"}, 1),
    "Learning rate": ({"Learning rate": "lr"}, 1),
    "Gradient norm<br><sup>before clipping": ({"Gradient norm": "grad_norm"}, 1),
    "Speed<br><sup>tokens/s": ({"Speed": "tokens_per_s"}, 1),
    "Utilization (MFU)<br><sup>% of the peak": ({"Utilization (MFU)": "mfu"}, 100),
    "Memory<br><sup>GiB at the peak of the fullest process": ({"Memory": "peak_memory_gib"}, 1),
    "Time of a step<br><sup>seconds": (
        {"All of it": "step_time_s", "Waiting for data": "data_wait_s"},
        1,
    ),
    "Validation BLEU": ({"Validation BLEU": "val_bleu"}, 1),
}


@pytest.mark.parametrize("title", CHARTS)
def test_curves_have_all_values_of_the_metrics(page: Page, shown: list[Path], title: str) -> None:
    names, factor = CHARTS[title]
    curves = page.curves(title)
    assert {*curves} == {(number, name) for number in range(len(shown)) for name in names}
    for (number, name), (steps, values) in curves.items():
        lines = [line for line in metrics_of(shown[number]) if names[name] in line]
        assert steps == [line["step"] for line in lines] != []
        assert values == pytest.approx([factor * line[names[name]] for line in lines], rel=1e-5)
    assert "curves" in page.parts["Training"].figures


def test_the_summary_has_loss_speed_utilization_and_memory(page: Page, shown: list[Path]) -> None:
    rows = page.table("")
    for number, folder in enumerate(shown):
        lines = metrics_of(folder)
        steps = [line for line in lines if "loss" in line]
        last = lines[-1]["val_loss"]
        assert rows["steps"][number] == f"{STEPS} of {STEPS}"
        assert rows["state"][number] == "done"
        assert rows["validation loss"][number].startswith(f"{last:.4g} (perplexity ")
        loss = statistics.fmean(line["loss"] for line in steps)
        assert rows["training loss"][number].startswith(f"{loss:.4g} (mean of the last")
        speed = float(rows["tokens/s, median"][number].replace(",", ""))
        assert speed == pytest.approx(
            statistics.median(line["tokens_per_s"] for line in steps), rel=0.01
        )
        mfu = statistics.median(line["mfu"] for line in steps)
        assert rows["MFU, median"][number] == f"{mfu:.1%}"
        assert rows["peak of memory"][number] == f"{MEMORY[folder.name]:.3g} GiB"


def test_what_has_happened(page: Page, shown: list[Path]) -> None:
    said = [row[-2] for row in page.parts["What has happened"].rows[1:]]
    assert [one for one in said if one.startswith("Started at step 0 on ")]
    assert [one.partition(":")[0] for one in said if one.startswith("Checkpoint")] == [
        f"Checkpoint of step {STEPS}"
    ] * len(shown)
    assert said.count(f"Done with step {STEPS}.") == len(shown)


def events_of(folder: Path) -> list[dict[str, Any]]:
    trace = json.loads((folder / f"trace-step-{TRACED}.json").read_text())
    return [event for event in trace["traceEvents"] if event["ph"] != "M"]


def test_the_timeline_is_that_of_the_traced_step(page: Page, shown: list[Path]) -> None:
    part = page.parts["Timeline of a step"]
    for number, folder in enumerate(shown):
        assert f"timeline-{number}" in part.figures
        assert f"{folder.name}: step {TRACED} on {ON[folder.name]}" in part.text
        tracks = page.figures[f"timeline-{number}"]["data"]
        drawn = {one["name"]: Counter(map(round, one["y"][::3])) for one in tracks}
        events = events_of(folder)
        spans = [e for e in events if e["ph"] == "X" and e["cat"] != "wait"]
        kinds = {e["name"].rstrip(" 0") for e in spans}
        assert {"forward", "backward", "update", "read the batch", "wait for data"} <= kinds
        for kind in kinds & {*drawn}:
            ranks = Counter(e["pid"] for e in spans if e["name"].rstrip(" 0") == kind)
            assert drawn[kind] == ranks, kind
        waits = Counter(e["pid"] for e in events if e["ph"] == "X" and e["cat"] == "wait")
        assert drawn["waits for messages"] == waits
        begun = Counter(e["pid"] for e in events if e["ph"] == "b")
        messages = [count for name, count in drawn.items() if name.startswith("messages over")]
        assert sum(messages, Counter()) == begun
        last = max(e["ts"] + e["dur"] for e in events if e["ph"] == "X") / 1000
        times = [x for one in tracks for x in one["x"] if x is not None]
        assert max(times) == pytest.approx(last, abs=0.5)
    # The bars below add up what each process spent its time on.
    for kind in ("forward", "backward", "update", "wait for data"):
        titles = [one for one in part.titles if re.fullmatch(rf"{kind}: [\d.,e-]+ ms", one)]
        assert len(titles) == 2 * len(shown), kind


def traffic_of(folder: Path) -> Counter[str]:
    """Return the bytes of a process in the traced step by axis, the mean over both."""
    found: Counter[str] = Counter()
    for event in events_of(folder):
        if event["ph"] == "b":
            found[event["args"]["axis"]] += event["args"]["bytes"] / 2
    return found


def amount(text: str) -> float:
    """Return the bytes that a text such as `1.5 MiB` means."""
    value, unit = text.replace(",", "").split()
    return float(value) * {"bytes": 1, "MiB": 2**20, "GiB": 2**30}[unit]


def test_where_communication_goes(page: Page, shown: list[Path]) -> None:
    part = page.parts["Where communication goes"]
    wanted = [(axis, n) for folder in shown for axis, n in traffic_of(folder).items()]
    found = [one.rpartition(": ") for one in part.titles]
    assert sorted((axis, amount(text)) for axis, _, text in found) == [
        (axis, pytest.approx(n, rel=0.01)) for axis, n in sorted(wanted)
    ]
    assert {axis for axis, _ in wanted} >= ({"col", "world"} if len(shown) == 1 else {"dp"})
    for folder in shown:
        assert f"{folder.name}, measured on {ON[folder.name]}: " in part.text
    head, *rows = [row for row in part.rows if row]
    assert head == ["purpose", "collective", "axis", "messages", "bytes"]
    assert ["product", "all_reduce", "col"] in [row[:3] for row in rows]


def test_memory_is_what_the_code_holds(page: Page, shown: list[Path]) -> None:
    """The states of Adam are twice the parameters, shared by both processes with zero1."""
    part = page.parts["Memory"]
    bytes_of = {"parameters": 4, "gradients": 4, "optimizer": 8}
    found: dict[str, list[float]] = {}
    for title in part.titles:
        kind, _, text = title.rpartition(": ")
        found.setdefault(kind, []).append(amount(text))
    for number, folder in enumerate(shown):
        assert page.figures["memory"]["data"][0]["y"][number].startswith(f"{folder.name} (rank ")
        assert f"{folder.name}: the peak is in " in part.text
        n = found["parameters"][number] / bytes_of["parameters"]
        shared = 2 if folder.name == "copies" else 1
        assert found["optimizer"][number] == pytest.approx(8 * n / shared, rel=0.05)
    assert all(len(found[kind]) == len(shown) for kind in ("parameters", "optimizer"))
    assert {kind for kind in found if kind.startswith("activations: ")}


def test_samples_are_shown_with_their_step(page: Page, shown: list[Path]) -> None:
    part = page.parts["Generated text"]
    lines = [
        json.loads(line)
        for folder in shown
        for line in (folder / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert len(lines) == 10 * len(shown)  # five after each of two evaluations
    texts = [text for one in lines for text in (one["prompt"] + one["text"], one["reference"])]
    assert Counter(part.blocks) == Counter(texts)
    for step in (2, 4):
        assert part.text.count(f"After step {step}") == 5 * len(shown)


def test_all_settings_of_all_runs(page: Page, shown: list[Path]) -> None:
    rows = page.table("Settings")
    assert rows["train.lr"] == [str(RATES[folder.name]) for folder in shown]
    assert rows["data.path"] == [".../data"] * len(shown)
    _, *first = [key for key, *_ in page.parts["Settings"].rows]
    changed, default = first[: first.index("")], first[first.index("") :]
    assert {"data.path", "layout.cols", "train.lr", "train.trace_step"} <= {*changed}
    assert {"train.dtype", "layout.pp"} <= {*default}
    assert ("Settings that differ" in page.parts) == (len(shown) > 1)
