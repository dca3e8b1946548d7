# SPDX-License-Identifier: Apache-2.0
"""With block reuse on, what clients get is what plain transformers gives, however much the conversations share."""

from __future__ import annotations

import pytest

from ..conversations import wrong_answers
from .conftest import MODEL


async def test_answers_equal_plain_transformers(http, stack):
    assert await wrong_answers(http, stack, MODEL, 40, seed=1) == []


@pytest.mark.slow
async def test_answers_equal_plain_transformers_over_200_conversations(http, stack):
    assert await wrong_answers(http, stack, MODEL, 200, seed=2) == []
