"""Low-rank factors of the token matrices (embed_tokens, lm_head): is there room for them?

What it owns: nothing. PEFT trains ``E + s (B A)^T`` for an embedding (``lora_embedding_A``
``[r, vocab]``, ``lora_embedding_B`` ``[hidden, r]``) and ``W + s B A`` for lm_head, each with
factors of its own also where the base ties the two: a tied head does not follow the embedding's
factors unless ``ensure_weight_tying`` wrote them twice, transposed.

Invariant: their room is bounded (``embedding_rank``), and what does not fit is refused with the
bytes it takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ...errors import RejectError
from .config import PeftConfig
from .dims import TOKEN_MODULES, LoraModule
from .experts import named_parameter
from .keys import Key, PairKey
from .layout import SlotLayout
from .safefile import Tensor

TOKEN_LEAVES: Final = frozenset(module.leaf for module in TOKEN_MODULES)


def check_target(target: str, config: PeftConfig, layout: SlotLayout) -> None:
    """Refuse a target of the config that there is no room for.

    Raises:
        RejectError: embedding.
    """
    leaf = target.rpartition(".")[2]
    if leaf not in config.modules_to_save:  # saved whole, it has no factors
        _check_room(target[:200], config.rank(target), layout, code="embedding")


def check_factors(
    keys: Sequence[Key], tensors: Sequence[Tensor], config: PeftConfig, layout: SlotLayout
) -> frozenset[str]:
    """Refuse factors that there is no room for, or of a larger vocabulary; the leaves with some.

    Raises:
        RejectError: embedding-lora, vocab-exceeds-base.
    """
    found = set()
    for key, tensor in zip(keys, tensors, strict=True):
        if not isinstance(key, PairKey) or key.module not in TOKEN_MODULES:
            continue
        rank = config.rank(named_parameter(key, config) or key.module_name)
        _check_room(tensor.key, rank, layout, code="embedding-lora")
        axis = 1 if key.module is LoraModule.EMBED_TOKENS else 0
        wide = key.half == ("A" if axis else "B") and len(tensor.shape) == 2
        if wide and tensor.shape[axis] > layout.dims.vocab:
            raise RejectError(
                "the adapter was trained with a larger vocabulary than the base model has",
                code="vocab-exceeds-base",
                subject=tensor.key,
                expected=f"{layout.dims.vocab} tokens",
                found=tensor.shape[axis],
            )
        found.add(key.module.leaf)
    return frozenset(found)


def _check_room(subject: str, rank: int, layout: SlotLayout, *, code: str) -> None:
    room = layout.rank_of(LoraModule.EMBED_TOKENS)
    if rank <= room:
        return
    need = layout.bytes_for(TOKEN_MODULES, rank) - layout.bytes_for(TOKEN_MODULES, room)
    raise RejectError(
        "there is no room for low-rank embed_tokens and lm_head of this rank",
        code=code,
        subject=subject,
        expected=f"a max_embedding_rank of at least {rank}, which takes up to {need} bytes more of "
        "the arena",
        found=f"max_embedding_rank {room}",
    )


def follows_embedding(key: PairKey, config: PeftConfig, layout: SlotLayout) -> bool:
    """True for factors of a tied lm_head that PEFT wrote because embed_tokens is a target."""
    return (
        key.module is LoraModule.LM_HEAD
        and layout.dims.tied
        and config.ensure_weight_tying
        and any(t.rpartition(".")[2] == "embed_tokens" for t in config.target_modules or ())
    )
