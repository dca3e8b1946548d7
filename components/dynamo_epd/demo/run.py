# SPDX-License-Identifier: Apache-2.0
"""``dynamo-epd demo``: a frontend and workers on this machine, checked answer by answer against plain transformers."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..serve.client import Answer, chat, open_client, user
from ..serve.stack import Stack, StackError, epd_services
from .scenario import RED, Ask, Part, scenario
from .toy_data import COLOUR, TOY_MODEL, Picture

if TYPE_CHECKING:
    from .plain import PlainTransformers, PromptPredictor

MODEL_NAME = "toy"
MAX_TOKENS = 8
_ENGINE_YAML = Path(__file__).parent / "engine.yaml"
_WIDTH = 150  # of the table, where the output is no terminal
_PROBE = RED.recoloured("white")
_PROBE_MESSAGES = [
    {"role": "user", "content": [{"type": "image", "image": _PROBE.draw()}, {"type": "text", "text": COLOUR.text}]}
]


@dataclass(frozen=True)
class Outcome:
    """One request of the demo and what became of it.

    Attributes:
        name: the request's name.
        image: its picture or pictures, in words.
        question: the last text.
        answer, expected: the served answer and plain transformers'.
        prompt_tokens, cached_tokens: usage as reported.
        shareable_tokens: prompt tokens in common with an earlier prompt of the same stack, by exact keys.
        ttft_ms: time to first token.
        ok: answer, prompt length and cached tokens are what they must be.
    """

    name: str
    image: str
    question: str
    answer: str
    expected: str
    prompt_tokens: int
    cached_tokens: int
    shareable_tokens: int
    ttft_ms: float
    ok: bool


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    p = subparsers.add_parser("demo", help="start a frontend and workers here, ask about images, check every answer")
    p.add_argument("--topology", choices=["e-p-d", "e-pd"], default="e-p-d", help="(default: %(default)s)")
    p.add_argument("--json", type=Path, metavar="FILE", help="also write the outcomes as JSON")
    p.add_argument("--engine", choices=["reference", "trtllm"], default="reference", help="(default: %(default)s)")
    p.add_argument("--deadline", type=float, default=180.0, metavar="S", help="seconds until the workers must be ready")
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the demo. Exit status 0 only if exact keys answered all right and placeholder keys did not."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    report: dict[str, Any] = {}
    for keys in ("exact", "placeholder"):
        try:
            outcomes = _run_stack(args, keys, console)
        except StackError as error:
            print(error, file=sys.stderr)
            return 1
        console.print(_table(outcomes, keys, args.topology))
        report[keys] = {
            "requests": [asdict(outcome) for outcome in outcomes],
            "correct": sum(o.answer == o.expected for o in outcomes),
            "total": len(outcomes),
        }
    exact, placeholder = report["exact"], report["placeholder"]
    exact_right = all(o["ok"] for o in exact["requests"])
    wrong = placeholder["total"] - placeholder["correct"]
    console.print(
        f"exact keys:       {exact['correct']} of {exact['total']} answers are plain transformers' answers"
        + ("" if exact_right else "  [red]and something is wrong: see the lines marked ✗[/red]")
    )
    console.print(
        f"placeholder keys: {placeholder['correct']} of {placeholder['total']} answers are right"
        + (f"; {wrong} were read off the blocks of another picture" if wrong else "  [red]they should not all be[/red]")
    )
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))
    return 0 if exact_right and wrong else 1


def _run_stack(args: argparse.Namespace, keys: str, console: Console) -> list[Outcome]:
    with tempfile.TemporaryDirectory(prefix="dynamo-epd-media-") as media, _progress(console) as progress:
        folder = Path(media)
        task = progress.add_task(f"{keys} keys: starting frontend and workers ({args.topology})", total=None)
        stack = Stack(
            epd_services(
                TOY_MODEL,
                MODEL_NAME,
                topology=args.topology,
                engine_args=("--engine", args.engine, "--extra-engine-args", str(_ENGINE_YAML), "--keys", keys),
                encode_args=(
                    "--allowed-local-media-path",
                    str(folder),
                    "--multimodal-embedding-cache-capacity-gb",
                    "0.1",
                ),
            ),
            MODEL_NAME,
        )
        from .plain import PlainTransformers, PromptPredictor  # torch and transformers: while the workers start

        with stack:
            plain, predictor = PlainTransformers(TOY_MODEL), PromptPredictor(TOY_MODEL)
            stack.wait_ready(args.deadline, probe=user(_PROBE.draw(), COLOUR.text))
            generates = args.topology == "e-pd"
            _, ids = plain.answer(_PROBE_MESSAGES, 1)
            predictor.remember(_PROBE_MESSAGES, ids[:-1] if generates else ())
            asks = list(scenario(folder))
            progress.update(task, description=f"{keys} keys: asking", total=len(asks), completed=0)

            def asked(count: int) -> None:
                progress.advance(task, count)
                stack.check()

            return asyncio.run(ask_all(stack.url, asks, plain, predictor, generates, asked))


async def ask_all(
    url: str,
    asks: list[Ask],
    plain: PlainTransformers,
    predictor: PromptPredictor,
    generates: bool,
    asked: Callable[[int], object] = lambda count: None,
) -> list[Outcome]:
    """Send the requests to a frontend and judge what comes back.

    Args:
        url: ``http://host:port`` of the frontend, which serves the toy model as ``toy``.
        predictor: remembers what the workers have seen before.
        generates: generated tokens stay in the cache that the next prompt meets (prefill and decode are one worker).
        asked: called after each request, or group of simultaneous ones, with their number.
    """
    outcomes: list[Outcome] = []
    given: dict[tuple[tuple[Part, ...], ...], str] = {}
    async with open_client() as session:
        for together, group in groupby(asks, key=lambda ask: ask.together or ask.name):
            batch = list(group)
            sent = [_messages(ask, given) for ask in batch]
            answers = await asyncio.gather(
                *(chat(session, url, MODEL_NAME, http, max_tokens=MAX_TOKENS) for http, _ in sent)
            )
            alone = together == batch[0].name
            for ask, answer, (_, local) in zip(batch, answers, sent, strict=True):
                given[ask.turns] = answer.text
                expected, ids = await asyncio.to_thread(plain.answer, local, MAX_TOKENS)
                length, shareable = predictor.shared(local)
                # The last token is chosen and never computed; a prefill worker's cache has no generated tokens at all.
                predictor.remember(local, ids[:-1] if generates else ())
                outcomes.append(_judge(ask, answer, expected, length, shareable if alone else length - 1, alone))
            asked(len(batch))
    return outcomes


def _judge(ask: Ask, answer: Answer, expected: str, length: int, shareable: int, alone: bool) -> Outcome:
    """Right is: plain transformers' answer, a prompt of the predicted length, and no more shared than is equal.

    A request that is alone must share all that is equal; among equal requests sent together one has to be first.
    """
    text = answer.text if answer.status == 200 else f"HTTP {answer.status}: {answer.text}"
    shared_right = answer.cached_tokens == shareable if alone else answer.cached_tokens <= shareable
    return Outcome(
        name=ask.name,
        image=", ".join(_words(picture) for picture in ask.pictures) or "-",
        question=ask.question,
        answer=text,
        expected=expected,
        prompt_tokens=answer.prompt_tokens,
        cached_tokens=answer.cached_tokens,
        shareable_tokens=shareable,
        ttft_ms=round(answer.ttft_ms, 2),
        ok=text == expected and answer.prompt_tokens == length and shared_right,
    )


def _messages(ask: Ask, given: dict[Any, str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The chat as it goes over HTTP, and as plain transformers takes it."""
    from PIL import Image

    http: list[dict[str, Any]] = []
    local: list[dict[str, Any]] = []
    for i, turn in enumerate(ask.turns):
        sent: list[Any] = []
        content: list[dict[str, Any]] = []
        for part in turn:
            if isinstance(part, str):
                sent.append(part)
                content.append({"type": "text", "text": part})
            else:
                sent.append(part.as_uri() if isinstance(part, Path) else part.draw())
                image = Image.open(part) if isinstance(part, Path) else part.draw()
                content.append({"type": "image", "image": image})
        http.append(user(*sent))
        local.append({"role": "user", "content": content})
        if i + 1 < len(ask.turns):
            said = given[ask.turns[: i + 1]]
            http.append({"role": "assistant", "content": said})
            local.append({"role": "assistant", "content": [{"type": "text", "text": said}]})
    return http, local


def _words(picture: Picture | Path) -> str:
    if isinstance(picture, Path):
        return picture.name
    return f"{picture.colour} {picture.shape} on {picture.background}"


def _table(outcomes: list[Outcome], keys: str, topology: str) -> Table:
    table = Table(title=f"{keys} keys, {topology}", title_justify="left", expand=False)
    for name in ("image", "question", "answer", "expected"):
        table.add_column(name, overflow="fold")
    for name in ("prompt", "cached", "TTFT ms"):
        table.add_column(name, justify="right")
    table.add_column("")
    for o in outcomes:
        right = o.answer == o.expected
        table.add_row(
            o.image,
            o.question,
            o.answer if right else f"[red]{o.answer}[/red]",
            o.expected,
            str(o.prompt_tokens),
            str(o.cached_tokens),
            f"{o.ttft_ms:.1f}",
            "✓" if (o.ok if keys == "exact" else right) else "[red]✗[/red]",
        )
    return table


@contextlib.contextmanager
def _progress(console: Console) -> Iterator[Progress]:
    columns = (SpinnerColumn(), TextColumn("{task.description} {task.completed}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        yield progress
