# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import io
import os

from dynamo_epd.serve.output import LineReader, Output


def test_lines_carry_their_process_and_come_whole():
    stream = io.BytesIO()
    output = Output(["Front", "Middle-1"], stream)
    reader = LineReader("Front", output)
    reader.data_received(b"one\ntw")
    LineReader("Middle-1", output).data_received(b"between\n")
    reader.data_received(b"o\r\n\nthree")
    output.say("from the launcher")
    reader.connection_lost(None)
    assert stream.getvalue().decode().splitlines() == [
        "Front    | one",
        "Middle-1 | between",
        "Front    | two",
        "Front    | ",
        "serve    | from the launcher",
        "Front    | three",
    ]
    assert reader.done.is_set()


def test_a_line_without_end_does_not_grow_for_ever():
    stream = io.BytesIO()
    reader = LineReader("a", Output(["a"], stream))
    for _ in range(70):
        reader.data_received(b"x" * 1024)
    assert stream.getvalue().count(b"x") > 64 << 10
    assert stream.getvalue().count(b"\n") == 1


def test_a_full_disk_ends_the_log_file_and_nothing_else(tmp_path):
    stream = io.BytesIO()
    (tmp_path / "a.log").symlink_to("/dev/full")
    output = Output(["a", "b"], stream, tmp_path)
    for name in ("a", "b", "a"):
        output.lines(name, [b"text"])
    output.close()
    printed = stream.getvalue().decode()
    assert printed.count("| text") == 3
    assert printed.count("a: its log file ends here: [Errno 28]") == 1
    assert (tmp_path / "b.log").read_bytes() == b"text\n"


def test_a_full_pipe_loses_lines_instead_of_the_launcher():
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with os.fdopen(reading, "rb"), os.fdopen(writing, "wb") as stream:
        output = Output(["a"], stream)
        for _ in range(200):
            output.lines("a", [b"x" * 1000])
        os.read(reading, 1 << 20)
