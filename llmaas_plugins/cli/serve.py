"""``llmaas serve``: llama_cpp.server with persistent contexts."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmaas_hooks import ConfigError
from llmaas_plugins.cli.options import add_config_option
from llmaas_plugins.cli.resources import say_problems
from llmaas_plugins.config import load_config

__all__ = ["add_parser"]

_log = logging.getLogger("llmaas.serve")
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_LOADED = b"\0"


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
    add_config_option(parser)
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
        from llmaas_plugins.service.application import make_application
        from llmaas_plugins.service.server import Server
    except ImportError as error:
        raise ConfigError(
            f"{error.name} is not installed. Try `pip install 'llmaas-plugins[server]'`."
        ) from error
    from llmaas_plugins.activation import activate
    from llmaas_plugins.service.grammars import Grammars
    from llmaas_plugins.service.keys import Keys, read_key_file
    from llmaas_plugins.service.line import Line
    from llmaas_plugins.service.metrics import Metrics
    from llmaas_plugins.service.service import LLMService
    from llmaas_plugins.service.upstream import server_engine

    server_settings, model_settings = _settings(rest, show_help=args.server_help)
    config = load_config(args.config).with_default("kv_chunks")  # a service keeps its contexts
    limits = config.service
    keys = Keys(server_settings.api_key, read_key_file(limits.key_file))
    line = Line(limits.max_queue)
    metrics = Metrics(line)
    with (
        _listening(args.uds, server_settings) as listen,
        activate(config, {"llmaas.line": line, "llmaas.metrics": metrics}) as suite,
        LLMService(server_engine, limits) as service,
        contextlib.closing(Grammars(server_engine)) as grammars,
    ):
        metrics.read_plugins(suite.status)
        say_problems(config)
        with _ended_at_once():
            app = make_application(
                server_settings, model_settings, service, keys, line, metrics, grammars
            )
            server = Server(app, line, limits, **listen)
            for number in _SIGNALS:
                signal.signal(number, server.handle_exit)
        server.run()
    return 0


@contextlib.contextmanager
def _ended_at_once() -> Iterator[None]:
    """While libllama loads a model, Python sees no signal: end the process without it.

    Nothing is lost: there is no call yet, and whatever is on disk can be cut off at any moment.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def watch() -> None:
        if os.read(reader, 1) != _LOADED:
            os._exit(0)

    watcher = threading.Thread(target=watch, name="llmaas-signals")
    for number in _SIGNALS:
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(writer)
    watcher.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(-1)
        os.write(writer, _LOADED)
        watcher.join()
        os.close(reader)
        os.close(writer)


@contextlib.contextmanager
def _listening(uds: Path | None, server_settings: Any) -> Iterator[dict[str, Any]]:
    """Where to listen, as options of uvicorn; a Unix socket is removed at the end."""
    if uds is None:
        yield {
            "host": server_settings.host,
            "port": server_settings.port,
            "ssl_keyfile": server_settings.ssl_keyfile,
            "ssl_certfile": server_settings.ssl_certfile,
        }
        return
    path = _private_socket(uds)
    try:
        yield {"uds": str(path)}
    finally:
        path.unlink(missing_ok=True)


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
