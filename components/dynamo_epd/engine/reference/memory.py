# SPDX-License-Identifier: Apache-2.0
"""Fits the configuration to the model and to the memory that there is."""

from __future__ import annotations

import logging
import os
from dataclasses import replace

import torch

from ...contract.errors import ConfigError
from .config import ReferenceConfig
from .model import LanguageModel

logger = logging.getLogger(__name__)

# Share of a CPU's free memory that KV may take where max_tokens is not given.
_CPU_FRACTION = 0.25


def fit(config: ReferenceConfig, model: LanguageModel) -> tuple[ReferenceConfig, int]:
    """The configuration as it can be run, and the number of KV blocks.

    Raises:
        ConfigError: there is no memory for even one block.
    """
    size = config.tokens_per_block
    tokens = config.max_tokens
    if tokens is None:
        # What every request of a full batch can need; more would never be used without block reuse.
        tokens = min(config.max_batch_size * -(-config.max_seq_len // size) * size, _tokens_in_memory(config, model))
    blocks = tokens // size
    if blocks < 1:
        raise ConfigError("there is no memory for the KV cache: set kv_cache_config.max_tokens")
    if blocks * size < config.max_seq_len:
        logger.warning(
            "max_seq_len is reduced from %d to the KV budget of %d tokens", config.max_seq_len, blocks * size
        )
    if model.attention is None and config.enable_block_reuse:
        logger.warning("block reuse is off: %s keeps a recurrent state besides KV", model.config.model_type)
    fitted = replace(
        config,
        max_seq_len=min(config.max_seq_len, blocks * size),
        max_batch_size=min(config.max_batch_size, config.max_num_tokens),
        enable_block_reuse=config.enable_block_reuse and model.attention is not None,
    )
    return fitted, blocks


def _tokens_in_memory(config: ReferenceConfig, model: LanguageModel) -> int:
    attention = model.attention
    if attention is None:
        return config.max_batch_size * config.max_seq_len
    if model.device.type == "cuda":
        free = int(torch.cuda.mem_get_info(model.device)[0] * config.free_gpu_memory_fraction)
    else:
        pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
        free = int(os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE") * _CPU_FRACTION)
    return free // (len(attention.layers) * 2 * attention.kv_heads * attention.head_dim * model.dtype.itemsize)
