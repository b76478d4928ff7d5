"""KV cache from one worker's memory into another's over TCP. Knows no engine.

Users of this package need: ``sender.KVSender``, ``receiver.KVReceiver``, ``receiver_peer`` (what a receiver calls),
``events``, ``messages``, ``errors``, ``auth``, ``link``, ``faults``, ``probe``, ``codec``, ``int8_codec``,
``lossless_codec``, ``codec_rates`` and ``codec_choice``.
The protocol itself lives in ``frame``, ``messages`` and ``kv_transfer``; ``sender_connection`` and
``receiver_connection`` are its two ends without sockets.
"""
