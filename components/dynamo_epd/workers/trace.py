# SPDX-License-Identifier: Apache-2.0
"""``--trace-requests DIR``: one file per request with everything that decides its block keys, and no media."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Sequence
from pathlib import Path

from ..contract.errors import ConfigError
from ..contract.trace import encode_trace, make_trace
from ..models.base import Family
from .prompt import Prompt

logger = logging.getLogger(__name__)


class RequestTracer:
    """Writes traces for ``dynamo-epd explain``.

    Args:
        folder: made where it is missing.
        role: of the worker; part of the file's name, since a request may pass two workers.

    Raises:
        ConfigError: the folder cannot be made.
    """

    def __init__(self, folder: Path, family: Family, *, role: str, tokens_per_block: int):
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--trace-requests {folder}: {error}") from error
        self._folder, self._family, self._role, self._block = folder, family, role, tokens_per_block
        self._failing = False

    def write(self, prompt: Prompt, unexpanded: Sequence[int], request_id: str) -> None:
        """Write ``<request id>.<role>.json``. Where that fails (a full disk, a folder that is gone), the trace is lost
        and the request goes on; the first failure in a row is logged."""
        tokenizer = self._family.tokenizer
        trace = make_trace(
            prompt.layout,
            prompt.multimodal_input,
            prompt.items,
            vocab_size=self._family.vocab_size,
            tokens_per_block=self._block,
            unexpanded_token_ids=unexpanded,
            cache_salt=prompt.cache_salt,
            request_id=request_id,
            role=self._role,
            model=self._family.identity,
            kind=prompt.key_kind,
            reason=prompt.key_reason,
            texts={int(t): tokenizer.decode([int(t)]) for t in set(prompt.layout.token_ids.tolist())},
        )
        name = re.sub(r"[^\w.-]", "_", request_id)[:100]
        path = self._folder / f"{name}.{self._role}.json"
        try:
            path.touch(mode=0o600)  # the text of a prompt: for the worker's own user
            path.write_bytes(encode_trace(trace))
            self._failing = False
        except OSError as error:
            if not self._failing:
                logger.warning(
                    "request %s is not traced, nor those that follow while this lasts: %s", request_id, error
                )
            self._failing = True
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
