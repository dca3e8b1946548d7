# SPDX-License-Identifier: Apache-2.0
"""A model directory: its JSON files, its identity, and the encoder ("tower") alone out of its safetensors files.

Nothing here imports torch or transformers at module level: prefill and decode need the identity, not the tower.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from ..contract.errors import ConfigError

if TYPE_CHECKING:
    import torch

LANGUAGE_MODEL = re.compile(
    r"^(?:thinker\.|model\.|base_model\.)*"
    r"(?:language_model|text_model|layers|embed_tokens|norm|lm_head|talker|code2wav|token2wav)(?:\.|$)"
)
"""Names of tensors that only the language model (or a speech generator) uses. Everything else counts as encoder: a
name that is not known here makes the identity stricter, never looser."""

_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
_VOLATILE_KEYS = {"transformers_version", "_name_or_path", "quantization_config", "auto_map"}
"""Keys of ``config.json`` that change neither an embedding nor the prompt: a checkpoint whose language model was
quantised keeps its identity."""

_PLAIN_DTYPES = {"F64", "F32", "F16", "BF16", "I64", "I32", "BOOL"}
"""Dtypes of tensors that are what they are, without scales beside them."""

_INCOMPLETE = "the download of this checkpoint is not complete"
_CHUNK = 8 << 20
_SAMPLE = 4096
_SAFETENSORS_HEADER_LIMIT = 100 << 20


@dataclass(frozen=True)
class TensorSpan:
    """Where one tensor's bytes lie: ``file[begin:end]``."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    begin: int
    end: int


