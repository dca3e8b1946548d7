# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
from fractions import Fraction

import pytest

from dynamo_epd.contract.errors import ConfigError
from dynamo_epd.serve.placement import Need, place, visible_gpus

HALF = Fraction(1, 2)


def need(name, gpus, devices=None):
    return Need(name, Fraction(gpus), devices)


@pytest.mark.parametrize(
    ("needs", "expected"),
    [
        ([need("f", 0), need("e", 1), need("p", 2)], {"f": (), "e": ("0",), "p": ("1", "2")}),
        ([need("a", HALF), need("b", HALF), need("c", HALF)], {"a": ("0",), "b": ("0",), "c": ("1",)}),
        # Fractions come last, so that four whole ones still fit; the small one fills what the large one left.
        ([need("e", HALF), need("p", 3), need("x", "0.3")], {"e": ("3",), "p": ("0", "1", "2"), "x": ("3",)}),
        (
            [need("e", 0, ("0",)), need("p", 2), need("d", 0, ("0", "3"))],
            {"e": ("0",), "p": ("1", "2"), "d": ("0", "3")},
        ),
        ([need("e", 0, ("GPU-x",)), need("p", 4)], {"e": ("GPU-x",), "p": ("0", "1", "2", "3")}),
    ],
)
def test_placement(needs, expected):
    assert place(needs, ("0", "1", "2", "3")) == expected
    assert list(place(needs, ("0", "1", "2", "3"))) == [n.name for n in needs]


@pytest.mark.parametrize(
    ("needs", "name"),
    [
        ([need("p", 5)], "p"),
        ([need("p", 2), need("d", 2), need("e", 1)], "e"),
        ([need("p", 4), need("e", "0.1")], "e"),
        ([*(need(f"h{i}", "0.6") for i in range(4)), need("h4", "0.6")], "h4"),
        ([need("e", 0, ("0",)), need("p", 4)], "p"),
    ],
)
def test_too_few(needs, name):
    with pytest.raises(ConfigError, match=rf"{name} needs .*this host's 4"):
        place(needs, ("0", "1", "2", "3"))


@pytest.mark.parametrize(
    ("value", "expected"),
    [("", ()), ("-1", ()), ("NoDevFiles", ()), ("2,3", ("2", "3")), ("1,-1,0", ("1",)), (" GPU-a , 1", ("GPU-a", "1"))],
)
def test_cuda_visible_devices_decides(value, expected):
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": value}) == expected


def test_nvidia_smi_is_asked_otherwise(tmp_path, monkeypatch):
    smi = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    smi.write_text("#!/bin/sh\nprintf '0\\n1\\n'\n")
    smi.chmod(0o755)
    assert visible_gpus({}) == ("0", "1")
    smi.write_text("#!/bin/sh\nexit 9\n")
    with pytest.raises(ConfigError, match="nvidia-smi .* failed.*--gpus"):
        visible_gpus({})
