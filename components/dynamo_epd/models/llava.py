# SPDX-License-Identifier: Apache-2.0
"""LLaVA, LLaVA-NeXT, Pixtral and Mistral 3: one run per image; Pixtral's row breaks and end are framing."""

from __future__ import annotations

from collections.abc import Sequence

from .general import GeneralFamily


class Llava(GeneralFamily):
    model_types = ("llava", "llava_next", "mistral3")

    def framing_tokens(self) -> Sequence[str]:
        names = ("image_break_token", "image_end_token")
        return tuple(token for name in names if (token := getattr(self.processor, name, None)))
