"""Every option of the HTTP face, with its unit and default. Unknown options are refused."""

from __future__ import annotations

from typing import Annotated

import msgspec

_Positive = Annotated[int, msgspec.Meta(ge=1)]
_Seconds = Annotated[float, msgspec.Meta(gt=0.0)]
_Keys = tuple[Annotated[str, msgspec.Meta(min_length=8, max_length=512)], ...]


class HttpSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``model_name``: what requests call the base model. ``api_keys``: if any, ``/v1`` asks for one
    of them (an admin key will do). ``admin_keys``: adapter routes are off without any.
    ``directories``: roots that adapters may be loaded from by path; none: no path is accepted.
    ``max_body_bytes``, ``body_timeout_s``: of a request's body. ``request_timeout_s``: a generation
    that takes longer ends. ``command_timeout_s``: how long a load may keep its caller waiting.
    ``max_choices``: prompts times ``n`` of one request. ``metrics_adapters``: names that get a
    series of their own. ``ui``: whether ``/ui``, the live page, is served."""

    model_name: Annotated[str, msgspec.Meta(min_length=1, max_length=256)] = "base"
    api_keys: _Keys = ()
    admin_keys: _Keys = ()
    directories: tuple[str, ...] = ()
    max_body_bytes: _Positive = 8 << 20
    body_timeout_s: _Seconds = 30.0
    request_timeout_s: _Seconds = 3600.0
    command_timeout_s: _Seconds = 600.0
    max_choices: _Positive = 64
    metrics_adapters: Annotated[int, msgspec.Meta(ge=0)] = 64
    ui: bool = True
