"""How many kernels the host launches, where that does not follow from what they compute.

The other modules of the estimate count a launch for each product, message and pass. Here are the
numbers of small kernels that take no time but their launch, as traces of the real code show them;
tests/plan/test_analytic.py compares the sums. They matter where a step waits for the host.
"""

from __future__ import annotations

from gridformer.parallel.auto.cost import Choice
from gridformer.parallel.auto.products import Product
from gridformer.parallel.pipeline.stage_shares import StageShares, stacks_of
from gridformer.plan.sizes import Sizes

WITH_RMS = ("t5", "llama")  # whose norms are RMSNorms
STEP = 50  # the norm of gradients, their scale, the optimizer, and what is logged
BATCH = 10  # the batch, and what losses are divided by
RMS_LAUNCHES = (6, 9)  # forward and backward, without casts
RMS_INSIDE_LAUNCHES = (6, 15)  # inside a product, which normalizes again in the backward pass
SHARDED_LAUNCHES = (14, 14)  # of activations whose last dimension is sharded
BUCKET = 1.6  # a message, and copies of gradients that lie across its borders
ZERO1_PARAMETER = 2.1  # copied to messages, and from them
ZERO1_BACKWARD = 0.8
FSDP_PARAMETER = 1.35  # once a step
FSDP_GATHERED = 0.75  # copied from the message of its layer
FSDP_JOINED = 0.6  # its gradient, copied to a message
OFFLOADED_PARAMETER = 4  # copies of two moments, to the device and back
OFFLOADED_LAYER = 10  # its norm and its update, apart from others
# Of the loss of a chunk of tokens, forward and backward together.
LOSS, LOSS_SMOOTHED = 11, 19
LOSS_SHARDED, LOSS_SHARDED_SMOOTHED = 27, 33
CHUNK = 3  # the first gradient, the sum of losses, and the gradient of hidden states
# Of a micro-batch, forward and backward: positions, segments, dropout before the first layer, and
# the norm after the encoder of a T5.
POSITIONS: dict[str, tuple[int, int]] = {
    "gpt2": (0, 1),
    "bert": (4, 5),
    "t5": (10, 13),
    "transformer": (32, 2),
    "llama": (0, 0),
}
# The same of each stack of which a rank has layers: the bias of scores, or rotations.
EACH_STACK = {"t5": (17, 1), "llama": (19, 0)}
LOOKUP, LOOKUP_SHARDED, LOOKUP_ROWS = (1, 2), (8, 10), (2, 11)
OUTSIDE = {"gpt2": 4, "bert": 14, "t5": 4, "transformer": 1, "llama": 3}  # parameters
TRANSFORM = (2, 6)  # of BERT's head: its biases, GELU, and gradients that are summed
LABELS = (11, 15)  # of a head of labels, without its products
LABELS_SHARDED = (8, 2)  # more, where a token is chosen from parts of sequences
LAST_TOKEN = (19, 16)  # of a head of labels that reads one token, with its products and norm


def biases_of(sizes: Sizes, product: Product) -> int:
    """Returns how many biases a product has."""
    model = sizes.run.model
    if product.section == "head":
        return int(product.name != "head" or model.family == "bert")
    return int(model.family not in WITH_RMS or (model.qkv_bias and product.name == "qkv"))


def weights_of(sizes: Sizes, choice: Choice) -> int:
    """Returns how many tensors the weight of a product consists of; rows of a grid join them."""
    return len(choice.product.parts) if choice.product.parts and sizes.choices.rows == 1 else 1


def norms_of(sizes: Sizes, product: Product) -> int:
    """Returns how many parameters the norm has whose output a product of a layer reads."""
    if product.closes or product.name == "decoder.kv":  # this one reads the encoder's output
        return 0
    return 1 if sizes.run.model.family in WITH_RMS else 2


def parameters(sizes: Sizes, shares: StageShares) -> float:
    """Returns how many parameters the layers of a rank have."""
    found = 0.0
    for choice in sizes.choices.products.values():
        product = choice.product
        if product.section != "head":
            weights = max(1, len(product.parts))
            one = weights + biases_of(sizes, product) + norms_of(sizes, product)
            found += product.count * one * shares.share_of(product)
    return found


def offloaded(sizes: Sizes, shares: StageShares) -> float:
    """Returns the launches that a rank has because moments are in the memory of its host."""
    found = parameters(sizes, shares)
    if shares.lookups > 0 or shares.head:
        found += OUTSIDE[sizes.run.model.family]
    stacks = stacks_of(sizes.run)
    n_layers = sum(share * stacks[stack] for stack, share in shares.layers)
    return found * OFFLOADED_PARAMETER + n_layers * OFFLOADED_LAYER


def vectors(sizes: Sizes, shares: StageShares) -> float:
    """Returns how many vectors of its layers have gradients that columns of devices share.

    They travel in one message, to which they are copied.
    """
    found = 0.0
    for choice in sizes.choices.products.values():
        product = choice.product
        if product.section != "head":
            biases = biases_of(sizes, product) if product.closes else 0
            one = norms_of(sizes, product) + biases
            found += product.count * one * shares.share_of(product)
    return found


def of_mode(sizes: Sizes) -> float:
    """Returns how often the mode of replicas copies each parameter in a step."""
    if sizes.run.layout.dp_mode == "zero1":
        return ZERO1_PARAMETER + ZERO1_BACKWARD
    return FSDP_PARAMETER if sizes.run.layout.dp_mode == "fsdp" else 0.0


def n_casts(sizes: Sizes, shares: StageShares) -> float:
    """Returns how many weights and biases of a rank are cast."""
    found = 0.0
    for choice in sizes.choices.products.values():
        product = choice.product
        one = weights_of(sizes, choice) + biases_of(sizes, product)
        found += one * product.count * shares.share_of(product)
    return found


def chunk(sizes: Sizes, choice: Choice, sharded: bool) -> int:
    """Returns the launches of a chunk of the loss, without products, messages and the norm.

    Args:
        sizes: Sizes of a micro-batch on one device.
        choice: The product of the head.
        sharded: Whether the logits are sharded over devices.
    """
    smoothed = sizes.run.model.label_smoothing > 0
    if sharded:
        found = LOSS_SHARDED_SMOOTHED if smoothed else LOSS_SHARDED
        found -= sizes.lies == "s"  # logits that were gathered along s are contiguous
    else:
        found = LOSS_SMOOTHED if smoothed else LOSS
    found -= 2 * (not sizes.cast)
    if sizes.choices.loss_chunks(choice) > 1:
        found += CHUNK
        if head_norm(sizes):  # gradients of the norm, which are summed
            found += 1 if sizes.run.model.family in WITH_RMS else 2
    if sizes.run.model.family == "t5":  # scales what the head reads
        found += 2
    return found + 3 * biases_of(sizes, choice.product)


def head_norm(sizes: Sizes) -> bool:
    """Whether a norm comes before the head, which is not the last norm of a post-norm layer."""
    return sizes.run.model.norm_position == "pre" or sizes.run.model.family == "bert"
