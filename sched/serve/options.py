"""Every option of ``rota serve``: one name for the flag (``--max-loras``) and the key of the TOML
file (``max_loras``).

Owns the reading of both and their merging: a flag goes before the file, the file before the
default. Invariants: an unknown key, a wrong type or an option that has no meaning in this mode is
refused by name before anything starts.
"""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import msgspec.inspect

from ...errors import CommandError, RequestError
from ...rdma.address import SCHEME, parse_peer_url
from ..config import EngineConfig
from ..web.settings import HttpSettings

_MAX_FILE = 1 << 20


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What ``rota serve`` itself needs. ``model``: checkpoint directory, or ``connect``: address of
    an engine process. ``adapters``: name to directory or ``peer://host:port/id``, loaded at start;
    ``stageable``: known names that load on the first request. ``peer_secret_file``: what weight
    peers are shown; ``peer_arena_bytes``: registered memory for RDMA reads from them, with the
    devices of ``peer_rdma_devices`` (`rdma.devices.parse_devices`). ``tls_cert``, ``tls_key``: PEM
    files, both or neither. ``traces``: an OTLP/HTTP endpoint. ``share_port``: other processes that
    say so too may listen on the same port, and the kernel shares out the connections. ``ipc``:
    address for frontends, with ``ipc_token`` on TCP."""

    model: str | None = None
    connect: str | None = None
    adapters: dict[str, str] = {}
    stageable: dict[str, str] = {}
    peer_secret_file: str | None = None
    peer_arena_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0
    peer_rdma_devices: str | None = None
    http: bool = True
    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 8000
    ipc: str | None = None
    ipc_token: str | None = None
    threads: Annotated[int, msgspec.Meta(ge=1, le=1024)] | None = None
    share_port: bool = False
    keep_alive_s: Annotated[int, msgspec.Meta(ge=1)] = 75
    header_timeout_s: Annotated[float, msgspec.Meta(gt=0.0)] = 30.0
    max_header_bytes: Annotated[int, msgspec.Meta(ge=1024)] = 64 << 10
    max_connections: Annotated[int, msgspec.Meta(ge=1)] = 4096
    tls_cert: str | None = None
    tls_key: str | None = None
    traces: str | None = None
    log_level: Literal["debug", "info", "warning", "error"] = "info"


class Options(msgspec.Struct, frozen=True):
    """The three groups, checked. ``engine``: only what was given, for :class:`Engine`."""

    serve: ServeConfig
    http: HttpSettings
    engine: dict[str, Any]


#: Help of each flag; a field without a line here is a mistake (a test says so).
HELP: dict[str, str] = {
    "connect": "serve an engine process at this address instead of a model of our own",
    "adapters": "a directory or peer://HOST:PORT/ID: load this adapter at start (repeat)",
    "stageable": "the same, but only known: the first request for it loads it (repeat)",
    "peer_secret_file": "file with the secret that weight peers and this engine share",
    "peer_arena_bytes": "memory registered for RDMA reads from weight peers; 0: by TCP",
    "peer_rdma_devices": "verbs devices for it, NAME[:GID],...; default the first active one",
    "http": "whether to serve HTTP at all (true or false)",
    "host": "address to listen on",
    "port": "port to listen on; 0 picks a free one",
    "share_port": "whether several frontends may listen on this port (true or false)",
    "ipc": "also serve frontends here: unix:PATH, or HOST:PORT with --ipc-token",
    "ipc_token": "secret of frontends; better in the file than on the command line",
    "threads": "CPU threads of the base model; with 1, bf16 uses matrix tiles where there are any",
    "keep_alive_s": "seconds an idle HTTP connection is kept",
    "header_timeout_s": "seconds a request's headers may take to arrive",
    "max_header_bytes": "bytes of one request's headers",
    "max_connections": "HTTP connections at a time; more get 503",
    "tls_cert": "PEM file of the certificate chain: serve HTTPS",
    "tls_key": "PEM file of the certificate's private key",
    "traces": "OTLP/HTTP collector that gets a span of every request and adapter command",
    "log_level": "debug, info, warning or error",
    "model_name": "what requests call the base model (default: the directory's name)",
    "api_keys": "a key for /v1 (repeat); none: everybody may ask",
    "admin_keys": "a key for adapter routes (repeat); none: those routes are off",
    "directories": "a root that adapters may be loaded from by path (repeat); none: none",
    "max_body_bytes": "bytes of one request's body",
    "body_timeout_s": "seconds a body may take to arrive",
    "request_timeout_s": "seconds a generation may take",
    "command_timeout_s": "seconds a load may keep its caller waiting",
    "max_choices": "prompts times n of one request",
    "metrics_adapters": "adapter names that get metric series of their own",
    "ui": "whether to serve /ui, the live page (true or false)",
    "max_loras": "slots: adapters on the device at once (0: LoRA off)",
    "max_lora_rank": "the largest adapter rank",
    "overlay_rows": "embedding and head rows an adapter may replace",
    "affine": "whether slots have room for DoRA and biases (true or false)",
    "expert_adapters": "whether adapters of routed experts are served (true or false)",
    "max_expert_rank": "the largest rank of routed experts (0: as max_lora_rank)",
    "max_embedding_rank": "the largest rank of embed_tokens and lm_head (0: not served)",
    "adapter_arena_bytes": "bytes for experts, token matrices and replaced rows of all adapters",
    "device": "auto, cpu or cuda",
    "dtype": "auto, bfloat16 or float32",
    "attention": "how a GPU attends: auto, torch, torch-varlen or flashinfer",
    "kv_bytes": "bytes of KV memory (default: from what is free)",
    "max_running": "sequences in steps at once",
    "max_waiting": "requests that may wait; more are refused with QUEUE_FULL",
    "max_step_tokens": "tokens of one step when nothing decodes",
    "mixed_step_tokens": "tokens of one step when something decodes; bounds the gap between tokens",
    "step_depth": "steps in flight at once, 1 or 2 (default: 1 on the host, 2 on an accelerator)",
    "prefix_cache": "whether requests that begin alike share KV memory (true or false)",
    "state_snapshots": "copies of recurrent states kept for requests that begin alike",
    "snapshot_tokens": "tokens between two of them in a long prompt",
    "spill_bytes": "host memory for KV and states of preempted requests (0: they are recomputed)",
    "spill_bytes_per_token": "KV bytes copied out and back in the time to recompute one token",
    "drain_after_s": "seconds an adapter waits for a slot before a busy one is drained",
    "image_cache_bytes": "host memory for staged adapters",
    "stage_workers": "adapters staged at once",
    "pin_adapters": "whether start-up adapters stay on the device (true or false)",
    "close_timeout_s": "seconds an orderly end may take",
    "use_numba": "whether CPU kernels are compiled (true or false)",
    "seed": "of draws of requests that bring no seed",
}
_PAIRS = ("adapters", "stageable")
_OWN = (
    *_PAIRS,
    "peer_secret_file",
    "peer_arena_bytes",
    "peer_rdma_devices",
)  # of no use to a frontend
_LISTS = ("api_keys", "admin_keys", "directories")
_FLAGS = {
    "adapters": "--lora-adapter",
    "stageable": "--lora-stageable",
    "api_keys": "--api-key",
    "admin_keys": "--admin-key",
    "directories": "--directory",
}


def add_flags(parser: argparse.ArgumentParser, *, offer: bool = False) -> None:
    """One flag for each option, in three groups. Values stay text until :func:`read_options`.
    ``offer``: say which values there are where they are few, for tab completion; not to parse by,
    since a wrong value is refused by its code."""
    for title, kind in (
        ("serving", ServeConfig),
        ("HTTP", HttpSettings),
        ("engine", EngineConfig),
    ):
        group = parser.add_argument_group(title)
        values = _few_values(kind) if offer else {}
        for name in kind.__struct_fields__:
            if name == "model":
                continue
            repeat = name in _PAIRS or name in _LISTS
            group.add_argument(
                _FLAGS.get(name, "--" + name.replace("_", "-")),
                dest=name,
                default=None,
                action="append" if repeat else "store",
                choices=values.get(name),
                metavar="NAME=SOURCE" if name in _PAIRS else _metavar(name),
                help=HELP[name],
            )


def _few_values(kind: type[msgspec.Struct]) -> dict[str, tuple[str, ...]]:
    """The fields that take one of a few words, and those."""
    few: dict[str, tuple[str, ...]] = {}
    info = msgspec.inspect.type_info(kind)
    assert isinstance(info, msgspec.inspect.StructType)
    for field in info.fields:
        match field.type:
            case msgspec.inspect.LiteralType(values=values):
                few[field.name] = tuple(map(str, values))
            case msgspec.inspect.BoolType():
                few[field.name] = ("true", "false")
    return few


def _metavar(name: str) -> str:
    """What a flag's value is called in its help: the flag's own name, or the unit at its end."""
    for unit, word in (("_s", "SECONDS"), ("_bytes", "BYTES")):
        if name.endswith(unit):
            return word
    return _FLAGS.get(name, name).removeprefix("--").replace("-", "_").upper()


def read_options(args: argparse.Namespace) -> Options:
    """Merge file and flags.

    Raises:
        CommandError: ``bad-config-file``, ``unknown-option``, ``bad-option``, ``no-model``,
            ``option-not-here``.
    """
    given = _file(args.config) if args.config is not None else {}
    for name in _names():
        value = getattr(args, name, None)
        if value is not None:
            given[name] = _pairs(name, value) if name in _PAIRS else value
    unknown = sorted(given.keys() - _names())
    if unknown:
        raise CommandError("no such option", code="unknown-option", subject=unknown[0])
    serve = _group(given, ServeConfig)
    if (serve.model is None) == (serve.connect is None):
        raise CommandError(
            "serve a model directory, or --connect to an engine process",
            code="no-model",
            expected="one of the two",
        )
    if (serve.tls_cert is None) != (serve.tls_key is None):
        raise CommandError(
            "TLS needs a certificate and its key",
            code="bad-option",
            subject="tls_key" if serve.tls_key is None else "tls_cert",
            expected="both or neither",
        )
    engine = {n: given[n] for n in EngineConfig.__struct_fields__ if n in given}
    extra = next(iter([*engine, *(n for n in _OWN if getattr(serve, n))]), None)
    if serve.connect is not None and extra is not None:
        raise CommandError(
            "the engine process has its own options", code="option-not-here", subject=extra
        )
    for name in _PAIRS:
        for key, text in getattr(serve, name).items():
            _check_source(f"{_FLAGS[name]} {key}", text)
    if "model_name" not in given and serve.model is not None:
        given["model_name"] = Path(serve.model).resolve().name or "base"
    checked = _group(engine, EngineConfig)
    return Options(
        serve, _group(given, HttpSettings), {name: getattr(checked, name) for name in engine}
    )


def _names() -> set[str]:
    kinds = (ServeConfig, HttpSettings, EngineConfig)
    return {name for kind in kinds for name in kind.__struct_fields__}


def _group(given: Mapping[str, Any], kind: Any) -> Any:
    mine = {name: given[name] for name in kind.__struct_fields__ if name in given}
    try:
        # Not strict: flags are text; a file's values keep their types and must fit as well.
        return msgspec.convert(mine, kind, strict=False)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$.")
        raise CommandError(
            f"an option has a wrong value: {text}",
            code="bad-option",
            subject=path.rstrip("`") or None,
        ) from error


def _pairs(name: str, values: list[str]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for value in values:
        key, equals, path = value.partition("=")
        if not (key and equals and path) or key in pairs:
            raise CommandError(
                "not a new NAME=SOURCE", code="bad-option", subject=_FLAGS[name], found=value
            )
        pairs[key] = path
    return pairs


def _check_source(subject: str, text: str) -> None:
    """Refuse a peer's address that cannot be right now, not at the first request for it."""
    if text.startswith(SCHEME):
        try:
            parse_peer_url(text)
        except RequestError as error:
            raise CommandError(
                error.message,
                code="bad-option",
                subject=subject,
                expected=error.expected,
                found=text,
            ) from error


def _file(path: Path) -> dict[str, Any]:
    try:
        data = path.read_bytes()
        if len(data) > _MAX_FILE:
            raise ValueError(f"more than {_MAX_FILE} bytes")
        return tomllib.loads(data.decode())
    except (OSError, ValueError) as error:  # TOMLDecodeError and UnicodeDecodeError are ValueErrors
        raise CommandError(
            "the configuration file cannot be read",
            code="bad-config-file",
            subject=str(path),
            found=error,
        ) from error
