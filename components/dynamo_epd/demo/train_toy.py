# SPDX-License-Identifier: Apache-2.0
"""Train the toy model from scratch: ``python -m dynamo_epd.demo.train_toy OUT_DIR`` (about half an hour on a CPU).

With the defaults it then answers 99% of the questions about pictures that it has not seen. Everything is made here: the
tokenizer from the few sentences that it must know, the images and questions from ``toy_data``, the weights from a seed.
Configuration, processor and chat template are those of the checkpoint that comes with the package.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .toy_data import COLOURS, QUESTIONS, SHAPES, TOY_MODEL, Example, random_example

SPECIAL_TOKENS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|im_start|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
_IGNORE = -100


def make_tokenizer() -> Any:
    """A byte-level BPE tokenizer for the toy's sentences; special tokens come behind the merges."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    words = [*COLOURS, *SHAPES]
    corpus = [question.text for question in QUESTIONS] * 8
    corpus += [*words, *(f" {word}" for word in words), "user", "assistant", "system"] * 2
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=360, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")


def make_model_dir(out: Path) -> None:
    """Configuration, processor, chat template and tokenizer of an untrained toy in ``out``."""
    from transformers import AutoConfig

    out.mkdir(parents=True, exist_ok=True)
    for name in ("processor_config.json", "preprocessor_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copyfile(TOY_MODEL / name, out / name)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (TOY_MODEL / "chat_template.jinja").read_text()
    tokenizer.save_pretrained(out)
    config = AutoConfig.from_pretrained(TOY_MODEL)
    config.text_config.vocab_size = len(tokenizer)
    for name, token in (
        ("image_token_id", "<|image_pad|>"),
        ("video_token_id", "<|video_pad|>"),
        ("vision_start_token_id", "<|vision_start|>"),
        ("vision_end_token_id", "<|vision_end|>"),
    ):
        setattr(config, name, tokenizer.convert_tokens_to_ids(token))
    config.text_config.eos_token_id = tokenizer.eos_token_id
    config.text_config.bos_token_id = config.text_config.pad_token_id = tokenizer.pad_token_id
    config.save_pretrained(out)


def batch_of(processor: Any, examples: Sequence[Example]) -> dict[str, torch.Tensor]:
    """Model inputs of ``examples``, padded on the right, with labels on the answers only."""
    prompts = [processor.apply_chat_template(e.messages(), add_generation_prompt=True) for e in examples]
    answers = [f"{e.answer}<|im_end|>" for e in examples]
    batch = processor(
        text=[prompt + answer for prompt, answer in zip(prompts, answers, strict=True)],
        images=[picture.draw() for e in examples for picture in e.pictures],
        padding=True,
        padding_side="right",
        return_tensors="pt",
    )
    labels = torch.full_like(batch["input_ids"], _IGNORE)
    for row, answer in enumerate(answers):
        end = int(batch["attention_mask"][row].sum())
        start = end - len(processor.tokenizer(answer)["input_ids"])
        labels[row, start:end] = batch["input_ids"][row, start:end]
    return {**batch, "labels": labels}


def make_model(model_dir: Path, seed: int) -> Any:
    """The toy in ``model_dir`` with new weights. Matrices keep the size of what they are given (the configuration's
    0.02 is meant for models of thousands of columns)."""
    from transformers import AutoConfig, Qwen2_5_VLForConditionalGeneration

    torch.manual_seed(seed)
    model = Qwen2_5_VLForConditionalGeneration(AutoConfig.from_pretrained(model_dir))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 and "embed_tokens" not in name and "lm_head" not in name:
                parameter.normal_(0, parameter[0].numel() ** -0.5)
    return model.train()


def train(
    out: Path, *, steps: int = 8000, batch_size: int = 32, learning_rate: float = 1e-3, seed: int = 0
) -> list[float]:
    """Train a toy model and save it in ``out``. Returns the loss of every step.

    The first 60% of the steps ask about one picture only: their prompts are half as long, and two pictures cannot be
    told apart before one is understood.
    """
    from transformers import AutoProcessor

    make_model_dir(out)
    rng = np.random.default_rng(seed)
    processor = AutoProcessor.from_pretrained(out)
    model = make_model(out, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.01, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=max(steps, 2), pct_start=0.05)
    losses = []
    for step in range(steps):
        pictures = 1 if step < 0.6 * steps else None
        examples = [random_example(rng, pictures) for _ in range(batch_size)]
        loss = model(**batch_of(processor, examples)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
        if step % 100 == 99:
            print(f"step {step + 1} of {steps}: loss {np.mean(losses[-100:]):.4f}", flush=True)
    model.eval().save_pretrained(out)
    return losses


@torch.inference_mode()
def accuracy(model_dir: Path, examples: Sequence[Example]) -> float:
    """Share of ``examples`` that the model in ``model_dir`` answers right, greedily."""
    from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration

    processor = AutoProcessor.from_pretrained(model_dir)
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(model_dir).eval()
    right = 0
    for e in examples:
        prompt = processor.apply_chat_template(e.messages(), add_generation_prompt=True)
        inputs = processor(text=[prompt], images=[picture.draw() for picture in e.pictures], return_tensors="pt")
        output = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        right += processor.tokenizer.decode(output, skip_special_tokens=True).strip() == e.answer
    return right / len(examples)


def main(argv: Sequence[str] | None = None) -> int:
    """Train, measure on examples that training has not seen, and print both."""
    parser = argparse.ArgumentParser(prog="train_toy", description=__doc__)
    parser.add_argument("out", type=Path, help="where the checkpoint is written")
    parser.add_argument("--steps", type=int, default=8000)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    train(args.out, steps=args.steps, batch_size=args.batch_size, seed=args.seed)
    rng = np.random.default_rng(args.seed + 1_000_003)
    for pictures in (1, 2):
        share = accuracy(args.out, [random_example(rng, pictures) for _ in range(200)])
        print(f"held-out accuracy with {pictures} image{'s' if pictures > 1 else ''}: {share:.1%}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
