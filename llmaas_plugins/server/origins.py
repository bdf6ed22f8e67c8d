"""Protection from web pages, which reach the service through their visitor's machine.

A page of another site may send requests here; the browser then names the site in ``Origin``. A site
may also point its own name at this machine (DNS rebinding); the browser then sends that name in
``Host``.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection

from llmaas_plugins.server.exchange import Message, header
from llmaas_plugins.server.refusal import Refusal

__all__ = ["OriginCheck"]

_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_ANY_ADDRESS = frozenset({"", "0.0.0.0", "::"})  # noqa: S104  told apart, not listened on


class OriginCheck:
    """Names of this service, and origins whose pages may use it."""

    def __init__(self, host: str | None, hosts: Collection[str], origins: Collection[str]) -> None:
        """Answer to loopback names, to ``host`` and to ``hosts``.

        Args:
            host: Address that the service listens on; None for a Unix socket, which browsers cannot
                reach, so that names do not matter.
            hosts: More names of the service.
            origins: Origins whose pages may use the service, besides its own.
        """
        self._host = None if host is None else host.lower()
        self._names = {*_LOOPBACK, *(name.lower() for name in hosts), self._host}
        self._origins = {origin.lower() for origin in origins}

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the service."""
        return self._host is None or self._host in _LOOPBACK or self._host.startswith("127.")

    def check(self, scope: Message) -> None:
        """Refuse requests of pages that may not use the service.

        Raises:
            Refusal: The request uses a wrong name of the service, or comes from another site's
                page.
        """
        host = header(scope, b"host").decode("latin-1").lower()
        is_named = bool(host) and self._host is not None  # browsers always send one; probes may not
        if is_named and not self._is_ours(_name(host)):
            raise Refusal(
                403, f"{_name(host)!r} is not a name of this service; see service.allowed_hosts."
            )
        origin = header(scope, b"origin").decode("latin-1").lower()
        is_own = bool(host) and origin.partition("://")[2] == host
        if origin and origin not in self._origins and not is_own:
            raise Refusal(
                403, f"Pages of {origin!r} may not use this service; see service.allowed_origins."
            )

    def _is_ours(self, name: str) -> bool:
        if name in self._names:
            return True
        return self._host in _ANY_ADDRESS and _is_address(name)  # an address cannot be rebound


def _name(host: str) -> str:
    """Return a ``Host`` header without port, an IPv6 address's brackets and a trailing dot."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
