"""The shapes an adapter may touch: modules in walk order, and one model's dimensions.

What it owns: `LoraModule` (the walk order every layout, table and file of images is built on) and
`ModelDims`. Invariants: `ModelDims.applies_to_layer` is the only predicate that says whether a
(layer, module) place exists; sizes, offsets, keys, packing and landing all ask it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

from ...errors import ModelError


class LoraModule(IntEnum):
    """The linear modules that can carry a pair; the value is the place in the walk order."""

    Q_PROJ = 0
    K_PROJ = 1
    V_PROJ = 2
    O_PROJ = 3
    GATE_PROJ = 4
    UP_PROJ = 5
    DOWN_PROJ = 6
    OUT_PROJ = 7
    IN_PROJ_QKV = 8
    IN_PROJ_Z = 9
    IN_PROJ_B = 10
    IN_PROJ_A = 11
    ROUTER = 12
    SHARED_GATE_PROJ = 13
    SHARED_UP_PROJ = 14
    SHARED_DOWN_PROJ = 15
    SHARED_EXPERT_GATE = 16
    EXPERT_GATE_PROJ = 17
    EXPERT_UP_PROJ = 18
    EXPERT_DOWN_PROJ = 19
    EMBED_TOKENS = 20
    LM_HEAD = 21

    @property
    def label(self) -> str:
        """A name no other module has, for reports: ``"q_proj"``, ``"shared_up_proj"``."""
        return self.name.lower()

    @property
    def parent(self) -> str:
        """Path of the block that holds it inside a layer, e.g. ``"self_attn"``."""
        if self in _ATTENTION:
            return "self_attn"
        if self in _DELTA_NET:
            return "linear_attn"
        if self in EXPERT_MODULES:
            return "mlp.experts"
        if self in TOKEN_MODULES:
            return ""
        return "mlp.shared_expert" if self in _SHARED else "mlp"

    @property
    def leaf(self) -> str:
        """Name of the module in a checkpoint, e.g. ``"q_proj"``; shared by some modules."""
        if self is LoraModule.ROUTER:
            return "gate"
        if self in EXPERT_MODULES:
            return self.label.removeprefix("expert_")
        return self.label.removeprefix("shared_") if self in _SHARED else self.label

    @property
    def path(self) -> str:
        """Dotted path inside a layer, e.g. ``"mlp.shared_expert.up_proj"``.

        Of an expert's module without the expert's number; of a token matrix its name alone.
        """
        return f"{self.parent}.{self.leaf}" if self.parent else self.leaf


_M = LoraModule
_ATTENTION = frozenset((_M.Q_PROJ, _M.K_PROJ, _M.V_PROJ, _M.O_PROJ))
_DENSE = frozenset((_M.GATE_PROJ, _M.UP_PROJ, _M.DOWN_PROJ))
_DELTA_NET = frozenset(
    (_M.OUT_PROJ, _M.IN_PROJ_QKV, _M.IN_PROJ_Z, _M.IN_PROJ_B, _M.IN_PROJ_A),
)
EXPERT_MODULES = frozenset((_M.EXPERT_GATE_PROJ, _M.EXPERT_UP_PROJ, _M.EXPERT_DOWN_PROJ))
_SHARED = frozenset((_M.SHARED_GATE_PROJ, _M.SHARED_UP_PROJ, _M.SHARED_DOWN_PROJ))
TOKEN_MODULES = (_M.EMBED_TOKENS, _M.LM_HEAD)
"""The matrices over the vocabulary: of no layer, in walk order. A pair of EMBED_TOKENS is one of
the transposed embedding, ``[hidden, vocab]`` (as PEFT's lora_embedding_A and _B are shaped)."""


@dataclass(frozen=True)
class ModelDims:
    """Dimensions of one base model, as far as adapters are concerned.

    Attributes:
        num_layers: decoder layers.
        hidden: width of the residual stream.
        q_out: output width of q_proj (heads x head_dim, twice that where the gate is fused in).
        kv_out: output width of k_proj and v_proj.
        attn_in: input width of o_proj.
        intermediate: width of the dense feed-forward block; 0 where experts replace it.
        vocab: rows of the embedding matrix.
        tied: lm_head shares the embedding matrix.
        linear_layers: layers with a gated delta net instead of attention, ascending.
        gdn_channels: output width of in_proj_qkv.
        gdn_value: output width of in_proj_z, input width of out_proj.
        gdn_heads: output width of in_proj_b and in_proj_a.
        experts: routed experts of every layer; 0 in dense models.
        expert_inner, shared_inner: feed-forward width of a routed and of the shared expert.
        expert_adapters: slots have room for pairs of every routed expert.
        gdn_groups: key heads by which a checkpoint with in_proj_qkvz and in_proj_ba groups their
            rows (`fused.grouped_rows`); 0 where qkv, z, b and a are apart.

    Raises:
        ModelError: bad-dims, when a width or count is not an integer in its range.
    """

    num_layers: int
    hidden: int
    q_out: int
    kv_out: int
    attn_in: int
    intermediate: int
    vocab: int
    tied: bool = False
    linear_layers: tuple[int, ...] = ()
    gdn_channels: int = 0
    gdn_value: int = 0
    gdn_heads: int = 0
    experts: int = 0
    expert_inner: int = 0
    shared_inner: int = 0
    expert_adapters: bool = False
    gdn_groups: int = 0

    def __post_init__(self) -> None:
        always = ("num_layers", "hidden", "q_out", "kv_out", "attn_in", "vocab")
        dense = ("intermediate",)
        linear = ("gdn_channels", "gdn_value", "gdn_heads")
        moe = ("experts", "expert_inner", "shared_inner")
        needed = {*always, *(moe if self.experts else dense)}
        if self.linear_layers:
            needed |= {*linear}
        for name in (*always, *dense, *linear, *moe):
            value, least = getattr(self, name), int(name in needed)
            if type(value) is not int or value < least or (value and name not in needed):
                raise self._bad(name, f"an integer >= {least}" if least else "0", value)
        groups, heads = self.gdn_groups, self.gdn_heads
        if type(groups) is not int or groups < 0 or (groups and heads % groups):
            raise self._bad("gdn_groups", f"0 or a divisor of {heads}", groups)
        if type(self.expert_adapters) is not bool or (self.expert_adapters and not self.experts):
            raise self._bad(
                "expert_adapters", "a flag of models with experts", self.expert_adapters
            )
        layers = self.linear_layers
        plain = type(layers) is tuple and all(type(layer) is int for layer in layers)
        if not plain or any(
            not low < layer < self.num_layers
            for low, layer in zip((-1, *layers), layers, strict=False)
        ):
            raise self._bad("linear_layers", "ascending layer numbers", layers)

    @staticmethod
    def _bad(name: str, expected: str, found: object) -> ModelError:
        return ModelError(
            "a model dimension is out of range",
            code="bad-dims",
            subject=name,
            expected=expected,
            found=repr(found)[:200],
        )

    @cached_property
    def _linear(self) -> frozenset[int]:
        return frozenset(self.linear_layers)

    def applies_to_layer(self, layer: int, module: LoraModule) -> bool:
        """True when (layer, module) exists in this model.

        Attention modules exist where the layer attends, delta net modules where it does not; the
        dense feed-forward modules in models without experts, the others in models with them.
        ``layer`` outside ``0..num_layers-1`` is False.
        """
        if not 0 <= layer < self.num_layers or module in TOKEN_MODULES:
            return False
        if module in _ATTENTION or module in _DELTA_NET:
            return (layer in self._linear) == (module in _DELTA_NET)
        if module in EXPERT_MODULES:
            return self.expert_adapters
        return (self.experts == 0) == (module in _DENSE)

    def places(self, module: LoraModule) -> int:
        """How many pairs one layer has of ``module``: one, or one an expert."""
        return self.experts if module in EXPERT_MODULES else 1

    @cached_property
    def modules(self) -> tuple[LoraModule, ...]:
        """The modules that exist in at least one layer, in walk order."""
        attends = next((n for n in range(self.num_layers) if n not in self._linear), None)
        # Layers of one kind have the same modules: one of each will do.
        kinds = [layer for layer in (attends, *self.linear_layers[:1]) if layer is not None]
        return tuple(m for m in _M if any(self.applies_to_layer(layer, m) for layer in kinds))

    def shape(self, module: LoraModule) -> tuple[int, int]:
        """``(out, in)`` of the module's weight, as in a checkpoint (but see `TOKEN_MODULES`)."""
        return {
            _M.Q_PROJ: (self.q_out, self.hidden),
            _M.K_PROJ: (self.kv_out, self.hidden),
            _M.V_PROJ: (self.kv_out, self.hidden),
            _M.O_PROJ: (self.hidden, self.attn_in),
            _M.GATE_PROJ: (self.intermediate, self.hidden),
            _M.UP_PROJ: (self.intermediate, self.hidden),
            _M.DOWN_PROJ: (self.hidden, self.intermediate),
            _M.OUT_PROJ: (self.hidden, self.gdn_value),
            _M.IN_PROJ_QKV: (self.gdn_channels, self.hidden),
            _M.IN_PROJ_Z: (self.gdn_value, self.hidden),
            _M.IN_PROJ_B: (self.gdn_heads, self.hidden),
            _M.IN_PROJ_A: (self.gdn_heads, self.hidden),
            _M.ROUTER: (self.experts, self.hidden),
            _M.SHARED_GATE_PROJ: (self.shared_inner, self.hidden),
            _M.SHARED_UP_PROJ: (self.shared_inner, self.hidden),
            _M.SHARED_DOWN_PROJ: (self.hidden, self.shared_inner),
            _M.SHARED_EXPERT_GATE: (1, self.hidden),
            _M.EXPERT_GATE_PROJ: (self.expert_inner, self.hidden),
            _M.EXPERT_UP_PROJ: (self.expert_inner, self.hidden),
            _M.EXPERT_DOWN_PROJ: (self.hidden, self.expert_inner),
            _M.EMBED_TOKENS: (self.hidden, self.vocab),
            _M.LM_HEAD: (self.vocab, self.hidden),
        }[module]
