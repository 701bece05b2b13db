"""Checkpoints that must not be loaded are refused by file name, and no code in them is executed."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gridformer.checkpoint import checkpoint, find
from gridformer.checkpoint import manifest as manifest_module
from gridformer.checkpoint.checkpoint import check_same_run, data_start_of
from gridformer.checkpoint.copies import choose_checkpoint
from gridformer.checkpoint.manifest import MANIFEST, read_manifest, verify_checkpoint
from gridformer.config import DataConfig, LayoutConfig, ModelConfig, RunConfig, parse_run
from gridformer.config.model import RopeScaling
from gridformer.data.run_data import Fingerprint
from gridformer.data.tokenfolder import TOKENIZER
from gridformer.mesh import Axes
from gridformer.models import Model
from gridformer.parallel import build_parallel
from gridformer.parallel.auto.decisions import decide_run
from gridformer.train.plan import Plan
from gridformer.train.saves import intact_checkpoint
from gridformer.train.step import Stepper
from gridformer.utils.batch import next_words
from gridformer.utils.errors import CheckpointError
from tests.support.checkpoints import MODEL, flip_a_bit, save_checkpoint, save_model, small_run


def a_run() -> RunConfig:
    return small_run(global_batch=2)


def a_model(run: RunConfig, seed: int) -> tuple[Model, Stepper]:
    model = build_parallel(run.model, LayoutConfig(), Axes(), seed, torch.device("cpu"))
    return model, Stepper(model, run.train, Axes())


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    run = a_run()
    model, stepper = a_model(run, seed=1)
    batch = torch.randint(0, 11, (2, 5))
    stepper(0, lambda rows: next_words(batch[rows]))
    return save_checkpoint(tmp_path, 1, 8, run, model, stepper.updates, Axes())


def test_round_trip(saved: Path) -> None:
    run = a_run()
    want, want_stepper = a_model(run, seed=1)
    manifest = checkpoint.load(saved, want, want_stepper.updates, Axes())
    got, got_stepper = a_model(run, seed=2)
    assert not torch.equal(got.get_parameter("tokens.weight"), want.get_parameter("tokens.weight"))
    checkpoint.load(saved, got, got_stepper.updates, Axes())
    assert (manifest.step, manifest.tokens) == (1, 8)
    for (name, a), b in zip(want.named_parameters(), got.parameters()):
        assert torch.equal(a, b), name
        for key in ("exp_avg", "exp_avg_sq", "step"):
            left = want_stepper.updates.state[a][key]
            assert torch.equal(left, got_stepper.updates.state[b][key]), (name, key)
    assert any(s["exp_avg"].abs().max() > 0 for s in got_stepper.updates.state.values())


def test_a_save_does_not_read_what_it_has_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reads(path: Path) -> int:
        raise AssertionError(f"{path} is read")

    run = a_run()
    model, stepper = a_model(run, seed=1)
    stepper.updates.allocate(1)
    with monkeypatch.context() as patch:
        patch.setattr(manifest_module, "crc32_of", reads)
        folder = save_checkpoint(tmp_path, 1, 8, run, model, stepper.updates, Axes())
    verify_checkpoint(folder)


def shard(folder: Path) -> Path:
    return next(folder.glob("*.safetensors"))


def name_a_file_outside(path: Path) -> None:
    content = json.loads(path.read_text())
    del content["checksum"]  # an older version wrote none
    content["files"]["../../other.safetensors"] = {"bytes": 1, "crc32": 1}
    path.write_text(json.dumps(content))


OTHER_SHARD = "shard-00009-model-00001-of-00001.safetensors"
DAMAGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "truncated": ("", lambda path: os.truncate(path, path.stat().st_size - 7)),
    "a bit": ("", flip_a_bit),
    "removed": ("", Path.unlink),
    "a foreign file": (OTHER_SHARD, lambda path: shutil.copy(shard(path.parent), path)),
    "half a manifest": (MANIFEST, lambda path: os.truncate(path, path.stat().st_size // 2)),
    "another program's": (MANIFEST, lambda path: path.write_text('{"format": "else"}')),
    "a file outside": (MANIFEST, name_a_file_outside),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_refused_by_name(saved: Path, damage: str) -> None:
    name, do = DAMAGES[damage]
    culprit = saved / name if name else shard(saved)
    do(culprit)
    model, stepper = a_model(a_run(), seed=2)
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(CheckpointError) as error:
        checkpoint.load(saved, model, stepper.updates, Axes())
    assert str(culprit) in str(error.value)
    assert "\n" not in str(error.value)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))


def test_a_folder_without_manifest_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a gridformer checkpoint"):
        verify_checkpoint(tmp_path)


class Payload:
    """Unpickling this creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return (os.mkdir, (str(self.path),))


