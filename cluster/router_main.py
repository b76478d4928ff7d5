"""``python -m cluster.router_main --fd N``: the router, spawned by a supervisor over an inherited parent link."""

import os
import socket
import sys

from aiohttp import web

from cluster.child_main import child_main
from cluster.control import RouterSpec, RouterUp, StartFailed
from cluster.json_stream import JsonStream
from cluster.process_guard import keep_from_children, pin_to
from cluster.router import Router
from cluster.router_http import RouterHttp
from engine.model_ids import ModelError, resolve_model
from engine.tokenizer import load_tokenizer

EXIT_WRONG_USE = 2


async def run(fd: int) -> int:
    """Read the spec, serve HTTP on the inherited socket. Returns the exit code."""
    parent = await JsonStream.from_fd(fd)
    spec = await parent.receive()
    if spec is None:
        return 0
    if not isinstance(spec, RouterSpec):
        raise ValueError(f"the first message is {type(spec).__name__}, not a RouterSpec")
    pin_to(spec.cpus)
    model_id = spec.profile.model.id
    try:
        source = resolve_model(model_id)
        tokenizer = load_tokenizer(source)
        tokenizer.encode("the first call is slow")
    except ModelError as error:
        parent.send(StartFailed(message=f"router: {error}", exit_code=EXIT_WRONG_USE))
        await parent.drain()
        return EXIT_WRONG_USE
    listener = socket.socket(fileno=spec.listen_fd)
    keep_from_children(listener.fileno())
    router = Router(spec, parent)
    http = RouterHttp(router, model_id, source.config, tokenizer)
    runner = web.AppRunner(http.app(), handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    await web.SockSite(runner, listener).start()
    host, port = listener.getsockname()[:2]
    parent.send(RouterUp(pid=os.getpid(), url=f"http://{host}:{port}"))
    try:
        await router.run()
    finally:
        await runner.cleanup()
    return 0


if __name__ == "__main__":
    sys.exit(child_main("cluster.router_main", run))
