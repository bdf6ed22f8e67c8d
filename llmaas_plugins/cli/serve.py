"""``llmaas serve``: llama_cpp.server with persistent contexts."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmaas_hooks import ConfigError
from llmaas_plugins.config import Config, PluginTable, load_config

__all__ = ["add_parser"]

_log = logging.getLogger("llmaas.serve")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the sub-command."""
    parser = subparsers.add_parser(
        "serve",
        help="serve persistent contexts and the OpenAI API over HTTP or a Unix socket",
        description="llama_cpp.server with the configured plugins (kv_chunks if none is chosen) "
        "and the routes /v1/llmaas/….",
        epilog="Every other option is llama_cpp.server's own: --model, --n_ctx, --host, --port, "
        "--api_key, …; `llmaas serve --server-help` lists them. Three defaults differ: "
        "--flash_attn True, --interrupt_requests False, --logits_all False (logprobs need True).",
    )
    parser.add_argument("--config", type=Path, help="llmaas.toml (default: LLMAAS_CONFIG)")
    parser.add_argument(
        "--uds", type=Path, help="listen on this Unix socket, in a directory of mode 0700"
    )
    parser.add_argument(
        "--server-help", action="store_true", help="list llama_cpp.server's options"
    )
    parser.set_defaults(func=serve, takes_rest=True)


def serve(args: argparse.Namespace, rest: list[str]) -> int:
    """Run the server until it is stopped."""
    try:
        import uvicorn
        from llama_cpp.server.app import create_app
    except ImportError as error:
        raise ConfigError(
            f"{error.name} is not installed. Try `pip install 'llmaas-plugins[server]'`."
        ) from error
    from llmaas_plugins.activation import activate
    from llmaas_plugins.service.routes import make_router, server_engine
    from llmaas_plugins.service.service import LLMService

    server_settings, model_settings = _settings(rest, show_help=args.server_help)
    config = _with_default_plugins(load_config(args.config))
    listen: dict[str, Any] = {"host": server_settings.host, "port": server_settings.port}
    if args.uds is not None:
        listen = {"uds": str(_private_socket(args.uds))}
    signal.signal(signal.SIGTERM, _end)
    with activate(config), LLMService(server_engine, config.service) as service:
        app = create_app(server_settings=server_settings, model_settings=[model_settings])
        app.include_router(make_router(service))
        uvicorn.run(
            app,
            **listen,
            ssl_keyfile=server_settings.ssl_keyfile,
            ssl_certfile=server_settings.ssl_certfile,
        )
    return 0


def _with_default_plugins(config: Config) -> Config:
    """A service without any choice of plugins keeps its contexts."""
    if config.plugins or "LLMAAS_PLUGINS" in os.environ:
        return config
    return replace(config, plugins={"kv_chunks": PluginTable(True, {}, {})})


def _end(*_: object) -> None:
    """Leave ``serve`` by its exits. uvicorn shuts down gracefully, then raises the signal again."""
    sys.exit(0)


def _settings(rest: list[str], *, show_help: bool) -> tuple[Any, Any]:
    """llama_cpp.server's settings from its own options, with defaults that suit a service."""
    from llama_cpp.server.cli import add_args_from_model, parse_model_from_args
    from llama_cpp.server.settings import ModelSettings, ServerSettings, Settings

    from llmaas_plugins.models import reference_model_path

    parser = argparse.ArgumentParser(prog="llmaas serve", allow_abbrev=False)
    add_args_from_model(parser, Settings)
    # an app must not cut another one's reply short; n_ctx rows of logits are a lot of memory
    parser.set_defaults(flash_attn=True, interrupt_requests=False, logits_all=False)
    if show_help:
        parser.print_help()
        sys.exit(0)
    values = parser.parse_args(rest)
    if values.model is None:
        values.model = str(reference_model_path())
        _log.warning("no --model given; serving the packaged reference model, a toy")
    try:
        server: Any = parse_model_from_args(ServerSettings, values)
        model: Any = parse_model_from_args(ModelSettings, values)
    except ValueError as error:  # pydantic's, with a line for each option
        raise ConfigError(str(error)) from error
    if model.hf_model_repo_id is None and not Path(model.model).is_file():
        raise ConfigError(f"no such model: {model.model}")
    return server, model


def _private_socket(path: Path) -> Path:
    """A free socket path that only this user can reach: uvicorn creates it world-writable."""
    path = path.expanduser()
    directory = path.resolve().parent
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if directory.stat().st_mode & 0o077:
        raise ConfigError(
            f"{directory} can be entered by other users. Put the socket into a directory of mode "
            f"0700, e.g. `mkdir -m 700 {directory}/llmaas`."
        )
    with socket.socket(socket.AF_UNIX) as probe:
        if probe.connect_ex(str(path)) == 0:
            raise ConfigError(f"another service listens on {path}. Stop it, or choose another.")
    return directory / path.name