def test_a_pickled_payload_is_not_executed(saved: Path, tmp_path: Path) -> None:
    trap = tmp_path / "executed"
    payload = pickle.dumps(Payload(trap))
    for name in (".metadata", "__0_0.distcp", "model.pt"):
        (saved / name).write_bytes(payload)
    model, stepper = a_model(a_run(), seed=2)
    checkpoint.load(saved, model, stepper.updates, Axes())
    assert not trap.exists()
    shard(saved).write_bytes(payload)
    with pytest.raises(CheckpointError):
        checkpoint.load(saved, model, stepper.updates, Axes())
    assert not trap.exists()
    pickle.loads(payload)
    assert trap.exists(), "the payload is a real one"


def test_latest_ignores_what_is_not_complete(saved: Path) -> None:
    (saved.parent / ".writing-step-00000009").mkdir()
    (saved.parent / ".deleting-step-00000008").mkdir()
    assert find.latest(saved.parents[1]) == saved
    assert find.latest(saved) is None


def test_latest_is_of_the_most_steps_whenever_it_was_written(saved: Path) -> None:
    """A copied or touched folder is not a later checkpoint."""
    parent = saved.parent
    saved.rename(parent / "step-00000010")
    shutil.copytree(parent / "step-00000010", parent / "step-00000009")
    for older, newer in ((9, 10), (10, 9)):
        for at, number in enumerate((older, newer)):
            for path in (parent / f"step-{number:08d}").iterdir():
                os.utime(path, (10**9 + at, 10**9 + at))
            os.utime(parent / f"step-{number:08d}", (10**9 + at, 10**9 + at))
        assert find.latest(parent.parent) == parent / "step-00000010"


def test_a_step_that_is_saved_again_replaces_the_first(tmp_path: Path) -> None:
    """A resumed run may save a step again; one complete folder remains, the last one saved."""
    run = a_run()
    model, stepper = a_model(run, seed=1)
    stepper(0, lambda rows: next_words(torch.arange(10).view(2, 5)[rows]))
    save_checkpoint(tmp_path, 1, 8, run, model, stepper.updates, Axes())
    with torch.no_grad():
        model.get_parameter("tokens.weight").fill_(0.25)
    saved = save_checkpoint(tmp_path, 1, 9, run, model, stepper.updates, Axes())
    assert [path.name for path in saved.parent.iterdir()] == ["step-00000001"]
    other, other_stepper = a_model(run, seed=2)
    assert checkpoint.load(saved, other, other_stepper.updates, Axes()).tokens == 9
    assert bool((other.get_parameter("tokens.weight") == 0.25).all())


# Settings that a resumed run must share with the earlier run, and settings that may differ.
def _of(section: str, **settings: Any) -> dict[str, Any]:
    return {f"{section}.{name}": value for name, value in settings.items()}


SAME: dict[str, Any] = {
    **_of("model", family="bert", n_layers=2, n_decoder_layers=1, hidden_size=16, n_heads=4),
    **_of("model", head_dim=4, ffn_size=24, vocab_size=12, max_seq_len=5, norm_position="post"),
    **_of("model", sentence_pair=False, n_labels=3, span_head=True, token_head=False),
    **_of("model", relative_buckets=8, relative_max_distance=64, n_kv_heads=1, rope_theta=5e5),
    **_of("model", rope_scaling=RopeScaling(kind="linear", factor=2.0), qkv_bias=True),
    **_of("model", qk_norm=True, window=2, tied_head=False, norm_eps=1e-6, init_std=0.03),
    **_of("model", qk_norm_over="all", n_experts=3, experts_per_token=2, expert_size=5),
    **_of("model", shared_size=7, dense_layers=1, router="sigmoid", router_bias=True),
    **_of("model", normalized_gates=False, routed_scale=2.0),
    **_of("train", seed=1235, init_from=Path("elsewhere"), global_batch=4),
    **_of("data", task="masked", seq_len=3, source_len=2, document_mask=True),
    **_of("data", reset_positions=False, packing="documents", n_choices=3, stride=2),
}
OTHER: dict[str, Any] = {
    **_of("model", name="another", dropout=0.1, attention_dropout=0.1, label_smoothing=0.1),
    **_of("model", balance_loss=0.1, balance_rate=0.1, z_loss=0.1),
    **_of("train", steps=2000, lr=1e-5, dtype="float64", recompute="full"),
    **_of("layout", dp=2),
    **_of("data", max_answer_len=3, tokenizer=Path("elsewhere"), restart=True),
}
# Settings that say what is read. Tests of their own cover them, here and of fingerprints.
TESTED_ALONE = {"path", "sources", "stages", "validation", "test", "val_fraction"}


def changed(run: RunConfig, key: str, value: Any) -> RunConfig:
    section, name = key.split(".")
    part = getattr(run, section).model_copy(update={name: value})
    return run.model_copy(update={section: part})


@pytest.mark.parametrize("key", SAME)
def test_another_run_is_refused(saved: Path, key: str) -> None:
    """Each setting is refused by itself, and the message has both values and a remedy."""
    run, manifest = a_run(), read_manifest(saved)
    check_same_run(manifest, run, saved)
    section, name = key.split(".")
    before, value = getattr(getattr(run, section), name), SAME[key]
    told = value.model_dump() if isinstance(value, RopeScaling) else value
    with pytest.raises(CheckpointError) as error:
        check_same_run(manifest, changed(run, key, value), saved)
    assert f"({key} is {told}, there {before})" in str(error.value)
    assert "use another --out" in str(error.value)


