"""The shapes an adapter may touch: modules in walk order, and one model's dimensions.

What it owns: `LoraModule` (the walk order every layout, table and file of images is built on) and
`ModelDims`. Invariants: `ModelDims.applies_to_layer` is the only predicate that says whether a
(layer, module) place exists; sizes, offsets, keys, packing and landing all ask it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from ...errors import ModelError


class LoraModule(IntEnum):
    """The linear modules that can carry a pair; the value is the place in the walk order.

    Later kinds (gated delta net, experts) take the values after these.
    """

    Q_PROJ = 0
    K_PROJ = 1
    V_PROJ = 2
    O_PROJ = 3
    GATE_PROJ = 4
    UP_PROJ = 5
    DOWN_PROJ = 6

    @property
    def leaf(self) -> str:
        """Name of the module in a checkpoint, e.g. ``"q_proj"``."""
        return self.name.lower()

    @property
    def parent(self) -> str:
        """Name of the block that holds it: ``"self_attn"`` or ``"mlp"``."""
        return "self_attn" if self <= LoraModule.O_PROJ else "mlp"


@dataclass(frozen=True)
class ModelDims:
    """Dimensions of one base model, as far as adapters are concerned.

    Attributes:
        num_layers: decoder layers.
        hidden: width of the residual stream.
        q_out: output width of q_proj (heads x head_dim, twice that where the gate is fused in).
        kv_out: output width of k_proj and v_proj.
        attn_in: input width of o_proj.
        intermediate: width of the feed-forward block.
        vocab: rows of the embedding matrix.
        tied: lm_head shares the embedding matrix.

    Raises:
        ModelError: bad-dims, when a width or count is not a positive integer.
    """

    num_layers: int
    hidden: int
    q_out: int
    kv_out: int
    attn_in: int
    intermediate: int
    vocab: int
    tied: bool = False

    def __post_init__(self) -> None:
        for name in (
            "num_layers",
            "hidden",
            "q_out",
            "kv_out",
            "attn_in",
            "intermediate",
            "vocab",
        ):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ModelError(
                    "a model dimension is not a positive integer",
                    code="bad-dims",
                    subject=name,
                    expected="an integer >= 1",
                    found=repr(value),
                )

    def applies_to_layer(self, layer: int, module: LoraModule) -> bool:
        """True when (layer, module) exists in this model. Dense families: every module, all layers.

        ``layer`` outside ``0..num_layers-1`` is False.
        """
        return 0 <= layer < self.num_layers and module in LoraModule

    def shape(self, module: LoraModule) -> tuple[int, int]:
        """``(out, in)`` of the module's weight, as in a checkpoint."""
        return {
            LoraModule.Q_PROJ: (self.q_out, self.hidden),
            LoraModule.K_PROJ: (self.kv_out, self.hidden),
            LoraModule.V_PROJ: (self.kv_out, self.hidden),
            LoraModule.O_PROJ: (self.hidden, self.attn_in),
            LoraModule.GATE_PROJ: (self.intermediate, self.hidden),
            LoraModule.UP_PROJ: (self.intermediate, self.hidden),
            LoraModule.DOWN_PROJ: (self.hidden, self.intermediate),
        }[module]
