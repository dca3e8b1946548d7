# SPDX-License-Identifier: Apache-2.0
"""Workers that run different language models tell each other apart, though their encoders are equal."""

from safetensors.torch import load_file, save_file

from dynamo_epd.demo.toy_data import TOY_MODEL
from dynamo_epd.models.checkpoint import weights_fingerprint


def test_the_fingerprint_follows_weights_and_not_the_folder(tmp_path):
    here = weights_fingerprint(TOY_MODEL)
    tensors = load_file(TOY_MODEL / "model.safetensors")
    same, other, fewer = tmp_path / "same", tmp_path / "other", tmp_path / "fewer"
    for folder in (same, other, fewer):
        folder.mkdir()
    save_file(tensors, same / "model.safetensors")
    name = next(n for n in tensors if "layers.0" in n and "visual" not in n)
    save_file({**tensors, name: tensors[name] * 1.01}, other / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if n != name}, fewer / "model.safetensors")
    assert weights_fingerprint(same) == here
    assert len({here, weights_fingerprint(other), weights_fingerprint(fewer)}) == 3
