# SPDX-License-Identifier: Apache-2.0
"""A tiny model of each family with its workers started, one family at a time."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from dynamo_epd.models import Media

from ..models.tiny import make_weights, write_model_dir
from .cases import CASES, Part, item_by_item
from .harness import TOP, Answer, Stack
from .plain import Expected, Plain

CLOSE = 1e-4
"""Most that a log probability may differ from plain transformers'."""
GAP = 2 * CLOSE
"""Least distance of the two most likely tokens for the greedy choice to follow from their being that close."""

# Llama 4's forward in transformers 5.24 asks its language model's output for this.
if not hasattr(MoeCausalLMOutputWithPast, "image_outputs"):
    MoeCausalLMOutputWithPast.image_outputs = None


class Tiny:
    """A tiny model: its workers, what plain transformers says, and prompts."""

    def __init__(self, name: str, stack: Stack, plain: Plain):
        self.name, self.stack, self.plain = name, stack, plain
        self.family = stack.family
        self.hybrid = not stack.pair
        self._salts = itertools.count()
        self._expected: dict[tuple[str, int], Expected] = {}

    def text(self, parts: Sequence[Part]) -> str:
        """A user's turn as the chat template writes it."""
        template = getattr(self.family.processor, "chat_template", None) or self.family.tokenizer.chat_template
        content = [{"type": "text", "text": p} if isinstance(p, str) else {"type": p.modality} for p in parts]
        messages = [{"role": "user", "content": content}]
        return self.family.tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=True
        )

    def salt(self) -> str:
        """A cache salt that nobody else has."""
        return f"salt-{next(self._salts)}"

    def ask(self, case: str, seed: int, **options: Any) -> Answer:
        c = CASES[case]
        return self.stack.ask(self.text(c.parts(seed)), c.media(seed), kwargs=c.kwargs, **options)

    def expected(self, case: str, seed: int) -> Expected:
        if (case, seed) not in self._expected:
            c = CASES[case]
            self._expected[case, seed] = self.plainly(c.parts(seed), c.plain)
        return self._expected[case, seed]

    def plainly(self, parts: Sequence[Part], options: Mapping[str, Any] | None = None) -> Expected:
        """What plain transformers answers to a user's turn."""
        text, media = self.text(parts), [part for part in parts if isinstance(part, Media)]
        if item_by_item(self.name, media):
            return self.plain.answer_item_by_item(text, media)
        return self.plain.answer(text, media, options)


def same(answer: Answer, expected: Expected, decided: int = 1) -> None:
    """Assert that an answer is plain transformers' own, as far as rounding does not decide it.

    Args:
        decided: tokens that rounding must not decide. The log probabilities of the first are compared in any case.
    """
    assert answer.layout is not None and answer.layout.token_ids.tolist() == expected.ids
    sure = min(expected.sure(GAP), len(answer.tokens))
    assert sure >= decided, "choose another seed: rounding decides this answer"
    assert answer.tokens[:sure] == expected.tokens[:sure]
    for place, top in enumerate(answer.top[: sure + 1]):
        assert len(top) == TOP
        found = torch.tensor(list(top.values()))
        torch.testing.assert_close(found, expected.logprobs[place, list(top)], atol=CLOSE, rtol=0)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One family after the other, so that each is started once."""
    ours = [i for i, item in enumerate(items) if "tiny" in getattr(getattr(item, "callspec", None), "params", {})]
    ordered = sorted((items[i] for i in ours), key=lambda item: item.callspec.params["tiny"])
    for i, item in zip(ours, ordered, strict=True):
        items[i] = item


@pytest.fixture(scope="session")
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tiny]:
    """The family that the test names by an indirect parameter."""
    name = request.param
    path = write_model_dir(name, tmp_path_factory.mktemp("families") / name)
    model = make_weights(path, zlib.crc32(name.encode()))
    # Small random weights make every clip sound alike to some encoders.
    with torch.no_grad():
        for parameter in (p for n, p in model.named_parameters() if "audio" in n):
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(path)
    stack = Stack(path, pair="nemotron" not in name)
    try:
        config = transformers.AutoConfig.from_pretrained(path)
        model = getattr(transformers, config.architectures[0]).from_pretrained(path).eval()
        yield Tiny(name, stack, Plain(model, stack.family))
        stack.check()
    finally:
        stack.close()
