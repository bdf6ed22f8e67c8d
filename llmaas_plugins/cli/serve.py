"""``llmaas serve``: llama_cpp.server with persistent contexts."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from socket import socket
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn, cast

from llmaas_hooks import ConfigError
from llmaas_hooks.discovery import suggest
from llmaas_plugins.cli.doctor.resources import say_problems
from llmaas_plugins.cli.models import check_file, context_length
from llmaas_plugins.cli.options import add_config_option, unrecognized
from llmaas_plugins.cli.output import size_text
from llmaas_plugins.config import (
    CloudConfig,
    Config,
    PluginTable,
    ServiceConfig,
    load_config,
    validated,
)
from llmaas_plugins.machine import total_bytes

if TYPE_CHECKING:
    from llmaas_plugins.server.admission import Admission
    from llmaas_plugins.server.gateway import Gateway, Keep
    from llmaas_plugins.server.metrics import Metrics

__all__ = ["add_parser"]

_log = logging.getLogger("llmaas.cli")

_OPEN = (
    "everyone who reaches %s may use the service and read its contexts, because it has no keys. "
    "`--api_key KEY` sets one, and service.key_file one for each app."
)
_LARGEST = 1e9
_MOST_INT = {"seed": (1 << 32) - 1, "cache_size": (1 << 63) - 1}
"""Largest integers of the options that take more than 31 bits."""


class _Parser(argparse.ArgumentParser):
    """Parser with one-line errors: the usage of llama_cpp.server's options is a page long."""

    def error(self, message: str) -> NoReturn:
        """Raise the message as a ``ConfigError``."""
        end = "" if message.endswith("?") else "."
        raise ConfigError(f"{message}{end} `llmaas serve --server-help` lists the options.")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the sub-command."""
    parser = subparsers.add_parser(
        "serve",
        help="serve persistent contexts and the OpenAI API over HTTP or a Unix socket",
        description="Run llama_cpp.server with the configured plugins (kv_chunks if none is "
        "configured) and the additional routes /v1/llmaas/….",
        epilog="All other options are llama_cpp.server's own: --model, --n_ctx, --host, --port, "
        "--api_key, …; `llmaas serve --server-help` lists them. Defaults that differ: "
        "--interrupt_requests False, --logits_all False (logprobs need True), --verbose False "
        "(True with `llmaas -v serve`), --flash_attn True if --type_v is quantized, and with "
        "--toy, --n_ctx as long as the model's training.",
    )
    add_config_option(parser)
    parser.add_argument(
        "--uds", type=Path, help="listen on this Unix socket, in a directory of mode 0700"
    )
    parser.add_argument(
        "--toy",
        action="store_true",
        help="serve the packaged reference model, for trying things out",
    )
    parser.add_argument(
        "--server-help", action="store_true", help="list llama_cpp.server's options"
    )
    parser.set_defaults(func=serve, takes_rest=True)


def serve(args: argparse.Namespace, rest: list[str]) -> int:
    """Run the server until it is stopped."""
    try:
        from llmaas_plugins.server.application import make_application
        from llmaas_plugins.server.http_server import Server
    except ImportError as error:
        raise ConfigError(
            f"{error.name} is not installed. Try `pip install 'llmaas-plugins[server]'`."
        ) from error
    from llmaas_patches.internals import server_engine
    from llmaas_plugins.activation import activate
    from llmaas_plugins.server.api_keys import ApiKeys, read_key_file
    from llmaas_plugins.server.grammars import Grammars
    from llmaas_plugins.server.listening import tls_context
    from llmaas_plugins.server.metrics import Metrics
    from llmaas_plugins.server.origins import OriginCheck
    from llmaas_plugins.server.shutdown import Shutdown
    from llmaas_plugins.service.service import LLMService

    server_settings, model_settings = _settings(args, rest)
    config = load_config(args.config).with_default("kv_chunks")  # a service should keep contexts
    limits = config.service
    app_keys = read_key_file(limits.key_file)
    keys = ApiKeys(server_settings.api_key, app_keys)
    host = server_settings.host if args.uds is None else None
    tls = tls_context(server_settings.ssl_keyfile, server_settings.ssl_certfile)
    origins = OriginCheck(host, limits.allowed_hosts, limits.allowed_origins)
    if keys.is_open and not origins.is_local:
        _log.warning(_OPEN, host)
    admission = _admission(limits, model_settings)
    metrics = Metrics(admission)
    gateway = _gateway(config, app_keys, metrics)
    with (
        Shutdown(limits.shutdown_grace_s) as shutdown,
        _listening(args.uds, server_settings) as sockets,
        activate(config, {"llmaas.admission": admission, "llmaas.metrics": metrics}) as suite,
    ):
        metrics.read_plugins(suite.status)
        say_problems(config)  # before this process opens the store to finish earlier deletions
        with (
            LLMService(server_engine, limits, is_admitted=True) as service,
            contextlib.closing(Grammars(server_engine)) as grammars,
        ):
            checks = {"admission": admission, "keys": keys, "origins": origins, "metrics": metrics}
            checks["gateway"] = gateway
            app = make_application(server_settings, model_settings, service, grammars, checks)
            server = Server(app, admission, keys, limits, tls=tls)
            shutdown.ask(server.handle_exit)
            server.run(sockets)
    return 0


def _admission(limits: ServiceConfig, model_settings: Any) -> Admission:
    """Return the admission of calls: one at a time, or several together."""
    from llmaas_plugins.server.admission import Admission
    from llmaas_plugins.server.together import Together

    if limits.most_together == 1:
        return Admission(limits)
    against = [name for name in ("logits_all", "draft_model") if getattr(model_settings, name)]
    reason = f"--{against[0]} needs the outputs of whole batches" if against else None
    return Together(limits, reason)


def _gateway(config: Config, app_keys: Mapping[str, str], metrics: Metrics) -> Gateway | None:
    """Return the gateway to the configured cloud, which ``metrics`` counts; None without one.

    Raises:
        ConfigError: The key is not set, or an app's table could have no effect.
    """
    from llmaas_plugins.server.cloud_client import CloudClient, cloud_key
    from llmaas_plugins.server.gateway import Gateway

    cloud = config.cloud
    if cloud is None:
        return None
    if unknown := sorted(cloud.apps.keys() - app_keys.keys()):
        hint = suggest(unknown[0], app_keys)
        raise ConfigError(
            f"cloud.apps.{unknown[0]}: there is no such app in service.key_file.{hint} Apps are "
            f"known by their keys. Known: {', '.join(app_keys) or 'none'}."
        )
    client = CloudClient(cloud, cloud_key(cloud, os.environ))
    gateway = Gateway(cloud, client, _keeper(config, cloud))
    metrics.read_cloud(gateway.counts)
    return gateway


def _keeper(config: Config, cloud: CloudConfig) -> Keep:
    """Return a function that puts a conversation of an app into the datastore's inbox.

    Raises:
        ConfigError: An app agrees to that, but there is no datastore.
    """
    from llmaas_plugins.knn_lm.build.inbox import remember
    from llmaas_plugins.knn_lm.config import KnnLMConfig

    table = config.plugins.get("knn_lm", PluginTable(False, {}, {}))
    if not table.enabled and (keeping := [name for name, app in cloud.apps.items() if app.keep]):
        raise ConfigError(
            f"cloud.apps.{keeping[0]}.keep needs the datastore, but knn_lm is off. Add a table "
            "[plugins.knn_lm] with learn = true, or remove keep."
        )
    store = cast("KnnLMConfig", validated("knn_lm", KnnLMConfig, table)).store
    return lambda app, said: remember(store, said, app=app)


def _listening(uds: Path | None, server_settings: Any) -> AbstractContextManager[list[socket]]:
    """Open the sockets that the options ask for."""
    from llmaas_plugins.server import listening

    if uds is not None:
        return listening.listening_on(uds)
    return listening.listening_on_port(server_settings.host, server_settings.port)


def _settings(args: argparse.Namespace, rest: list[str]) -> tuple[Any, Any]:
    """Parse llama_cpp.server's own options, with defaults that suit a service."""
    from llama_cpp.server.cli import add_args_from_model
    from llama_cpp.server.settings import Settings

    from llmaas_plugins.server.engine_options import check_model_options, parse_settings

    parser = _Parser(prog="llmaas serve", allow_abbrev=False)
    add_args_from_model(parser, Settings)
    # one app must not cut another's reply short; n_ctx rows of logits take a lot of memory
    parser.set_defaults(interrupt_requests=False, logits_all=False, flash_attn=None)
    parser.set_defaults(verbose=bool(args.verbose))
    if args.toy:
        parser.set_defaults(n_ctx=0)  # the length that the model was trained for
    if args.server_help:
        parser.print_help()
        sys.exit(0)
    if "CONFIG_FILE" in os.environ:
        raise ConfigError(
            "CONFIG_FILE is set, but `llmaas serve` does not read it. Unset it, and pass its "
            "settings as options."
        )
    values, unknown = parser.parse_known_args(rest)
    if unknown:
        hint = f". Did you mean '--model {unknown[0]}'?" if Path(unknown[0]).is_file() else ""
        parser.error(unrecognized(unknown, parser) + hint)
    values.model = _model(args, values)
    server, model = parse_settings(values)
    for name, value in (*server, *model):
        _check_number(name, value)
    if model.cache:
        raise ConfigError(
            "--cache would let apps learn from response times what other apps asked. Leave it out: "
            "kv_chunks keeps prompts, separately for each app."
        )
    if model.hf_model_repo_id is None:
        check_file(Path(model.model))
    for name in ("host", "port", "ssl_certfile", "ssl_keyfile"):
        if args.uds is not None and getattr(values, name) is not None:
            raise ConfigError(f"--{name} has no effect with --uds; leave one of them out")
    check_model_options(model)
    _check_context(model)
    return server, model


