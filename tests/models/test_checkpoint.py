# SPDX-License-Identifier: Apache-2.0
"""Identity of a model directory, and its encoder alone: also sharded, prefixed, damaged and much larger models."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file

from dynamo_epd import models
from dynamo_epd.contract.errors import ConfigError
from dynamo_epd.models import Media
from dynamo_epd.models.checkpoint import LANGUAGE_MODEL, tensor_spans

from .tiny import DATA

WEIGHTS = "model.safetensors"
MODELS = sorted(path.name for path in (DATA / "models").iterdir() if path.is_dir())


def identity(path: Path) -> str:
    return models.load(path, tower=False).identity


@pytest.fixture
def copy(model_dir: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy of a tiny model that a test may change."""
    return shutil.copytree(model_dir("qwen2_5_vl"), tmp_path / "copy")


def change_tensor(path: Path, name: str) -> None:
    tensors = load_file(path / WEIGHTS)
    tensors[name].view(-1)[-1] += 1
    save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})


def change_json(path: Path, **changes: object) -> None:
    content = json.loads(path.read_text())
    content.update(changes)
    path.write_text(json.dumps(content))


def shard(path: Path) -> None:
    """Spread the weights over three files with an index."""
    tensors = load_file(path / WEIGHTS)
    (path / WEIGHTS).unlink()
    weight_map = {name: f"model-{i % 3 + 1:05}-of-00003.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(weight_map.values()):
        save_file({n: t for n, t in tensors.items() if weight_map[n] == file}, path / file, metadata={"format": "pt"})
    (path / f"{WEIGHTS}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_identity_is_the_contents_and_not_the_folder(copy, family):
    assert identity(copy) == family("qwen2_5_vl").identity == models.load(copy, tower=True).identity
    assert len(identity(copy)) == 64
    shard(copy)
    assert identity(copy) == family("qwen2_5_vl").identity


@pytest.mark.parametrize(
    "change",
    [
        lambda path: change_tensor(path, "visual.merger.mlp.0.bias"),
        lambda path: change_tensor(path, "visual.patch_embed.proj.weight"),
        lambda path: change_json(path / "config.json", image_token_id=1505),
        lambda path: change_json(path / "processor_config.json", processor_class="Qwen2VLProcessor"),
        lambda path: change_json(path / "tokenizer.json", version="2.0"),
    ],
    ids=["a bias", "a weight", "config", "processor", "tokenizer"],
)
def test_identity_changes_with_whatever_an_embedding_depends_on(copy, change):
    from dynamo_epd.models.checkpoint import identity as digest
    from dynamo_epd.models.checkpoint import read_json

    before = digest(copy, read_json(copy / "config.json"))
    change(copy)
    assert digest(copy, read_json(copy / "config.json")) != before


def test_identity_changes_with_a_tensors_name_dtype_and_shape(copy):
    seen = {identity(copy)}
    tensors = load_file(copy / WEIGHTS)
    name = "visual.merger.mlp.0.bias"
    for changed in (
        {f"{name}2" if n == name else n: t for n, t in tensors.items()},
        {n: t.view(torch.int32) if n == name else t for n, t in tensors.items()},
        {n: t[None] if n == name else t for n, t in tensors.items()},
    ):
        save_file(changed, copy / WEIGHTS)
        seen.add(identity(copy))
    assert len(seen) == 4


def test_identity_stays_when_only_the_language_model_changes(copy):
    before = identity(copy)
    change_tensor(copy, "lm_head.weight")
    change_tensor(copy, "model.layers.0.mlp.up_proj.weight")
    change_json(copy / "config.json", transformers_version="4.0.0", quantization_config={"quant_method": "fp8"})
    from dynamo_epd.models.checkpoint import identity as digest
    from dynamo_epd.models.checkpoint import read_json

    assert digest(copy, read_json(copy / "config.json")) == before


def test_every_tensor_of_every_encoder_counts(model_dir, family):
    for name in ("cosmos3_omni", "llava_next", "nemotron_h_omni", "phi4_multimodal", "qwen3_omni_moe", "qwen2_audio"):
        tower = [span.name for span in tensor_spans(model_dir(name)) if not LANGUAGE_MODEL.match(span.name)]
        loaded = family(name).model
        own = sum(p.numel() for n, p in loaded.named_parameters() if not LANGUAGE_MODEL.match(n))
        sizes = {s.name: torch.Size(s.shape).numel() for s in tensor_spans(model_dir(name))}
        # Some checkpoints keep buffers that the model does not: never fewer than the encoder's parameters.
        assert sum(sizes[n] for n in tower) >= own > 0, name


@pytest.mark.parametrize("name", MODELS)
def test_no_family_loads_its_language_model(name, model_dir, family):
    """What is left of it in memory is a layer norm and a vocabulary of a few tokens."""
    whole = sum(torch.Size(s.shape).numel() for s in tensor_spans(model_dir(name)) if LANGUAGE_MODEL.match(s.name))
    loaded = sum(p.numel() for n, p in family(name).model.named_parameters() if LANGUAGE_MODEL.match(n))
    assert whole > 100_000 and loaded < whole / 50


def test_sharded_encoder_loads_the_same(copy, family):
    shard(copy)
    f, whole = models.load(copy, tower=True), family("qwen2_5_vl")
    item = f.prepare(Media("image", Image.effect_mandelbrot((90, 60), (-2, -1, 1, 1), 50).convert("RGB")), {})
    assert torch.equal(f.encode([item])[0], whole.encode([item])[0])


def test_incomplete_encoder_is_refused(copy):
    tensors = load_file(copy / WEIGHTS)
    del tensors["visual.merger.mlp.0.bias"]
    save_file(tensors, copy / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(
        ConfigError, match=r"lacks 1 tensors of the encoder, the first is .*visual\.merger\.mlp\.0\.bias"
    ):
        models.load(copy, tower=True)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: (p / WEIGHTS).write_bytes((p / WEIGHTS).read_bytes()[:-1000]), "not complete"),
        (lambda p: (p / WEIGHTS).write_bytes(b"\xff" * 100), "not a safetensors file"),
        (lambda p: (p / WEIGHTS).write_bytes(b"abc"), "not a safetensors file"),
        (lambda p: (p / WEIGHTS).rename(p / "pytorch_model.bin"), "bin files only"),
    ],
    ids=["cut", "garbage", "short", "pickle"],
)
@pytest.mark.parametrize("tower", [True, False])
def test_damaged_weights_are_a_configuration_error(copy, damage, message, tower):
    damage(copy)
    with pytest.raises(ConfigError, match=message):
        models.load(copy, tower=tower)


