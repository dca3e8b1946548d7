# SPDX-License-Identifier: Apache-2.0
"""``dynamo-epd keys``: the block keys that TensorRT-LLM derives for a prompt, as JSON."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from ..contract import block_keys_v1
from ..contract.block_keys import AugmentedTokens, augmented_tokens, block_keys, root_key
from ..contract.errors import InvalidRequest
from ..contract.trace import RequestTrace, decode_trace, parse_multimodal_input

INPUT_FORM = """\
The input is one JSON object:
  {"prompt_token_ids": [...], "multimodal_input": {the seven fields} or null, "vocab_size": N, "tokens_per_block": N,
   "cache_salt": string or null, "lora_id": N or null, "slices": [{"start": N, "end": N}]}
A file that a worker wrote with --trace-requests will do as well. The first of the V2 keys is the root's."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "keys",
        help="print the KV block keys of a prompt",
        description="Print the KV block keys that TensorRT-LLM derives for a prompt.",
        epilog=INPUT_FORM,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", nargs="?", default="-", metavar="FILE", help="input (default: standard input)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    print(json.dumps(keys_of(read_trace(args.file))))
    return 0


def read_trace(file: str) -> RequestTrace:
    """The request in ``file``, or on standard input for ``-``. Raises ``InvalidRequest``."""
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise InvalidRequest(f"{file} cannot be read: {error.strerror}") from error
    return decode_trace(data, "standard input" if file == "-" else file)


def keys_of(trace: RequestTrace) -> dict[str, Any]:
    """All keys of the prompt in the form of ``conformance/block_keys.json``. Raises ``InvalidMetadata``."""
    mm = parse_multimodal_input(trace)
    ids, size = trace.prompt_token_ids, trace.tokens_per_block
    root = root_key(trace.lora_id, trace.cache_salt)
    tokens = augmented_tokens(ids, mm, trace.vocab_size)
    extra = block_keys_v1.extra_keys(mm, len(ids), size)
    hashes = block_keys_v1.block_hashes(ids, mm, size, cache_salt=trace.cache_salt, lora_id=trace.lora_id)
    return {
        "v2_augmented_token_ids": _json(tokens),
        "v2_block_keys": [key.hex() for key in [root, *block_keys(tokens, size, root)]],
        "v1_extra_keys": [[[digest.hex(), offset] for digest, offset in block] for block in extra],
        "v1_block_hashes": hashes,
        "slices": [
            {"start": part.start, "end": part.end, "v2_augmented_token_ids": _json(tokens[part.start : part.end])}
            for part in trace.slices
        ],
    }


def _json(tokens: AugmentedTokens) -> list[int | str]:
    return [token.hex() if isinstance(token, bytes) else token for token in tokens.tolist()]
