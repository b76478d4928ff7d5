"""The request link's sockets."""

import asyncio
import socket

from cluster.json_stream import listen_on_loopback


async def test_no_end_of_a_connection_waits_for_acknowledgements_before_it_sends() -> None:
    """Where the accepted end did, every first token came 40 ms late."""
    delays: asyncio.Queue[int] = asyncio.Queue()

    def note(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ours: socket.socket = writer.get_extra_info("socket")
        delays.put_nowait(ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    listener = listen_on_loopback()
    server = await asyncio.start_server(note, sock=listener)
    async with server:
        _, writer = await asyncio.open_connection(*listener.getsockname())
        theirs: socket.socket = writer.get_extra_info("socket")
        assert theirs.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert await delays.get()
        writer.close()
        await writer.wait_closed()
