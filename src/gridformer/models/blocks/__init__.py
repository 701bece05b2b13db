# ruff: noqa: F401
"""Plain single-device building blocks: the reference that every parallel layout must match.

Suffixes of names are shapes: B sequences, S tokens, T tokens of a source (written S in docstrings),
H hidden size, N heads, D head size, V vocabulary, I and O a product's inputs and outputs. A weight
is [in, out], so that `y = x W + b` reads as in the papers; see `gridformer.parallel` for how they
are sharded.
"""

from gridformer.models.blocks.attention import (
    Attention,
    AttentionHeads,
    CrossAttention,
    GroupedAttention,
    KVCache,
)
from gridformer.models.blocks.branch import (
    ChosenToken,
    Classifier,
    LabelHead,
    LastTokenClassifier,
    PooledDropout,
    SpanHead,
    TokenHead,
    WholeSequence,
)
from gridformer.models.blocks.cast import attach_copies, cast, copy_of, keep_copies, make_copies
from gridformer.models.blocks.dropout import Dropout, DropoutRng, DropoutSite
from gridformer.models.blocks.embedding import (
    PositionEmbedding,
    SegmentEmbedding,
    SinusoidalPositions,
    TiedHead,
    TokenEmbedding,
    UntiedHead,
)
from gridformer.models.blocks.experts import Balance, Experts, MixtureOfExperts
from gridformer.models.blocks.gradient_sum import attach_gradient_slots, gradient_slot
from gridformer.models.blocks.layer import (
    GatedFeedForward,
    GatedLayer,
    Layer,
    Spread,
    Style,
    StyledLayer,
)
from gridformer.models.blocks.linear import (
    FeedForward,
    Init,
    Linear,
    MergedLinear,
    MergedParts,
    PartSize,
    Role,
    as_operator,
    init_of,
    new_parameter,
    with_init,
)
from gridformer.models.blocks.loss import (
    CrossEntropy,
    LabelLoss,
    by_label,
    chunked_loss,
    places_per_chunk,
)
from gridformer.models.blocks.norm import AllHeadsNorm, HeadNorm, LayerNorm, RMSNorm, new_norm
from gridformer.models.blocks.recompute import ActivationPartition, Recompute
from gridformer.models.blocks.recompute import Mode as RecomputeMode
from gridformer.models.blocks.rotary import RotaryPositions, Rotation
from gridformer.models.blocks.scores import (
    AttendingRows,
    PaddingMask,
    RelativeBias,
    ScoreBias,
    Window,
    added_to_scores,
    document_bounds,
)
from gridformer.models.blocks.sequence import SegmentBias, SequenceRows
from gridformer.utils.batch import IGNORE
