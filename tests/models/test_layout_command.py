# SPDX-License-Identifier: Apache-2.0
"""``dynamo-epd layout``: the same layouts through the command, from arrays and from files."""

from __future__ import annotations

import io
import json
import shutil

import numpy as np
import pytest
import soundfile

from dynamo_epd import cli
from dynamo_epd.models.nemotron import kept_rows

from .tiny import RATE, case_id, cases, media_of

CASES = [
    c
    for c in cases()
    if c["case"] in ("image_video_audio", "x_video_with_own_audio_interleaved") or c["family"] in ("gemma3", "llama4")
]
OPTIONS = {
    "x_video_with_own_audio_interleaved": {"load_audio_from_video": True},
    "x_pan_and_scan": {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 50},
}


@pytest.fixture
def layout(tmp_path, model_dir, capsys, monkeypatch):
    """Run the command on a request; gives the exit status and what it printed."""

    def run(name, request, *flags, stdin=False):
        text = request if isinstance(request, str) else json.dumps(request)
        path = tmp_path / "request.json"
        path.write_text(text)
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        status = cli.main(["layout", "--model", str(model_dir(name)), *flags, *([] if stdin else [str(path)])])
        return status, capsys.readouterr()

    return run


def arrays(case, folder):
    """The case's media as ``.npy`` files."""
    entries = []
    for i, recipe in enumerate(case["media"]):
        path = folder / f"{i}.npy"
        np.save(path, np.asarray(media_of(recipe).data))
        more = {"image": {}, "video": {"fps": recipe.get("fps")}, "audio": {"sampling_rate": RATE}}[recipe["kind"]]
        entries.append({"kind": recipe["kind"], "path": str(path), **more})
    return entries


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_layouts_through_the_command(case, layout, tmp_path):
    request = {
        "prompt_token_ids": case["unexpanded_ids"],
        "media": arrays(case, tmp_path),
        "mm_processor_kwargs": OPTIONS.get(case["case"], {}),
    }
    status, printed = layout(case["family"], request, stdin=True)
    output = json.loads(printed.out)
    assert status == 0 and output["expanded_ids"] == case["expanded_ids"] and "reserved" not in output
    expected = sorted(case["items"], key=lambda item: item["runs"][0])
    for item, want in zip(output["items"], expected, strict=True):
        assert item["modality"] == want["modality"] and item["runs"] == want["runs"]
        assert item["special_offsets"] == want["special_offsets"] and item["embedding_rows"] == want["embedding_rows"]
    assert len({item["digest"] for item in output["items"]}) == len(output["items"])
    again = json.loads(layout(case["family"], request)[1].out)
    assert again == output


def test_pruned_video_with_weights_and_without(layout, model_dir, tmp_path, capsys):
    case = next(c for c in cases() if c["case"] == "x_one_video_evs_0.3")
    request = {
        "prompt_token_ids": case["unexpanded_ids"],
        "media": arrays(case, tmp_path),
        "mm_processor_kwargs": {"video_pruning_rate": 0.3},
    }
    status, printed = layout(case["family"], request)
    output = json.loads(printed.out)
    assert status == 0 and output["items"][0]["embedding_rows"] == kept_rows(24, 4, 0.3) and "reserved" not in output
    bare = shutil.copytree(model_dir(case["family"]), tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    path = tmp_path / "again.json"
    path.write_text(json.dumps(request))
    assert cli.main(["layout", "--model", str(bare), str(path)]) == 0
    reserved = json.loads(capsys.readouterr().out)
    assert reserved["reserved"] is True and reserved["items"][0]["embedding_rows"] == kept_rows(24, 4, 0.3)
    assert len(reserved["expanded_ids"]) == len(output["expanded_ids"])


def test_files_and_their_digests(layout, tmp_path):
    image = media_of({"kind": "image", "width": 90, "height": 60, "seed": 1}).data
    wave = media_of({"kind": "audio", "seconds": 1.3, "seed": 6}).data
    image.save(tmp_path / "a.png")
    shutil.copy(tmp_path / "a.png", tmp_path / "b.png")
    soundfile.write(tmp_path / "a.wav", wave, RATE, subtype="FLOAT")
    case = next(c for c in cases() if c["family"] == "nemotron_h_omni" and c["case"] == "one_audio")
    prompt = [*case["unexpanded_ids"], 1504, 1504]
    media = [{"kind": kind, "path": str(tmp_path / name)} for kind, name in
             (("audio", "a.wav"), ("image", "a.png"), ("image", "b.png"))]  # fmt: skip
    status, printed = layout("nemotron_h_omni", {"prompt_token_ids": prompt, "media": media})
    items = json.loads(printed.out)["items"]
    assert status == 0 and [item["embedding_rows"] for item in items] == [17, 6, 6]
    assert items[1]["digest"] == items[2]["digest"] != items[0]["digest"]


def test_drawing_shows_runs_and_text(layout, tmp_path):
    case = next(c for c in cases() if c["family"] == "mistral3")
    request = {"prompt_token_ids": case["unexpanded_ids"], "media": arrays(case, tmp_path)}
    status, printed = layout("mistral3", request, "--show")
    lines = printed.out.splitlines()
    assert status == 0 and len(lines) == 4
    assert "image 1    ████│████│████│  rows 0-11" in lines[1] and lines[1].split()[:2] == ["13", "15"]
    assert "What is it?" in lines[2] and lines[3] == "35 tokens, 12 embedding rows in 1 items"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"media": []}, "1 image placeholder and the request 0 image items"),
        ({"media": [{"kind": "image", "path": "/nowhere.png"}]}, "image 1: /nowhere.png cannot be read"),
        ({"media": [{"kind": "smell", "path": "x"}]}, "smell"),
        ({"prompt_token_ids": "x"}, "prompt_token_ids"),
        ({"mm_processor_kwargs": {"foo": 1}}, "foo is not an option"),
        ({"extra": 1}, "extra"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(layout, tmp_path, change, message):
    case = next(c for c in cases() if c["family"] == "mistral3")
    request = {"prompt_token_ids": case["unexpanded_ids"], "media": arrays(case, tmp_path), **change}
    status, printed = layout("mistral3", request)
    assert status == 2 and message in printed.err and printed.err.count("\n") == 1 and not printed.out


@pytest.mark.parametrize("array", [np.zeros((4, 4), np.uint8), np.zeros((4, 4, 3), np.float32), np.array([object()])])
def test_arrays_of_another_form_are_refused(layout, tmp_path, array):
    case = next(c for c in cases() if c["family"] == "mistral3")
    np.save(tmp_path / "bad.npy", array, allow_pickle=True)
    media = [{"kind": "image", "path": str(tmp_path / "bad.npy")}]
    status, printed = layout("mistral3", {"prompt_token_ids": case["unexpanded_ids"], "media": media})
    assert status == 2 and "image 1: " in printed.err and "npy" in printed.err


def test_kinds_in_another_order_than_the_prompt(layout, tmp_path):
    case = next(c for c in cases() if c["family"] == "qwen3_vl" and c["case"] == "image_video")
    media = arrays(case, tmp_path)[::-1]
    status, printed = layout("qwen3_vl", {"prompt_token_ids": case["unexpanded_ids"], "media": media})
    assert status == 2 and "media[0] is video, the placeholder at token 5 is for image" in printed.err
