"""Keys of callers: llama_cpp.server's own key for the administrator, and one key for each app."""

from __future__ import annotations

import hmac
import stat
import tomllib
from collections.abc import Mapping
from pathlib import Path

from llmaas_hooks import ConfigError
from llmaas_plugins.server.refusal import Refusal
from llmaas_plugins.service_config import APP_NAMES, is_app_name

__all__ = ["ApiKeys", "key_in", "read_key_file"]

_SHORTEST_KEY = 16
_EXPECTED = "a key must be a string of printable ASCII without spaces"
_NO_KEY = "No API key was sent; expected the header `Authorization: Bearer KEY`."


class ApiKeys:
    """Keys of a service.

    Attributes:
        is_open: Whether there are no keys, so that everyone may use the service.
    """

    def __init__(self, administrator: str | None, apps: Mapping[str, str]) -> None:
        """Accept the administrator's key, and the key of each app.

        Raises:
            ConfigError: The administrator's key is empty or has characters that clients
                cannot send; or an app has that key, which would give it access to everything.
        """
        if administrator is not None and not administrator.strip():
            raise ConfigError(
                "--api_key is empty. Give a key, or leave the option out to serve without one."
            )
        if administrator is not None and not _can_be_sent(administrator):
            raise ConfigError(f"--api_key: {_EXPECTED}. Many clients cannot send another one.")
        for app, key in apps.items():
            if key == administrator:
                raise ConfigError(
                    f"app {app!r} has the administrator's key, --api_key. Give it another one."
                )
        self._administrator = administrator
        self._apps = dict(apps)
        self.is_open = administrator is None and not apps

    def opens(self, authorization: bytes) -> bool:
        """Return whether this ``Authorization`` has a valid key."""
        try:
            self.caller(authorization)
        except Refusal:
            return False
        return True

    def caller(self, authorization: bytes) -> str | None:
        """Return the app that an ``Authorization`` belongs to, or None for the administrator.

        Raises:
            Refusal: There is no key, or it is not one of this service's.
        """
        if self.is_open:
            return None
        if not authorization:
            raise Refusal(401, _NO_KEY, "invalid_api_key")
        scheme, _, given = authorization.partition(b" ")
        found: list[str | None] = []
        for app, key in ((None, self._administrator), *self._apps.items()):
            # compare all keys, each in constant time, so that timing reveals nothing about them
            if hmac.compare_digest(given.strip(), (key or "").encode()) and key:
                found.append(app)
        if scheme.lower() != b"bearer" or not found:
            raise Refusal(401, "Invalid API key", "invalid_api_key")
        return found[0]


def read_key_file(path: Path | None) -> dict[str, str]:
    """Read keys by app from a TOML file of ``app = "key"`` lines that only its owner can read.

    Raises:
        ConfigError: The file cannot be read, is open to other users, or has other contents.
    """
    if path is None:
        return {}
    path = path.expanduser()
    try:
        mode = path.stat().st_mode
        content = path.read_bytes() if stat.S_ISREG(mode) else None  # reading a pipe would block
    except OSError as error:
        raise ConfigError(f"cannot read service.key_file {path}: {error.strerror}") from error
    if content is None:
        raise _wrong(path, "is not a regular file")
    if mode & 0o077:
        raise ConfigError(f"{path} is open to other users. Try `chmod 600 {path}`.")
    try:
        keys = tomllib.loads(content.decode("utf-8-sig"))
    except ValueError as error:
        raise _wrong(path, "is not valid TOML") from error
    _check(path, keys)
    return keys


def key_in(value: str | None, variable: str, then: str) -> str:
    """Return the key in an environment variable.

    Args:
        value: Value of the variable; None if it is not set.
        variable: Name of the variable, as errors call it.
        then: Advice if it is not set.

    Raises:
        ConfigError: The variable is not set, or its value cannot be sent.
    """
    key = (value or "").strip()
    if not key:
        raise ConfigError(f"{variable} is not set. {then}")
    if not _can_be_sent(key):
        raise ConfigError(f"{variable} must contain printable ASCII without spaces.")
    return key


# -- inside --------------------------------------------------------------------------------------


def _can_be_sent(key: str) -> bool:
    """Return whether every client can send a key in a header."""
    return key.isascii() and key.isprintable() and " " not in key


def _check(path: Path, keys: Mapping[str, object]) -> None:
    for app, key in keys.items():
        if not is_app_name(app):  # an empty one would be nobody's
            raise _wrong(path, f"{app!r}: an app's name must be {APP_NAMES}")
        if not isinstance(key, str) or not _can_be_sent(key):
            raise _wrong(path, f"{app!r}: {_EXPECTED}")
        if len(key) < _SHORTEST_KEY:
            raise _wrong(path, f"{app!r}: a key must have {_SHORTEST_KEY} characters or more")
    if len(set(keys.values())) < len(keys):
        raise _wrong(path, "two apps have the same key")


def _wrong(path: Path, what: str) -> ConfigError:
    """Return an error that does not quote the file, because errors end up in logs."""
    return ConfigError(f'service.key_file {path}: {what}. Expected lines like: mail = "…key…"')