@pytest.mark.parametrize("restart", [False, True])
def test_another_tokenizer_of_the_same_size_is_refused(saved: Path, restart: bool) -> None:
    """The ids of the model's tokens would mean other texts, also where the order begins anew."""
    run = a_run()
    before, now = (Fingerprint(hashes={TOKENIZER: text}) for text in ("one", "two"))
    manifest = read_manifest(saved).model_copy(update={"data": before})
    run = changed(run, "data.restart", restart)
    check_same_run(manifest, run, saved, before)
    with pytest.raises(CheckpointError, match=r"the contents of tokenizer\.json changed"):
        check_same_run(manifest, run, saved, now)


@pytest.mark.parametrize("key", OTHER)
def test_a_run_may_resume_with_another(saved: Path, key: str) -> None:
    manifest = read_manifest(saved)
    check_same_run(manifest, changed(a_run(), key, OTHER[key]), saved)


def test_weights_of_steps_that_have_run_are_compared(saved: Path) -> None:
    """Those of later steps may change, and only ratios count."""

    def mixed(weights: tuple[float, float], *stages: tuple[int, float]) -> RunConfig:
        sources = [{"path": name, "weight": weight} for name, weight in zip("ab", weights)]
        later = [{"from_step": step, "weights": {"a": 1, "b": b}} for step, b in stages]
        data = {"sources": sources, "stages": later}
        return parse_run({"model": MODEL, "data": data, "train": {"global_batch": 2}})

    manifest = read_manifest(saved)
    before = mixed((0.7, 0.3), (5, 2))
    manifest = manifest.model_copy(update={"run": before.model_dump(mode="json"), "step": 8})
    for same in (mixed((7, 3), (5, 2)), mixed((0.7, 0.3), (5, 2), (9, 0.5))):
        check_same_run(manifest, same, saved)
    for other in (mixed((0.7, 0.3)), mixed((0.7, 0.3), (5, 2), (8, 1)), mixed((1, 1), (5, 2))):
        with pytest.raises(CheckpointError, match=r"weights of data.sources up to step 8 are"):
            check_same_run(manifest, other, saved)
    with pytest.raises(CheckpointError, match=r"weights of data\.sources .*, there none"):
        check_same_run(read_manifest(saved), before, saved)


@pytest.mark.parametrize(
    ("section", "config", "alone"),
    [("model", ModelConfig, {"folder", "factory", "plan"}), ("data", DataConfig, TESTED_ALONE)],
)
def test_every_setting_is_one_or_the_other(section: str, config: Any, alone: set[str]) -> None:
    named = {key.partition(".")[2] for key in (*SAME, *OTHER) if key.startswith(f"{section}.")}
    assert named | alone == {*config.model_fields}


def a_run_back(seq_len: int, restart: bool = False) -> RunConfig:
    run = small_run(global_batch=2, fallback=True)
    data = run.data.model_copy(update={"seq_len": seq_len, "restart": restart})
    return run.model_copy(update={"data": data})


def planned(out: Path, run: RunConfig) -> Plan:
    """Plan to resume, as long as only manifests and sizes have been looked at."""
    found = choose_checkpoint(run.train, out)
    assert found is not None
    step, start = found.manifest.step, data_start_of(found.manifest, run)
    return Plan(run, out, found.folder, step, decide_run(run), data_start=start, older=found.older)


def test_a_new_order_of_samples_begins_where_the_run_goes_on(tmp_path: Path) -> None:
    """The data change with `data.restart` after step 5, which is found damaged."""
    save_model(tmp_path, a_run_back(4), 3, 3, data_start=0)
    newest = save_model(tmp_path, a_run_back(4), 5, 5, data_start=0)
    run = a_run_back(2, restart=True)
    plan, verified = intact_checkpoint(planned(tmp_path, run), Axes())
    assert (plan.resume_step, plan.data_start) == (5, 5)
    assert verified is not None
    flip_a_bit(shard(newest))
    plan, verified = intact_checkpoint(planned(tmp_path, run), Axes())
    assert (plan.resume_step, plan.data_start) == (3, 3)
    assert verified is not None
    assert verified.step == 3


def test_an_older_checkpoint_of_other_data_is_refused(tmp_path: Path) -> None:
    """The data have changed after step 3, and nothing says that they may do so once more."""
    save_model(tmp_path, a_run_back(4), 3, 3, data_start=0)
    newest = save_model(tmp_path, a_run_back(2), 5, 5, data_start=3)
    plan, _ = intact_checkpoint(planned(tmp_path, a_run_back(2)), Axes())
    assert (plan.resume_step, plan.data_start) == (5, 3)
    flip_a_bit(shard(newest))
    with pytest.raises(CheckpointError, match=r"step-00000003 belongs to a run with other data"):
        intact_checkpoint(planned(tmp_path, a_run_back(2)), Axes())
