"""What requests may say: OpenAI's fields, vLLM's sampling extras, and what is refused.

Owns the request structs and their reading into sampling parameters. Invariant: a field is honoured,
declared neutral (it cannot change an answer), or refused by name; nothing is ignored in silence.
Source of the fields: OpenAI's API reference for chat completions and completions.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ...errors import RequestError
from ...gpu.model.params import MAX_SAMPLES, SamplingParams
from ..face import DEFAULT, Default
from .failures import ParamError

_MASK = (1 << 64) - 1
#: Fields that go to the sampler under their own names.
_AS_THEY_ARE = (
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "ignore_eos",
)
_MAX_LOGPROBS = 20


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class _Common(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    adapter: str | msgspec.UnsetType | None = msgspec.UNSET
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    # vLLM's extras
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    priority: int | None = None
    # neutral: they cannot change an answer
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    # refused unless they ask for nothing
    logit_bias: Any = None


class ChatRequest(_Common, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of ``/v1/chat/completions``."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    parallel_tool_calls: Any = None
    response_format: Any = None
    modalities: Any = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None


class CompletionRequest(_Common, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of ``/v1/completions``."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None


_REFUSED = (
    "logit_bias tools functions audio prediction reasoning_effort verbosity web_search_options "
    "suffix"
).split()


def refuse_unsupported(body: _Common) -> None:
    """Raises ParamError ``unsupported-parameter`` for what would change the answer and cannot be
    done here."""
    for name in _REFUSED:
        if getattr(body, name, None):
            raise _unsupported(name)
    if isinstance(body, ChatRequest):
        if body.response_format not in (None, {"type": "text"}):
            raise _unsupported("response_format")
        if body.modalities not in (None, ["text"]):
            raise _unsupported("modalities")
        for name in ("tool_choice", "function_call"):
            if getattr(body, name) not in (None, "none", "auto"):
                raise _unsupported(name)
    elif isinstance(body, CompletionRequest):
        if body.echo:
            raise _unsupported("echo")
        if body.best_of is not None and body.best_of != (body.n or 1):
            raise _unsupported("best_of")


def _unsupported(name: str) -> ParamError:
    return ParamError(
        f"{name} is not supported", param=name, code="unsupported-parameter", expected="absent"
    )


def adapter_of(body: _Common, model_name: str) -> str | Default | None:
    """Whose turn it is: ``adapter`` first (``null``: base), else ``model``; base by its own name;
    the default adapter when neither is there."""
    if not isinstance(body.adapter, msgspec.UnsetType):
        return body.adapter
    if not body.model:
        return DEFAULT
    return None if body.model == model_name else body.model


def wants_usage(body: _Common) -> bool:
    return bool(body.stream_options and body.stream_options.include_usage)


def choices_of(body: _Common, prompts: int, most: int) -> int:
    """``n``, checked. Raises ParamError ``bad-n``."""
    n = 1 if body.n is None else body.n
    if not 1 <= n <= MAX_SAMPLES or n * prompts > most:
        raise ParamError(
            "too many choices", param="n", code="bad-n", expected=f"1 to {most} in all", found=n
        )
    return n


def logprobs_of(body: _Common) -> int | None:
    """How many alternatives to report, or ``None``. Raises ParamError ``bad-logprobs``."""
    if isinstance(body, ChatRequest):
        if not body.logprobs:
            if body.top_logprobs:
                raise ParamError(
                    "top_logprobs needs logprobs", param="top_logprobs", code="bad-logprobs"
                )
            return None
        wanted, param = body.top_logprobs or 0, "top_logprobs"
    elif isinstance(body, CompletionRequest) and body.logprobs is not None:
        wanted, param = body.logprobs, "logprobs"
    else:
        return None
    if not 0 <= wanted <= _MAX_LOGPROBS:
        raise ParamError(
            "too many alternatives",
            param=param,
            code="bad-logprobs",
            expected=f"0 to {_MAX_LOGPROBS}",
            found=wanted,
        )
    return wanted


def sampling_of(body: _Common, n: int, room: int) -> SamplingParams:
    """Sampling parameters of ``n`` samples; ``room``: tokens the context leaves after the prompt.

    Temperature is 1 unless said otherwise, as in OpenAI's API; chats may use all the room, plain
    completions make 16 tokens. Raises RequestError with the sampler's own codes.
    """
    most: int | None = body.max_tokens
    if isinstance(body, ChatRequest):
        if body.max_completion_tokens is not None:
            most = body.max_completion_tokens
        most = max(1, room) if most is None else most
    elif most is None:
        most = 16
    given: dict[str, Any] = {
        "max_tokens": most,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "logprobs": logprobs_of(body),
        "n": n,
    }
    if body.stop is not None:
        given["stop"] = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
    if body.stop_token_ids is not None:
        given["stop_token_ids"] = tuple(body.stop_token_ids)
    if body.seed is not None:
        given["seed"] = body.seed & _MASK
    for name in _AS_THEY_ARE:
        value = getattr(body, name)
        if value is not None:
            given[name] = value
    try:
        return SamplingParams(**given)
    except RequestError as error:
        param = error.code.removeprefix("bad-").replace("-", "_")
        raise ParamError(
            error.message,
            param=param if param in given else None,
            code=error.code,
            expected=error.expected,
            found=error.found,
        ) from error


# adapter routes ---------------------------------------------------------------------------------
class LoadLoraAdapter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's ``/v1/load_lora_adapter``."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False
    base_model_name: str | None = None
    is_3d_lora_weight: bool | None = None


class UnloadLoraAdapter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's ``/v1/unload_lora_adapter``."""

    lora_name: str
    lora_int_id: int | None = None


class LoadBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``/v1/lora/load``, ``register``, ``replace``; ``slot``: into this very slot."""

    name: str
    path: str
    slot: int | None = None
    pin: bool = False


class NameBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``/v1/lora/pin``, ``unpin``; with ``path``: ``promote``, ``prefetch`` of a new name."""

    name: str
    path: str | None = None


class SwapBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``/v1/lora/swap``: into this very slot; without ``path``, from where the name came from."""

    name: str
    slot: int
    path: str | None = None


class UnloadBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``/v1/lora/unload``."""

    name: str
    deadline_s: float = 30.0
    cancel_late: bool = False


class ResizeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``/v1/lora/resize``: the pool; ``null`` leaves a number as it is."""

    max_loras: int | None = None
    max_lora_rank: int | None = None
    deadline_s: float = 30.0


class ActiveBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``/v1/lora/active``: the default adapter, ``null`` for base."""

    adapter: str | None
