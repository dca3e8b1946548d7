# SPDX-License-Identifier: Apache-2.0
"""A receiver of OpenTelemetry spans: OTLP over HTTP, as protobuf, read with no more of the schema than is asked for."""

from __future__ import annotations

import contextlib
import http.server
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Span:
    trace: str
    id: str
    parent: str
    name: str
    attributes: dict[str, Any]
    service: str


@contextlib.contextmanager
def receiver() -> Iterator[tuple[str, list[Span]]]:
    """A server on a free port: its URL, and the list that the spans are put into as they come."""
    spans: list[Span] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.path == "/v1/traces":
                spans.extend(parse(body))
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", spans
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def parse(request: bytes) -> Iterator[Span]:
    """The spans of an ``ExportTraceServiceRequest``."""
    for _, resource_spans in fields(request):
        parts = list(fields(resource_spans))
        resource = dict(_attribute(a) for n, part in parts if n == 1 for k, a in fields(part) if k == 1)
        for span in (s for n, scope in parts if n == 2 for k, s in fields(scope) if k == 2):
            entries = list(fields(span))
            one = dict(entries)
            yield Span(
                one[1].hex(),
                one[2].hex(),
                one.get(4, b"").hex(),
                one[5].decode(),
                dict(_attribute(a) for n, a in entries if n == 9),
                resource.get("service.name", ""),
            )


def _attribute(entry: bytes) -> tuple[str, Any]:
    """A ``KeyValue`` whose value is a string, a bool, an int or a double; None for anything else."""
    one = dict(fields(entry))
    for number, value in fields(one.get(2, b"")):
        if number == 1:
            return one[1].decode(), value.decode()
        if number == 4:
            return one[1].decode(), struct.unpack("<d", value)[0]
        return one[1].decode(), value if number in (2, 3) else None
    return one[1].decode(), None


def fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Number and raw value of each field of a protobuf message: an int for varints, bytes for the rest."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(message):
        key = varint()
        kind = key & 7
        if kind == 0:
            yield key >> 3, varint()
            continue
        size = varint() if kind == 2 else {1: 8, 5: 4}[kind]
        yield key >> 3, message[at : at + size]
        at += size