def test_quantised_language_model_leaves_the_encoder_alone(copy, family):
    change_json(copy / "config.json", quantization_config={"quant_method": "fp8", "activation_scheme": "dynamic"})
    f = models.load(copy, tower=True)
    assert f.identity == family("qwen2_5_vl").identity
    item = f.prepare(Media("image", Image.new("RGB", (90, 60), (9, 90, 200))), {})
    assert torch.equal(f.encode([item])[0], family("qwen2_5_vl").encode([item])[0])


def test_quantised_encoder_is_refused(copy):
    tensors = load_file(copy / WEIGHTS)
    tensors["visual.merger.mlp.0.weight"] = tensors["visual.merger.mlp.0.weight"].to(torch.float8_e4m3fn)
    save_file(tensors, copy / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"quantised encoder \(visual\.merger\.mlp\.0\.weight is F8_E4M3\)"):
        models.load(copy, tower=True)


def test_missing_shard_is_named(copy):
    shard(copy)
    (copy / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ConfigError, match="model-00002-of-00003"):
        models.load(copy, tower=False)


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "cuda" if not torch.cuda.is_available() else "tpu"])
def test_device_that_is_not_there(copy, device):
    with pytest.raises(ConfigError, match="device"):
        models.load(copy, tower=True, device=device)


def test_dtype_that_is_not_there(copy):
    with pytest.raises(ConfigError, match="dtype 'floaty'"):
        models.load(copy, tower=True, dtype="floaty")


@pytest.mark.parametrize("name", ["qwen2_5_omni", "qwen3_omni_moe"])
def test_thinker_inside_a_whole_omni_checkpoint(name, model_dir, family, tmp_path):
    path = shutil.copytree(model_dir(name), tmp_path / name)
    thinker = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({"model_type": name, "thinker_config": thinker}))
    tensors = {f"thinker.{n}": t for n, t in load_file(path / WEIGHTS).items()}
    save_file({**tensors, "talker.model.norm.weight": torch.ones(4)}, path / WEIGHTS, metadata={"format": "pt"})
    f, plain = models.load(path, tower=True), family(name)
    item = f.prepare(Media("image", Image.effect_mandelbrot((90, 60), (-2, -1, 1, 1), 50).convert("RGB")), {})
    assert torch.equal(f.encode([item])[0], plain.encode([item])[0])


_MEASURE = r"""
import re, sys, torch
from pathlib import Path
torch.set_num_threads(1)
import transformers
from dynamo_epd import models


def peak():  # of this process alone: ru_maxrss starts from that of the process which started it
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) // 1024


def use(model):  # weights are mapped from the file: they cost memory once they are used
    return sum(float(p.sum()) for p in model.parameters())


small, large = sys.argv[1:]
use(models.load(small, tower=True).model)
start = peak()
use(models.load(large, tower=True).model)
tower = peak()
use(transformers.AutoModelForImageTextToText.from_pretrained(large))
print(tower - start, peak() - start)
"""


def test_tower_costs_no_language_model(model_dir, tmp_path):
    """Peak memory beyond that of a process which has loaded a tiny model already, in MiB."""
    path = shutil.copytree(model_dir("qwen2_5_vl"), tmp_path / "large")
    raw = json.loads((path / "config.json").read_text())
    raw["text_config"] |= {"hidden_size": 512, "intermediate_size": 4096, "num_hidden_layers": 6, "vocab_size": 30000}
    raw["text_config"] |= {"layer_types": ["full_attention"] * 6}
    raw["text_config"]["rope_parameters"]["mrope_section"] = [16, 24, 24]
    raw["vision_config"] |= {"out_hidden_size": 512}
    (path / "config.json").write_text(json.dumps(raw))
    with torch.device("meta"):
        model = transformers.Qwen2_5_VLForConditionalGeneration(transformers.AutoConfig.from_pretrained(path))
    tensors = {name: torch.zeros(value.shape) for name, value in model.state_dict().items()}
    size = sum(t.nbytes for t in tensors.values()) >> 20
    save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})
    del tensors
    command = [sys.executable, "-W", "ignore", "-c", _MEASURE, str(model_dir("qwen2_5_vl")), str(path)]
    output = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
    tower, full = (int(number) for number in output.split()[-2:])
    assert size > 250
    assert full > 0.8 * size
    assert tower < 0.1 * size