def read_json(path: Path) -> dict[str, Any]:
    """The object in ``path``. Raises ``ConfigError`` when it is missing or is not a JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path} does not exist: give the directory of a Hugging Face checkpoint") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return value


def tensor_spans(model_dir: Path) -> list[TensorSpan]:
    """All tensors of the checkpoint in name order, read from the safetensors headers alone.

    A sharded checkpoint is read through its index; a directory without weights gives an empty list.

    Raises:
        ConfigError: a shard is missing, a header is damaged, or there are only weights in another format.
    """
    index = model_dir / "model.safetensors.index.json"
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ConfigError(f"{index} has no weight_map")
        files = sorted({str(name) for name in weight_map.values()})
    else:
        files = sorted(path.name for path in model_dir.glob("*.safetensors"))
        if not files and any(model_dir.glob("*.bin")):
            raise ConfigError(f"{model_dir} has weights as .bin files only: convert them to safetensors")
    spans = [span for name in files for span in _header(model_dir / name)]
    return sorted(spans, key=lambda span: span.name)


def _header(path: Path) -> list[TensorSpan]:
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _SAFETENSORS_HEADER_LIMIT:
                raise ValueError(f"its header claims {length} bytes")
            header = json.loads(file.read(length))
        start = 8 + length
        spans = [
            TensorSpan(name, entry["dtype"], tuple(entry["shape"]), path, *(start + n for n in entry["data_offsets"]))
            for name, entry in header.items()
            if name != "__metadata__"
        ]
        size = path.stat().st_size
    except FileNotFoundError as error:
        raise ConfigError(f"{path} is missing: {_INCOMPLETE}") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ConfigError(f"{path} is not a safetensors file: {error}") from error
    if max((span.end for span in spans), default=0) > size:
        raise ConfigError(f"{path} ends before its tensors do: {_INCOMPLETE}")
    return spans


def identity(model_dir: Path, config: Mapping[str, Any]) -> str:
    """Digest (hex) of everything in the directory that an embedding or an expanded prompt depends on.

    That is: the model's configuration, the processors' configuration, the tokenizer, and names, dtypes, shapes and
    bytes of the encoder's tensors. The path is not part of it, nor how the tensors are spread over files; the
    language model's weights are not read. About 1 s per 2 GB of encoder.

    Raises:
        ConfigError: as ``tensor_spans``.
    """
    whole = blake3()
    parts: list[tuple[str, bytes]] = [("config", _canonical(_stable(config)))]
    parts += [
        (name, _canonical(read_json(model_dir / name))) for name in _PROCESSOR_FILES if (model_dir / name).exists()
    ]
    if (model_dir / "tokenizer.json").exists():
        parts.append(("tokenizer", _canonical(read_json(model_dir / "tokenizer.json"))))
    for span in tensor_spans(model_dir):
        if not LANGUAGE_MODEL.match(span.name):
            head = _canonical([span.name, span.dtype, list(span.shape)])
            parts.append(("tensor", head + _content_digest(span)))
    for tag, value in parts:
        for piece in (tag.encode(), value):
            whole.update(len(piece).to_bytes(8, "little"))
            whole.update(piece)
    return whole.hexdigest()


def weights_fingerprint(model_dir: Path) -> str:
    """A fingerprint (hex) of all weights: every tensor's name, dtype and shape, and samples of its bytes.

    Reads three pieces of each tensor, so it is quick for any checkpoint; two that were trained apart differ in all of
    them. It tells workers that run different language models apart; it is no content digest.

    Raises:
        ConfigError: as ``tensor_spans``.
    """
    whole = blake3()
    for span in tensor_spans(model_dir):
        whole.update(_canonical([span.name, span.dtype, list(span.shape)]))
        with span.file.open("rb") as file:
            for start in (span.begin, (span.begin + span.end) // 2, max(span.begin, span.end - _SAMPLE)):
                file.seek(start)
                whole.update(file.read(min(_SAMPLE, span.end - start)))
    return whole.hexdigest()


def _stable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _stable(item) for key, item in value.items() if key not in _VOLATILE_KEYS}
    return [_stable(item) for item in value] if isinstance(value, list) else value


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def _content_digest(span: TensorSpan) -> bytes:
    content = blake3(max_threads=blake3.AUTO)
    remaining = span.end - span.begin
    with span.file.open("rb") as file:
        file.seek(span.begin)
        while remaining > 0:
            chunk = file.read(min(_CHUNK, remaining))
            if not chunk:
                raise ConfigError(f"{span.file} ends inside {span.name}: {_INCOMPLETE}")
            content.update(chunk)
            remaining -= len(chunk)
    return content.digest()


def without_language_model(config: Any) -> Any:
    """A copy of a transformers configuration whose language model has no layers, eight tokens and no quantisation."""
    slim = type(config).from_dict({k: v for k, v in config.to_dict().items() if k != "quantization_config"})
    text = slim.get_text_config(decoder=True)
    layers = text.num_hidden_layers
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == layers:
            setattr(text, name, [])
    for name, value in (("num_hidden_layers", 0), ("vocab_size", 8)):
        setattr(text, name, value)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if getattr(text, name, None) is not None:
            setattr(text, name, None)
    return slim


def load_tower(model_dir: Path, model_class: Any, slim: Any, device: str, dtype: str | None) -> Any:
    """The model with its encoder's weights and no language model, in evaluation mode on ``device``.

    Args:
        model_class: the transformers class of the whole model.
        slim: its configuration as ``without_language_model`` gives it.
        dtype: name of a torch dtype, or None for the checkpoint's own.

    Raises:
        ConfigError: a tensor of the encoder is not in the checkpoint (it would be random), or loading failed.
    """
    import torch
    from safetensors import SafetensorError
    from transformers.utils import logging

    kind = getattr(torch, dtype, None) if dtype else "auto"
    if dtype and not isinstance(kind, torch.dtype):
        raise ConfigError(f"dtype {dtype!r} is none of torch's, such as bfloat16")
    where = resolve_device(device)
    spans = [span for span in tensor_spans(model_dir) if not LANGUAGE_MODEL.match(span.name)]
    if not spans:
        raise ConfigError(f"{model_dir} has no weights of an encoder in .safetensors files")
    packed = next((span for span in spans if span.dtype not in _PLAIN_DTYPES), None)
    if packed is not None:
        raise ConfigError(
            f"{model_dir} has a quantised encoder ({packed.name} is {packed.dtype}): run the encode worker on the "
            "checkpoint that it was made from"
        )
    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()  # the absent language model is reported tensor by tensor otherwise
    logging.disable_progress_bar()
    try:
        model, report = model_class.from_pretrained(
            model_dir,
            config=slim,
            dtype=kind,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            local_files_only=True,
        )
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise ConfigError(f"the encoder of {model_dir} could not be loaded: {error}") from error
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()
    lost = {str(entry[0] if isinstance(entry, tuple) else entry) for entry in report["mismatched_keys"]}
    absent = sorted(name for name in {*report["missing_keys"], *lost} if not LANGUAGE_MODEL.match(name))
    if absent:
        raise ConfigError(f"{model_dir} lacks {len(absent)} tensors of the encoder, the first is {absent[0]}")
    return model.eval().requires_grad_(False).to(where)


def resolve_device(device: str) -> torch.device:
    """``auto`` (CUDA where there is one), ``cpu``, ``cuda`` or ``cuda:N``. Raises ``ConfigError`` for anything else."""
    import torch

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise ConfigError(f"device {device!r} is not one of auto, cpu, cuda, cuda:N")
    if device != "cpu" and not torch.cuda.is_available():
        raise ConfigError(f"device {device!r} was asked for, but torch sees no GPU: use --device cpu or auto")
    return torch.device(device)
