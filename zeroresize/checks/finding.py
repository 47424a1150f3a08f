"""What a check of parallel training says: a cause, where it was seen, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass

INPUTS = "inputs differ between ranks"
PARAMETERS = "parameters differ between ranks"
ACTIVATIONS = "activations differ between ranks"
DRAWS = "random draws differ between ranks"
GRADIENTS = "gradients differ between ranks"
PARTIAL = "gradient is a partial sum"
MULTIPLIED = "gradient is multiplied"
DERIVATIVE = "gradient is not the derivative"
TIE = "tie is broken"
PACKED = "packed weight is cut across its parts"
SUM = "sum is counted wrongly"
LATER = "later tokens are seen"
BACKWARDS = "backwards do not add up"
NORM = "clipping norm is not the undivided one"
UNREAD = "parameter is never read"
REFERENCE = "differs from the reference"
BATCH = "gradient depends on how the batch is divided"

#: What only a backward does.
OF_GRADIENTS = frozenset({GRADIENTS, PARTIAL, MULTIPLIED, DERIVATIVE, BACKWARDS, NORM, UNREAD})

_REMEDIES = {
    INPUTS: "give every rank of the group the same batch and mode: samplers divide over data-parallel ranks only",
    PARAMETERS: "seed the ranks alike before the model is made, or load one checkpoint on all; mark a shard of a layer "
    "of your own by tensor_model_parallel=True",
    ACTIVATIONS: "let this layer compute alike what all ranks hold, or sum or gather over the group what it divides",
    DRAWS: "draw from the generator that all ranks have seeded alike where what is drawn on is replicated",
    GRADIENTS: "sum over the group what the backward hands to replicated values: dx of a column-parallel layer",
    PARTIAL: "sum this gradient over the group, by the parameter's register_hook or before the optimizer's step",
    MULTIPLIED: "let the backward of a sum hand on dy as it is, and reduce the loss of DTensors after full_tensor()",
    DERIVATIVE: "look at what lies behind this layer; a loss with detach(), rounding or a backward of its own has "
    "such a gradient on purpose: check without it",
    TIE: "give both layers one Parameter after the model is divided, or sum both gradients before each step",
    PACKED: "cut each part of the packed weight by itself, or make a layer of each part",
    SUM: "sum the products of all ranks once, and add the whole bias once, after the sum",
    LATER: "pass is_causal or a causal mask, also where the sequence is divided or a padding mask is given",
    BACKWARDS: "sum what each backward adds, by register_hook, instead of what has accumulated",
    NORM: "clip by zeroresize.clip_grad_norm_, or count each shard on its rank and each replicated gradient once",
    UNREAD: "set requires_grad=False, or let the forward use it: copies may compute with the original's weights",
    BATCH: "let the loss be a mean over what counted() returns, and no layer read several samples, else divide nothing",
    REFERENCE: "compare this layer with the reference's: its weights, mode (train or eval) and settings",
}


@dataclass(frozen=True)
class ParallelFinding:
    """Tells of something in which parallel training differs from that of the undivided model.

    Attributes:
        cause: in fixed words, such as ``"gradient is a partial sum"``.
        parameter: its name in the model; empty where it is no parameter's.
        layer: the name of the module; empty where it is none's, or the whole model's.
        operation: what computes or draws it, such as ``"dropout"``, ``"all-reduce of y"``, ``"cross_entropy"``.
        detail: what was seen, with figures.
        remedy: what to do.
    """

    cause: str
    parameter: str
    layer: str
    operation: str
    detail: str
    remedy: str

    def __str__(self) -> str:
        where = ", ".join(filter(None, (self.parameter, self.layer, self.operation)))
        return f"{self.cause} ({where}): {self.detail}. {self.remedy}"


def finding(
    cause: str, detail: str, *, parameter: str = "", layer: str | None = None, operation: str = ""
) -> ParallelFinding:
    """Return a finding with the remedy for its cause; the layer is that of the parameter unless given."""
    of_parameter = parameter.rpartition(".")[0]
    return ParallelFinding(
        cause, parameter, of_parameter if layer is None else layer, operation, detail, _REMEDIES[cause]
    )
