"""The `train` section of a run."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator
from typing import Literal

from pydantic import Field, field_validator

from gridformer.config.base import AnyPath, Config, any_of
from gridformer.utils.units import MOST_LAYERS, MOST_TOKENS

Attention = Literal["auto", "flash", "flash3", "flash4", "cudnn", "efficient", "math"]
Logger = Literal["tensorboard", "wandb", "mlflow"]
DType = Literal["float32", "float64", "bfloat16", "float16"]
# Bfloat16 rounds by up to 1/256, which is to be less than what a moment forgets in a step.
_SLOWEST = 0.99
# Signals that clusters send before they end a job. SIGINT is Ctrl-C, the user.
STOP_SIGNALS = tuple(
    name
    for name in ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGXCPU", "SIGQUIT")
    if hasattr(signal, name)
)


class TrainConfig(Config):
    """Optimizer, schedule and precision of training, when it evaluates and saves, and faults."""

    # Checkpoints, and what the run does when something fails.

    save_every: int = Field(default=500, ge=0)
    """A checkpoint is saved each time after this number of steps; 0 saves only at the end."""
    keep_checkpoints: int = Field(default=3, ge=1)
    """This number of the most recent checkpoints is kept."""
    fallback: bool = False
    """true lets a run whose newest checkpoint is damaged resume from the newest undamaged one, in
    its run directory or among the copies at checkpoint_to; the damaged one is kept under another
    name. false refuses to resume."""
    keep_every: int = Field(default=0, ge=0)
    """Besides, each checkpoint whose step is a multiple of this number is kept for good; 0 means
    none."""
    checkpoint_to: str = ""
    """Each checkpoint is also copied to this URL of any file system that fsspec knows, such as
    s3://bucket/run. A run whose directory has no checkpoint as new as the newest one there begins
    with a copy of that. A run whose last checkpoint cannot be copied ends with exit code 1. Empty
    means no copies."""
    async_save: bool = True
    """true copies what is saved to host memory and writes the files while training goes on; false
    lets training wait until they are written, and saves that memory. The last save of a run is
    always waited for."""
    full_disk: Literal["go_on", "remove_oldest"] = "go_on"
    """If there is no space for a checkpoint, the run goes on and the next save tries again (go_on),
    or the oldest checkpoint that is not kept for good is removed and the save is tried again
    (remove_oldest), but never the last complete one."""
    full_disk_wait_s: float = Field(default=900.0, ge=0.0, le=1e7)
    """If there is no space for the last checkpoint of a run, the run waits for it for at most this
    number of seconds before it ends without that checkpoint. During these seconds, the copy of the
    last checkpoint to checkpoint_to is tried again, too."""
    on_divergence: Literal["stop", "skip", "rollback"] = "stop"
    """If the loss or the gradients of a step are not finite, the run ends (stop), leaves out the
    update of that batch and goes on (skip), or goes back to an earlier checkpoint and on from there
    with a lower learning rate (rollback). With float16, gradients that overflow first lower the
    loss scale."""
    divergences: int = Field(default=5, ge=1, le=1_000_000)
    """The run ends after this number of skipped steps in a row, or after this number of
    rollbacks."""
    rollback_checkpoints: int = Field(default=1, ge=1, le=1_000_000)
    """A rollback goes back this number of checkpoints: 1 means the newest, 2 the one before it, and
    so on."""
    rollback_lr: float = Field(default=0.5, gt=0.0, le=1.0)
    """A rollback multiplies the learning rate by this."""
    timeout_s: float = Field(default=600.0, gt=0.0, le=1e8)
    """A collective that waits longer than this number of seconds ends the run with an error."""
    stop_signals: tuple[str, ...] = tuple(
        name for name in ("SIGTERM", "SIGUSR1") if name in STOP_SIGNALS
    )
    """After one of these signals the run saves a checkpoint and exits with code 75, which asks to
    be started again. Ctrl-C (SIGINT), SIGTERM and SIGHUP always save and stop, and those of them
    that are not listed here exit with 128 + their number."""
    stop_grace_s: float = Field(default=30.0, gt=0.0, le=86_400.0)
    """A run that is told to stop has this number of seconds until it is ended by force. A step that
    is not expected to end in time is dropped before its next micro-batch, and the state before it
    is saved. A save that has begun is never cut off."""
    max_hours: float | None = Field(default=None, gt=0.0)
    """The run saves a checkpoint and exits with code 75 early enough to end within this number of
    hours after its start. None means no limit."""
    max_restarts: int = Field(default=0, ge=0, le=1_000_000)
    """If a process of a local run fails, the run goes on from its newest checkpoint in new
    processes, up to this number of times. Under torchrun, its --max-restarts sets this number
    instead."""
    elastic: bool = False
    """true lets the run go on with another number of processes than the layout has, in another
    layout with the same global batch, and in its own layout as soon as there are enough processes.
    With layout.cluster, the planner searches for the fastest one."""

    @field_validator("stop_signals")
    @classmethod
    def _known_signals(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name == "SIGINT":
                raise ValueError(
                    "SIGINT is Ctrl-C, after which a run exits with code 130 and is not started "
                    f"again: name {any_of(STOP_SIGNALS)}"
                )
            if name not in STOP_SIGNALS:
                raise ValueError(f"'{name}' cannot be caught here: name {any_of(STOP_SIGNALS)}")
        return tuple(dict.fromkeys(names))

    # Steps, optimizer, precision, and evaluation.
    steps: int = Field(default=1000, ge=1)
    """Training takes this number of optimizer steps, unless epochs is set."""
    epochs: float = Field(default=0.0, ge=0.0, le=1e6)
    """Training reads all samples this number of times, and steps is computed from that; 0 means
    that steps decides."""
    seed: int = Field(default=1234, ge=0, lt=2**63)
    """Initial parameters, dropout and the order of samples depend on this seed."""
    init_from: AnyPath | None = None
    """A new run begins with the weights in this run directory, or in one of its checkpoints. Heads
    that those weights do not have get their initial values. A run that resumes does not read them
    again."""
    init_embeddings: Literal["exact", "resize"] = "exact"
    """With init_from, the tables of tokens and positions must have as many rows as in those weights
    (exact), or the rows that both have are taken and further rows get their initial values
    (resize)."""
    global_batch: int = Field(default=8, ge=1, le=MOST_TOKENS)
    """All devices together process this number of samples in a step."""
    dtype: DType = "float32"
    """The computation uses this data type. bfloat16 and float16 keep parameters and statistics in
    float32, and float16 scales the loss."""
    cast: Literal["auto", "step", "use"] = "auto"
    """With bfloat16 and float16, each weight is cast once a step and the copy is kept for all
    products that read it, which takes 2 bytes for each parameter of a device (step), or it is cast
    for each product (use). auto means step if the copies take at most a quarter of what a device
    holds."""
    tf32: bool = False
    """true lets float32 products on GPUs round their operands to TF32, which has 10 bits after the
    leading one instead of 23."""
    deterministic: bool = False
    """true uses deterministic kernels only, so that the same run on the same GPUs gives the same
    bits. Steps are slower."""
    recompute: Literal["none", "selective", "full", "except_attention"] = "none"
    """These activations are recomputed in the backward pass instead of kept: none, the attention
    scores (selective), everything in a block except its input (full), or except its input and the
    result of fused attention (except_attention), which saves much time with long sequences."""
    recompute_layers: int = Field(default=0, ge=0, le=MOST_LAYERS)
    """With full and except_attention, this number of layers is recomputed, the first ones of each
    stage of a pipeline, and of both stacks of a model that has two. 0 means all layers."""
    update: Literal["after_backward", "in_backward"] = "after_backward"
    """Parameters are updated after the backward pass or in it. in_backward updates a layer's
    matrices as soon as their gradients are complete and then frees those gradients, so the
    gradients of only one layer exist at a time (of two layers with replicas). With several
    micro-batches the gradients of all layers exist, because they are accumulated. in_backward needs
    clip_by=layer or clip_norm=0."""
    offload: Literal["none", "optimizer"] = "none"
    """optimizer keeps the moments of Adam in host memory and copies those of one layer at a time to
    the device while the layer is updated. none keeps them on the device."""
    loss_chunk_tokens: int = Field(default=1024, ge=0)
    """The logits of this number of tokens of a micro-batch exist at the same time on a device; 0
    means all of them."""
    memory_gib: float = Field(default=0.0, ge=0.0)
    """The tensors of one process may take this number of GiB; 0 means the memory of its device. A
    run that needs more does not start, and the error lists settings that fit."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """The run uses this type of device. auto means cuda if every machine has a GPU for each
    process, and otherwise cpu; processes of torchrun, srun or mpirun that have fewer GPUs than
    processes are refused."""
    kernels: Literal["fused", "torch"] = "fused"
    """On GPUs, dropout, the loss of tokens, and attention with dropout, padding or a learned bias,
    are computed by gridformer's own kernels (fused) or by operators of PyTorch (torch), which are
    slower and take more memory. On CPUs both values mean the operators of PyTorch."""
    attention: Attention = "auto"
    """Where no kernel of gridformer's computes attention, this one of PyTorch does on GPUs:
    FlashAttention 2 (flash), 3 (flash3) or 4 (flash4), cuDNN's (cudnn), the memory-efficient one
    (efficient), or products and a softmax with all scores in memory (math). auto measures at the
    start which of them is the fastest; with deterministic=true it measures nothing and means flash.
    On CPUs there are auto, which leaves the choice to PyTorch, and math."""
    compile: Literal["auto", True, False] = "auto"
    """true compiles each block with torch.compile. The parts of a block that communicate run
    uncompiled, between compiled regions. auto means true on GPUs with what compilation needs,
    unless blocks are a mixture of experts or another library's, or recompute=except_attention or
    deterministic=true; on CPUs it means false."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """All parameters are updated by AdamW (adamw), or the matrices of layers by their
    orthogonalized momentum (muon), and tables, heads and vectors by AdamW. Updates of both are
    about as large, so the learning rate and the decay serve both."""
    muon_momentum: float = Field(default=0.95, ge=0.0, lt=1.0)
    """The momentum of Muon decays at this rate."""
    muon_by_head: bool = False
    """true lets Muon take the queries, keys and values of each attention head for a matrix of its
    own. false takes the matrices as they are in the model."""
    moments_dtype: Literal["float32", "bfloat16"] = "float32"
    """The moments of the optimizer are kept in this type; with dtype=float64, float32 means
    float64. bfloat16 takes half the memory. They are rounded once a step."""
    lr: float = Field(default=3e-4, gt=0.0)
    """The learning rate rises to this value during the warm-up and then follows lr_schedule."""
    lr_schedule: Literal["cosine", "linear", "constant", "wsd", "inverse_sqrt"] = "cosine"
    """After the warm-up the learning rate falls until the last step along a cosine (cosine) or a
    line (linear), stays (constant), stays and then falls over the last steps (wsd: warm-up, stable,
    decay), or falls as 1 / sqrt(step) (inverse_sqrt)."""
    min_lr_ratio: float = Field(default=0.1, ge=0.0, le=1.0)
    """With cosine, linear and wsd, the learning rate falls to this fraction of lr at the last
    step."""
    decay_fraction: float = Field(default=0.1, gt=0.0, le=1.0)
    """With wsd, the learning rate falls during this fraction of all steps, at the end."""
    decay_shape: Literal["linear", "cosine", "1-sqrt"] = "linear"
    """With wsd, the learning rate falls along a line (linear), a cosine (cosine), or 1 minus the
    square root of the part of the decay that is done (1-sqrt)."""
    warmup_steps: int = Field(default=0, ge=0)
    """The learning rate rises linearly to lr over this number of steps, unless warmup_fraction is
    set."""
    warmup_fraction: float = Field(default=0.0, ge=0.0, le=1.0)
    """The learning rate rises linearly to lr over this fraction of all steps, and warmup_steps is
    computed from that; 0 means that warmup_steps decides."""
    weight_decay: float = Field(default=0.1, ge=0.0)
    """AdamW decays matrices, but never vectors, with this coefficient."""
    beta1: float = Field(default=0.9, ge=0.0, lt=1.0)
    """The first moment of Adam decays at this rate."""
    beta2: float = Field(default=0.95, ge=0.0, lt=1.0)
    """The second moment of Adam decays at this rate."""
    adam_eps: float = Field(default=1e-8, gt=0.0)
    """Adam adds this constant to the denominator of an update."""
    clip_norm: float = Field(default=1.0, ge=0.0)
    """Gradients with a norm above this value are scaled down to it; 0 turns clipping off."""
    clip_by: Literal["global", "layer"] = "global"
    """Clipping uses the norm of all gradients (global), or separate norms of each layer's matrices
    and of all other parameters (layer)."""
    eval_every: int = Field(default=100, ge=0)
    """The model is evaluated before the first step, and each time after this number of steps; 0
    evaluates only at the end."""
    eval_batches: int = Field(default=8, ge=1)
    """An evaluation takes this number of global batches."""
    bleu_every: int = Field(default=0, ge=0)
    """With data.task=pairs, BLEU of translated validation pairs is measured each time after this
    number of evaluations, and at the last one; 0 means never. This needs sacrebleu."""
    bleu_pairs: int = Field(default=0, ge=0)
    """BLEU is measured on this number of pairs of each validation set; 0 means all that fit
    data.source_len and data.seq_len."""
    bleu_beams: int = Field(default=1, ge=1, le=100)
    """For BLEU, translations are searched with this number of beams; 1 is greedy."""
    bleu_length_penalty: float = Field(default=1.0, ge=-10.0, le=10.0)
    """For BLEU, the search divides the log-probability of a translation of n tokens by n to this
    power, so larger values favor longer translations."""
    loggers: tuple[Logger, ...] = ("tensorboard",)
    """The metrics of each step are always written to metrics.jsonl, and also logged to each logger
    of this list: tensorboard, wandb (Weights & Biases) or mlflow. wandb and mlflow are extras."""
    trace_step: int = Field(default=0, ge=0)
    """The timeline of this step N is written to trace-step-N.json, which makes the step slower; 0
    means no step."""
    peak_tflops: float = Field(default=0.0, ge=0.0)
    """Metrics state utilizations (mfu and hfu) relative to this peak of one device in TFLOP/s. 0
    means the peak of the data sheet for dtype if the device is a known GPU, and otherwise metrics
    have no utilizations."""
    sanity_checks: bool = False
    """true lets every evaluation first check that all ranks hold equal copies of replicated
    parameters."""

    @property
    def decay_steps(self) -> int:
        """How many of the last steps `lr_schedule: wsd` lets the learning rate fall over."""
        return max(1, round(self.decay_fraction * self.steps))

    @property
    def waits_each_step(self) -> bool:
        """Whether the host waits for each step of a GPU before it launches the next one.

        With float16 the next loss scale depends on the step, and updates in the backward pass
        cannot be undone.
        """
        return self.dtype == "float16" or self.update == "in_backward"

    @property
    def saves_meanwhile(self) -> bool:
        """Whether a run ever saves while training goes on, for which it needs memory for copies."""
        return self.async_save and 0 < self.save_every < self.steps

    @property
    def recomputes_blocks(self) -> bool:
        """Whether whole blocks are recomputed."""
        return self.recompute in ("full", "except_attention")

    def _problems(self) -> Iterator[str]:
        if self.recompute_layers and not self.recomputes_blocks:
            yield (
                f"recompute_layers={self.recompute_layers} is a number of blocks, but recompute="
                f"{self.recompute} recomputes none; use recompute=full or recompute_layers=0"
            )
        if self.recompute == "except_attention" and self.compile is True:
            yield (
                "recompute=except_attention: compiled blocks do not keep the result of attention; "
                "use recompute=full or compile=false"
            )
        if self.on_divergence == "rollback" and self.rollback_checkpoints > self.keep_checkpoints:
            yield (
                f"rollback_checkpoints={self.rollback_checkpoints}, but keep_checkpoints="
                f"{self.keep_checkpoints} keeps fewer; use rollback_checkpoints="
                f"{self.keep_checkpoints}, or keep_checkpoints={self.rollback_checkpoints}"
            )
        if self.update == "in_backward":
            yield from self._update_problems()
        if self.muon_by_head and self.optimizer != "muon":
            yield "muon_by_head=true is for optimizer=muon; use it, or muon_by_head=false"
        if self.moments_dtype == "bfloat16" and self.beta2 > _SLOWEST:
            yield (
                f"moments_dtype=bfloat16 rounds away what beta2={self.beta2:g} changes in a step; "
                f"use beta2={_SLOWEST:g} or less, or moments_dtype=float32"
            )
        if self.lr_schedule == "inverse_sqrt" and not (self.warmup_steps or self.warmup_fraction):
            yield (
                "lr_schedule=inverse_sqrt falls as sqrt(warmup_steps / step), so it cannot use "
                "warmup_steps=0; use warmup_steps=1 or a larger number"
            )
        stable = self.steps - self.decay_steps
        computed = self.epochs or self.warmup_fraction
        if self.lr_schedule == "wsd" and not computed and self.warmup_steps > stable:
            fits = math.floor(100 * (self.steps - self.warmup_steps) / self.steps) / 100
            fraction = f", or decay_fraction={fits:g}" if fits > 0 else ""
            yield (
                f"lr_schedule=wsd: warmup_steps={self.warmup_steps} and the decay of "
                f"{self.decay_steps} steps (decay_fraction={self.decay_fraction:g}) take more than "
                f"steps={self.steps}; use warmup_steps={stable}{fraction}"
            )

    def _update_problems(self) -> Iterator[str]:
        if self.clip_by == "global" and self.clip_norm:
            yield (
                "update=in_backward: layers are updated before the norm of all gradients is known; "
                "use clip_by=layer or clip_norm=0"
            )
        if self.dtype == "float16":
            yield (
                "update=in_backward: a step whose float16 gradients overflow could not be skipped; "
                "use dtype=bfloat16 or update=after_backward"
            )
        if self.on_divergence == "skip":
            yield (
                "update=in_backward: a step could not be left out, because layers are updated "
                "before its loss is known; use on_divergence=rollback or update=after_backward"
            )
