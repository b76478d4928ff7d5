"""The router's HTTP socket, bound by the supervisor: it outlives a router, so the port and waiting clients stay."""

import errno
import socket
from typing import Final

import psutil

from cluster.start_refused import StartRefused

BACKLOG: Final = 1024
SEND_BUFFER_BYTES: Final = 128 * 1024
"""Of each connection: what the kernel holds for a client that does not read (it takes twice as much for itself)."""


def bind_http(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 = any free one. Raises StartRefused naming what holds the port or is wrong."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise StartRefused(
            f"router.host {host!r} is not an address of this host: {error.strerror}", 2
        ) from error
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise StartRefused(_bind_problem(host, port, error)) from error
    return sock


def url_of(sock: socket.socket) -> str:
    """Where clients on this host reach it: a wildcard address is answered on loopback."""
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def port_holder(port: int) -> str:
    """``"pid 123 (python -m http.server)"`` of the process that listens on a TCP port; "" when it cannot be told."""
    try:
        connections = psutil.net_connections("tcp")
    except psutil.Error:
        return ""
    for connection in connections:
        if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port:
            if connection.pid is None:
                continue
            try:
                command = " ".join(psutil.Process(connection.pid).cmdline())
            except psutil.Error:
                command = ""
            return f"pid {connection.pid} ({command[:80]})" if command else f"pid {connection.pid}"
    return ""


def _bind_problem(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        holder = port_holder(port)
        who = f"by {holder}" if holder else "by another process"
        return (
            f"port {port} on {host} is in use {who}; choose another with --port, or --port 0 for any free one"
        )
    if error.errno == errno.EACCES:
        return f"port {port} on {host} is not allowed for this user; choose one above 1023, or --port 0"
    return f"the router cannot listen on {host} port {port}: {error.strerror}"
