# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import pytest

from dynamo_epd.contract.errors import InvalidRequest
from dynamo_epd.media.limits import MediaLimits
from dynamo_epd.media.source import MediaReference, parse_request_media


def parse(data: Any, uuids: Any = None, max_items: int = 64) -> list[MediaReference]:
    return parse_request_media(data, uuids, limits=MediaLimits(max_items=max_items))


def refused(data: Any, uuids: Any = None) -> str:
    with pytest.raises(InvalidRequest) as caught:
        parse(data, uuids)
    return str(caught.value)


def urls(*names: str) -> list[dict[str, str]]:
    return [{"Url": name} for name in names]


def test_references_are_labelled_within_their_modality() -> None:
    data = {"audio_url": urls("c.wav"), "image_url": urls("a.png", "b.png"), "video_url": urls("d.mp4")}
    assert parse(data, {"image_url": [None, "u2"], "video_url": ["v"], "audio_url": None}) == [
        MediaReference("image", 0, "image 1", "a.png", None),
        MediaReference("image", 1, "image 2", "b.png", "u2"),
        MediaReference("video", 0, "video 1", "d.mp4", "v"),
        MediaReference("audio", 0, "audio 1", "c.wav", None),
    ]


@pytest.mark.parametrize("data", [None, {}, {"image_url": []}, {"image_url": None, "other": []}])
def test_text_only(data: Any) -> None:
    assert parse(data) == [] and parse(data, {"image_url": []}) == []


def test_urls_are_not_changed_and_not_in_a_repr() -> None:
    (reference,) = parse({"image_url": urls("HTTPS://Example.com/A.PNG?q=SECRET ")})
    assert reference.url == "HTTPS://Example.com/A.PNG?q=SECRET "
    assert "SECRET" not in repr(reference)


def test_a_hundred_images_are_refused_with_the_limit() -> None:
    message = refused({"image_url": urls(*["a.png"] * 100)})
    assert "100 media items" in message and "limit is 64" in message
    assert len(parse({"image_url": urls(*["a.png"] * 32), "video_url": urls(*["a.mp4"] * 32)})) == 64


@pytest.mark.parametrize(
    "item, reason",
    [
        ({"Decoded": {"shape": [1]}}, "decoded by the frontend"),
        ({"UuidOnly": "u"}, "no content"),
        ({"Url": None}, "not given by a URL"),
        ({}, "not given by a URL"),
        ("a.png", "not given by a URL"),
        (None, "not given by a URL"),
    ],
)
def test_other_variants(item: Any, reason: str) -> None:
    message = refused({"image_url": [*urls("a.png"), item]})
    assert message.startswith("image 2: ") and reason in message


@pytest.mark.parametrize(
    "data, uuids, reason",
    [
        ([], None, "must be an object"),
        ("x", None, "must be an object"),
        ({"image_url": "a.png"}, None, "must be a list"),
        ({"point_cloud": urls("a")}, None, "unknown kind of media 'point_cloud'"),
        ({"image_url": urls("a")}, ["u"], "must be an object"),
        ({"image_url": urls("a")}, {"image_url": ["u", "v"]}, "2 entries for 1 image"),
        ({"image_url": urls("a", "b")}, {"image_url": ["u"]}, "1 entries for 2 image"),
        ({"image_url": urls("a")}, {"video_url": ["u"]}, "1 entries for 0 video"),
        ({"image_url": urls("a")}, {"image_url": [7]}, "image 1: its uuid"),
        ({"image_url": urls("a")}, {"image_url": [""]}, "image 1: its uuid"),
        ({"image_url": urls("a")}, {"image_url": ["u" * 513]}, "image 1: its uuid"),
    ],
)
def test_what_does_not_fit(data: Any, uuids: Any, reason: str) -> None:
    assert reason in refused(data, uuids)


@pytest.mark.parametrize(
    "url, kind",
    [
        ("file:///data/e.safetensors", "embedding"),
        ("/data/E.SafeTensors", "embedding"),
        ("https://h/e.safetensors?token=a.png#x", "embedding"),
        ("https://h/e%2Esafetensors", "embedding"),
        ("data:application/x-safetensors;base64,AAAA", "embedding"),
        ("DATA:application/vnd.safetensors,AAAA", "embedding"),
        ("https://h/a.png?name=e.safetensors", "media"),
        ("https://h/e.safetensors/a.png", "media"),
        ("data:image/png;name=e.safetensors;base64,AAAA", "media"),
        ("data:,safetensors", "media"),
        ("/data/safetensors", "media"),
    ],
)
def test_embedding_files_are_known_by_their_name(url: str, kind: str) -> None:
    assert parse({"image_url": urls(url)})[0].kind == kind


@pytest.mark.parametrize("url", ["/data/e.pt", "https://h/e.PTH?x", "file:///e.pkl"])
def test_pickles_are_not_opened(url: str) -> None:
    assert "save the embedding as .safetensors" in refused({"image_url": urls(url)})


def test_items_of_all_modalities_count_together() -> None:
    data = {"image_url": [{"Url": "data:,"}] * 2, "audio_url": [{"Url": "data:,"}]}
    assert len(parse(data, max_items=3)) == 3
    with pytest.raises(InvalidRequest, match="3 media items, the limit is 2"):
        parse(data, max_items=2)
