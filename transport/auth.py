"""Mutual proof that both ends of a connection know the cluster's secret, before any other frame is read.

::

    client                                     server
      HELLO     role, channel, nonce_c   -->
                                         <--   CHALLENGE  role, nonce_s, HMAC("server", all of the above)
      RESPONSE  HMAC("client", all)      -->
                                         <--   OK

The MAC is HMAC-SHA256 over a label, both roles, the channel and both nonces, so that a proof can be neither
replayed, reflected, nor used on another channel. The client checks the server first: a client with a wrong secret
learns so itself and tells the server nothing. Reads are exact and small, so garbage on the port costs one header.

The two classes hold the logic without I/O: ``start()`` gives the first bytes to send, then the caller reads exactly
``bytes_needed`` bytes, feeds them to ``receive()`` and sends what it returns, until ``is_done``. Two shells follow,
for a blocking socket and for asyncio streams.
"""

import asyncio
import hmac
import secrets
import socket
import struct
import time
from typing import Annotated, TypeVar

import msgspec
import xxhash

from transport.errors import AuthError, FramingError
from transport.frame import HEADER_BYTES, Frame, FrameHeader, FrameType, decode_header, encode_frame

AUTH_DEADLINE_S = 5.0
MAX_AUTH_PAYLOAD_BYTES = 512
NONCE_BYTES = 32
MIN_SECRET_BYTES = 16
_CONTEXT = b"pdconsole connection proof 1"

Word = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
Nonce = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
Mac = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class _Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: Word
    channel: Word
    nonce: Nonce


