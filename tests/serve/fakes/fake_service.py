# SPDX-License-Identifier: Apache-2.0
"""A service that does as it is told: for tests of the launcher."""

from __future__ import annotations

import argparse
import http.server
import os
import signal
import subprocess
import sys
import threading


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser()
    p.add_argument("--name", required=True)
    p.add_argument("--journal", required=True, help="file to which what happens is appended, a line each")
    p.add_argument("--failures", type=int, default=0, help="how many first starts end at once with exit status 1")
    p.add_argument("--exit-status", type=int, default=0, help="of the end on SIGTERM, and of the failures")
    p.add_argument("--never-ready", action="store_true")
    p.add_argument("--ignore-term", action="store_true")
    p.add_argument("--stray", action="store_true", help="start a process in a session of its own, which never ends")
    p.add_argument("--http-port", type=int)
    p.add_argument("--flavour", choices=["sweet", "sour"], default="sweet")
    p.add_argument("--tags", nargs="*")
    p.add_argument("--extra", help="anything")
    p.add_argument("--fast", action=argparse.BooleanOptionalAction, default=True)
    return p


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"data": [{"id": "toy"}]}')

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    args = parser().parse_args()

    def note(what: str) -> None:
        with open(args.journal, "a") as journal:
            journal.write(f"{what} {args.name}\n")

    with open(args.journal) as journal:
        earlier = journal.read().splitlines().count(f"start {args.name}")
    note("start")
    print(f"hello from {args.name}", flush=True)
    if earlier < args.failures:
        sys.exit(args.exit_status)
    ended = threading.Event()

    def term(*_: object) -> None:
        note("term")
        if not args.ignore_term:
            ended.set()

    signal.signal(signal.SIGTERM, term)
    if args.stray:
        stray = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        note(f"stray {stray.pid}")
    port = args.http_port or int(os.environ.get("DYN_SYSTEM_PORT", 0))
    if port and not args.never_ready:
        server = http.server.HTTPServer(("127.0.0.1", port), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
    note(f"pid {os.getpid()}")
    while not ended.wait(0.1):
        pass
    print("last words", end="", flush=True)
    note("end")
    os._exit(args.exit_status)


if __name__ == "__main__":
    main()
