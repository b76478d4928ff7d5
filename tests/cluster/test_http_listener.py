import os
import socket

import pytest

from cluster.http_listener import bind_http, port_holder, url_of
from cluster.start_refused import StartRefused


def test_any_free_port() -> None:
    with bind_http("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        assert url_of(sock) == f"http://127.0.0.1:{port}"
        socket.create_connection(("127.0.0.1", port)).close()  # the kernel queues it: nobody has to accept


def test_port_in_use_names_port_and_holder() -> None:
    with bind_http("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(StartRefused) as refused:
            bind_http("127.0.0.1", port)
    assert refused.value.exit_code == 3
    assert f"port {port} on 127.0.0.1 is in use by pid {os.getpid()} (" in refused.value.message
    assert "--port 0" in refused.value.message


def test_holder_of_a_free_port_is_nobody() -> None:
    with bind_http("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        assert port_holder(port).startswith(f"pid {os.getpid()}")
    assert port_holder(port) == ""


def test_wildcard_is_reached_on_loopback() -> None:
    with bind_http("0.0.0.0", 0) as sock:
        assert url_of(sock).startswith("http://127.0.0.1:")


def test_host_that_is_not_ours_is_refused() -> None:
    with pytest.raises(StartRefused, match=r"the router cannot listen on 192.0.2.1 port \d+: "):
        bind_http("192.0.2.1", 0)
    with pytest.raises(StartRefused, match=r"router\.host 'no such host' is not an address") as refused:
        bind_http("no such host", 0)
    assert refused.value.exit_code == 2