class _Challenge(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: Word
    nonce: Nonce
    mac: Mac


class _Response(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    mac: Mac


def _proof(secret: bytes, label: bytes, *parts: bytes) -> bytes:
    mac = hmac.new(secret, digestmod="sha256")
    for part in (_CONTEXT, label, *parts):
        mac.update(struct.pack("!I", len(part)) + part)
    return mac.digest()


def _check_secret(secret: bytes) -> None:
    if len(secret) < MIN_SECRET_BYTES:
        raise ValueError(f"the secret has {len(secret)} bytes; allowed is {MIN_SECRET_BYTES} or more")


Payload = TypeVar("Payload", bound=msgspec.Struct)


def _decode(payload: bytes, kind: type[Payload]) -> Payload:
    try:
        return msgspec.msgpack.decode(payload, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise AuthError(f"the peer's authentication message does not decode: {error}") from error


def _encode(frame_type: FrameType, message: msgspec.Struct) -> bytes:
    return encode_frame(Frame(frame_type, 0, msgspec.msgpack.encode(message)))


class _FrameReader:
    """Takes one AUTH frame at a time in two exact reads, header then payload."""

    def __init__(self) -> None:
        self._header: FrameHeader | None = None
        self.bytes_needed = HEADER_BYTES

    def receive(self, data: bytes, due: FrameType) -> bytes | None:
        """The payload once it is whole. Raises AuthError for anything but a sound frame of the due type."""
        if len(data) != self.bytes_needed:
            raise ValueError(f"{len(data)} bytes were fed; needed are exactly {self.bytes_needed}")
        if self._header is None:
            try:
                header = decode_header(data)
            except FramingError as error:
                raise AuthError(f"the peer does not speak this protocol: {error}") from error
            if header.type is not due or header.payload_bytes > MAX_AUTH_PAYLOAD_BYTES:
                raise AuthError(
                    f"{header.type.name} of {header.payload_bytes} bytes came during authentication; "
                    f"due is {due.name} of at most {MAX_AUTH_PAYLOAD_BYTES}"
                )
            if header.payload_bytes:
                self._header, self.bytes_needed = header, header.payload_bytes
                return None
            data = b""
        else:
            header, self._header = self._header, None
        self.bytes_needed = HEADER_BYTES
        if xxhash.xxh3_64_intdigest(data) != header.checksum:
            raise AuthError(f"{due.name} is damaged: its checksum does not match")
        return data


class ClientHandshake:
    """The connecting end. ``peer_role`` is the server's role once ``is_done``."""

    def __init__(self, secret: bytes, role: str, channel: str) -> None:
        _check_secret(secret)
        self._secret = secret
        self._hello = _Hello(role=role, channel=channel, nonce=secrets.token_bytes(NONCE_BYTES))
        self._reader = _FrameReader()
        self._due = FrameType.AUTH_CHALLENGE
        self.peer_role = ""
        self.is_done = False

    @property
    def bytes_needed(self) -> int:
        return 0 if self.is_done else self._reader.bytes_needed

    def start(self) -> bytes:
        return _encode(FrameType.AUTH_HELLO, self._hello)

    def receive(self, data: bytes) -> bytes:
        """Feed exactly ``bytes_needed`` bytes; returns what to send. Raises AuthError."""
        payload = self._reader.receive(data, self._due)
        if payload is None:
            return b""
        if self._due is FrameType.AUTH_OK:
            self.is_done = True
            return b""
        challenge = _decode(payload, _Challenge)
        signed = _signed_parts(self._hello, challenge.role, challenge.nonce)
        if not hmac.compare_digest(challenge.mac, _proof(self._secret, b"server", *signed)):
            raise AuthError(
                "the server did not prove the cluster's secret: the two sides hold different secrets"
            )
        self.peer_role = challenge.role
        self._due = FrameType.AUTH_OK
        return _encode(FrameType.AUTH_RESPONSE, _Response(mac=_proof(self._secret, b"client", *signed)))


class ServerHandshake:
    """The listening end. ``peer_role`` is the client's role once ``is_done``."""

    def __init__(self, secret: bytes, role: str, channel: str) -> None:
        _check_secret(secret)
        self._secret = secret
        self._role = role
        self._channel = channel
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._reader = _FrameReader()
        self._hello: _Hello | None = None
        self.peer_role = ""
        self.is_done = False

    @property
    def bytes_needed(self) -> int:
        return 0 if self.is_done else self._reader.bytes_needed

    def receive(self, data: bytes) -> bytes:
        """Feed exactly ``bytes_needed`` bytes; returns what to send. Raises AuthError."""
        due = FrameType.AUTH_HELLO if self._hello is None else FrameType.AUTH_RESPONSE
        payload = self._reader.receive(data, due)
        if payload is None:
            return b""
        if self._hello is None:
            hello = _decode(payload, _Hello)
            if hello.channel != self._channel:
                raise AuthError(
                    f"the client asked for channel {hello.channel!r}; this port serves {self._channel!r}"
                )
            self._hello = hello
            mac = _proof(self._secret, b"server", *_signed_parts(hello, self._role, self._nonce))
            return _encode(FrameType.AUTH_CHALLENGE, _Challenge(role=self._role, nonce=self._nonce, mac=mac))
        response = _decode(payload, _Response)
        expected = _proof(self._secret, b"client", *_signed_parts(self._hello, self._role, self._nonce))
        if not hmac.compare_digest(response.mac, expected):
            raise AuthError("the client did not prove the cluster's secret")
        self.peer_role = self._hello.role
        self.is_done = True
        return encode_frame(Frame(FrameType.AUTH_OK, 0))


def _signed_parts(hello: _Hello, server_role: str, server_nonce: bytes) -> tuple[bytes, ...]:
    return hello.channel.encode(), hello.role.encode(), server_role.encode(), hello.nonce, server_nonce


def authenticate_socket(
    sock: socket.socket, handshake: ClientHandshake | ServerHandshake, deadline_s: float = AUTH_DEADLINE_S
) -> None:
    """Runs the handshake over a blocking socket, whose timeout is left unset afterwards.

    Raises AuthError for a wrong proof, garbage, a peer that leaves, and a peer that is slower than ``deadline_s``.
    """
    deadline = time.monotonic() + deadline_s
    try:
        if isinstance(handshake, ClientHandshake):
            sock.sendall(handshake.start())
        while not handshake.is_done:
            data = b""
            while len(data) < handshake.bytes_needed:
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0:
                    raise TimeoutError
                sock.settimeout(remaining_s)
                chunk = sock.recv(handshake.bytes_needed - len(data))
                if not chunk:
                    raise AuthError("the peer closed the connection during authentication")
                data += chunk
            reply = handshake.receive(data)
            if reply:
                sock.sendall(reply)
        sock.settimeout(None)
    except TimeoutError:
        raise AuthError(f"the peer did not authenticate within {deadline_s:g} s") from None
    except OSError as error:
        raise AuthError(f"the connection broke during authentication: {error}") from error


async def authenticate_stream(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    handshake: ClientHandshake | ServerHandshake,
    deadline_s: float = AUTH_DEADLINE_S,
) -> None:
    """The same over asyncio streams; reads nothing beyond the handshake. Raises AuthError as above."""
    try:
        async with asyncio.timeout(deadline_s):
            if isinstance(handshake, ClientHandshake):
                writer.write(handshake.start())
                await writer.drain()
            while not handshake.is_done:
                reply = handshake.receive(await reader.readexactly(handshake.bytes_needed))
                if reply:
                    writer.write(reply)
                    await writer.drain()
    except TimeoutError:
        raise AuthError(f"the peer did not authenticate within {deadline_s:g} s") from None
    except asyncio.IncompleteReadError:
        raise AuthError("the peer closed the connection during authentication") from None
    except OSError as error:
        raise AuthError(f"the connection broke during authentication: {error}") from error
