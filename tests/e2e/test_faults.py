# SPDX-License-Identifier: Apache-2.0
"""Every fault of a request is told to the client as what it is, and the next request works."""

from __future__ import annotations

import base64
import io
import re

import pytest
from PIL import Image

from dynamo_epd.demo.toy_data import COLOUR, Picture
from dynamo_epd.serve.client import chat, png_data_url, user

from .conftest import MODEL

GOOD = Picture("blue", "red", "circle")


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def bomb() -> bytes:
    return png(Image.new("1", (60000, 60000)))


CASES = {
    "html": (lambda media: [data_url(b"<!doctype html><html>not found</html>")], "image 1", "HTML"),
    "truncated": (lambda media: [data_url(png(GOOD.draw())[:-40])], "image 1", "damaged|truncated|incomplete"),
    "empty": (lambda media: [data_url(b"")], "image 1", "empty"),
    "unreachable": (lambda media: ["https://example.invalid/x.png"], "image 1", "resolve"),
    # The frontend's own policy refuses addresses of the machine, in its own words.
    "private": (lambda media: ["https://127.0.0.1:9/x.png"], "", "invalid request"),
    "plain_http": (lambda media: ["http://example.invalid/x.png"], "image 1", "http"),
    "outside": (lambda media: [(media.parent / "secret.png").as_uri()], "image 1", "may be read"),
    "missing": (lambda media: [(media / "nothing.png").as_uri()], "image 1", "may be read"),
    "second_of_two": (lambda media: [png_data_url(GOOD.draw()), data_url(b"GIF89a??")], "image 2", ""),
    "too_large": (lambda media: [data_url(b"\x89PNG\r\n\x1a\n" + b"\0" * (3 << 20))], "image 1", "limit"),
    "bomb": (lambda media: [data_url(bomb())], "image 1", "pixels"),
    "hundred": (lambda media: [png_data_url(GOOD.draw())] * 100, "100", "limit"),
}


@pytest.fixture(scope="session", autouse=True)
def secret(media):
    (media.parent / "secret.png").write_bytes(png(GOOD.draw()))


async def works(http, stack):
    answer = await chat(http, stack.url, MODEL, [user(GOOD.draw(), COLOUR.text)], max_tokens=4)
    assert (answer.status, answer.text) == (200, "red")


@pytest.mark.parametrize("case", CASES)
async def test_a_bad_item_is_a_400_that_names_it(http, stack, media, case):
    make, item, reason = CASES[case]
    answer = await chat(http, stack.url, MODEL, [user(*make(media), COLOUR.text)], max_tokens=4)
    assert answer.status == 400, answer
    assert item in answer.text
    assert re.search(reason, answer.text, re.IGNORECASE), answer.text
    assert "iVBOR" not in answer.text
    await works(http, stack)


async def test_more_placeholders_than_images(http, stack):
    text = "<|vision_start|><|image_pad|><|vision_end|>" + COLOUR.text
    answer = await chat(http, stack.url, MODEL, [user(GOOD.draw(), text)], max_tokens=4)
    assert answer.status == 400 and "2 image placeholders" in answer.text and "1 image item" in answer.text
    answer = await chat(http, stack.url, MODEL, [user(text)], max_tokens=4)
    assert answer.status == 400 and "1 image placeholder" in answer.text and "0 image items" in answer.text
    await works(http, stack)


async def test_a_prompt_beyond_the_model(http, stack):
    answer = await chat(http, stack.url, MODEL, [user(*[GOOD.draw()] * 10, "What? " * 300)], max_tokens=4)
    assert answer.status == 400 and "512" in answer.text
    await works(http, stack)


@pytest.mark.parametrize("option", [{"n": 2}, {"presence_penalty": 0.5}, {"repetition_penalty": 1.5}])
async def test_an_option_that_is_not_honoured_is_refused(http, stack, option):
    answer = await chat(http, stack.url, MODEL, [user(GOOD.draw(), COLOUR.text)], max_tokens=4, **option)
    assert answer.status >= 400, answer
    await works(http, stack)


async def test_options_that_drown_the_pixels(http, stack):
    answer = await chat(
        http,
        stack.url,
        MODEL,
        [user(GOOD.draw(), COLOUR.text)],
        max_tokens=4,
        mm_processor_kwargs={"rescale_factor": 1e300},
    )
    assert answer.status == 400 and "image 1" in answer.text, answer
    await works(http, stack)


async def test_an_unknown_processor_option(http, stack):
    answer = await chat(
        http, stack.url, MODEL, [user(GOOD.draw(), COLOUR.text)], max_tokens=4, mm_processor_kwargs={"colour": 1}
    )
    assert answer.status == 400 and "colour" in answer.text
    await works(http, stack)


@pytest.mark.parametrize("options", ["x", [1], 3])
async def test_processor_options_that_are_no_object(http, stack, options):
    answer = await chat(
        http, stack.url, MODEL, [user(GOOD.draw(), COLOUR.text)], max_tokens=4, mm_processor_kwargs=options
    )
    assert answer.status == 400 and "must be an object" in answer.text
    await works(http, stack)