def _check_context(model: Any) -> None:
    """Refuse a context whose cells need more than all of the machine's memory.

    One that is longer than the model's training is served, because RoPE may be scaled for it.

    Raises:
        ConfigError: The context is too long, or the model is not a GGUF file.
    """
    from llama_cpp import llama_cpp

    from llmaas_plugins.model.cell_sizes import cell_bytes, values_in_cells
    from llmaas_plugins.model.gguf_header import read_outline

    is_on_gpu = model.n_gpu_layers and model.offload_kqv and llama_cpp.llama_supports_gpu_offload()
    if is_on_gpu or model.hf_model_repo_id is not None:
        return  # the cells are in other memory, or nobody knows yet how large they are
    outline, has = read_outline(Path(model.model)), total_bytes()
    trained = context_length(outline.fields) or 0
    n_ctx, f16 = model.n_ctx or trained, llama_cpp.GGML_TYPE_F16
    kinds = {name: getattr(model, name) for name in ("type_k", "type_v")}
    cell = cell_bytes(SimpleNamespace(**{k: f16 if v is None else v for k, v in kinds.items()}))
    needs = int(n_ctx * cell / 2 * values_in_cells(outline.shapes))
    if needs > has:
        raise ConfigError(
            f"--n_ctx {model.n_ctx}: the cells of {n_ctx:,} tokens need {size_text(needs)}, and "
            f"this machine has {size_text(has)} of memory; expected at most "
            f"{int(n_ctx * has / needs):,}. The model was trained with {trained:,}. "
            "--type_k 8 and --type_v 8 make cells half as large."
        )


def _check_number(name: str, value: object) -> None:
    """Refuse numbers that llama_cpp would cut to other ones, or fail with."""
    for number in value if isinstance(value, list) else [value]:
        if isinstance(number, float) and not abs(number) <= _LARGEST:
            raise ConfigError(
                f"--{name} must be from {-_LARGEST:g} to {_LARGEST:g}, found {number:g}"
            )
        most = _MOST_INT.get(name, (1 << 31) - 1)
        if isinstance(number, int) and not -(1 << 31) <= number <= most:
            raise ConfigError(f"--{name} must be from {-(1 << 31)} to {most}, found {number}")


def _model(args: argparse.Namespace, values: argparse.Namespace) -> str:
    from llmaas_plugins.reference_model import reference_model_path

    if args.toy and values.model is not None:
        raise ConfigError("both --model and --toy are given; choose one")
    if args.toy:
        return str(reference_model_path())
    if values.model is None:
        raise ConfigError(
            "no model is given. Use --model FILE, or --toy for the packaged reference model."
        )
    return str(values.model)
