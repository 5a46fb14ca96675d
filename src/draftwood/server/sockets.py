"""Addresses a server listens at. Imports nothing heavy: they are taken before anything is loaded."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

from draftwood.errors import InvalidRequest


@contextmanager
def listening(addresses: Iterable[tuple[str, int]]) -> Iterator[list[socket.socket]]:
    """Sockets at addresses that are free."""
    with ExitStack() as stack:
        yield [stack.enter_context(_listen(host, port)) for host, port in addresses]


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except socket.gaierror as error:
        raise InvalidRequest(f"'{host}' is no address: {error.strerror}. Choose another one with --host.") from error
    except OSError as error:
        reason = os.strerror(error.errno or 0).lower()
        hint = (
            "choose another port with --port" if error.errno == errno.EADDRINUSE else "choose another --host or --port"
        )
        raise InvalidRequest(f"The server cannot listen at {host}:{port}: {reason}; {hint}.") from error
