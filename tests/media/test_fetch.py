# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
import base64
import os
import socket
import tracemalloc
from pathlib import Path

import pytest
from aiohttp import web
from dynamo.common.http.url_validator import UrlValidationPolicy

from dynamo_epd.contract.errors import ConfigError, InvalidRequest, Unavailable
from dynamo_epd.media.fetch import fetch, shown
from dynamo_epd.media.limits import MediaLimits

CLOSED = UrlValidationPolicy()
PAYLOAD = bytes(range(256)) * 3


async def get(url: str, policy: UrlValidationPolicy = CLOSED, limits: MediaLimits | None = None) -> bytes:
    return await fetch(url, policy=policy, limits=limits or MediaLimits(), label="image 2")


async def refused(url: str, policy: UrlValidationPolicy = CLOSED, limits: MediaLimits | None = None) -> str:
    with pytest.raises(InvalidRequest) as caught:
        await get(url, policy, limits)
    assert caught.value.item == "image 2"
    message = str(caught.value)
    assert message.startswith("image 2: ") and len(message) < 700
    return message


def base64_url(data: bytes, header: str = "image/png;base64") -> str:
    return f"data:{header},{base64.b64encode(data).decode()}"


@pytest.mark.parametrize(
    "url",
    [
        base64_url(PAYLOAD),
        base64_url(PAYLOAD, "image/svg+xml;charset=utf-8;name=a b;base64"),
        base64_url(PAYLOAD, ";base64"),
        base64_url(PAYLOAD, "image/png;BASE64").replace("data:", "DATA:"),
        base64_url(PAYLOAD).replace("+", "%2B").replace("/", "%2F").replace("=", "%3D").replace("image%2F", "image/"),
        "data:image/png;base64," + base64.encodebytes(PAYLOAD).decode(),
        "data:," + "".join(f"%{byte:02x}" for byte in PAYLOAD),
        "data:text/plain;charset=x;base64x," + "".join(f"%{byte:02X}" for byte in PAYLOAD),
    ],
)
async def test_data_urls_give_their_bytes(url: str) -> None:
    assert await get(url) == PAYLOAD


async def test_percent_encoded_data_mixes_plain_and_escaped_characters() -> None:
    assert await get("data:text/plain,a%20b+c%25") == b"a b+c%"


@pytest.mark.parametrize(
    "url, reason",
    [
        ("data:image/png;base64,SECRET!payload", "base64"),
        ("data:image/png;base64,SECRE", "base64"),
        ("data:image/png;base64,SECRET_-", "base64"),
        ("data:image/png;base64,SÉCRET==", "base64"),
        ("data:image/png;base64,\ud800SECRET", "base64"),
        ("data:image/png;base64", "comma"),
        ("data:", "comma"),
        ("data:image/png;base64,", "empty"),
        ("data:,", "empty"),
    ],
)
async def test_bad_data_urls_are_refused_without_their_payload(url: str, reason: str) -> None:
    message = await refused(url)
    assert reason in message
    assert "SECR" not in message


async def test_the_size_cap_holds_for_data_urls_on_the_byte() -> None:
    limits = MediaLimits(max_file_size_bytes=len(PAYLOAD))
    assert await get(base64_url(PAYLOAD), limits=limits) == PAYLOAD
    assert await get("data:," + "%41" * len(PAYLOAD), limits=limits) == b"A" * len(PAYLOAD)
    for url in (base64_url(PAYLOAD + b"x"), "data:," + "%41" * (len(PAYLOAD) + 1), "data:," + "A" * (8 * len(PAYLOAD))):
        assert "--max-file-size-mb" in await refused(url, limits=limits)


@pytest.mark.parametrize("url", ["", " https://example.com/", "ftp://example.com/a", "javascript:alert(1)", "blob:x"])
async def test_other_references_are_refused(url: str) -> None:
    await refused(url, UrlValidationPolicy(True, True, "/"))


async def test_an_overlong_url_is_refused_and_not_repeated() -> None:
    assert "8192" in await refused("https://example.com/" + "a" * 10_000)


async def test_http_gives_the_body_and_follows_redirects(serve, open_policy) -> None:
    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        if request.path == "/moved":
            return web.Response(status=302, headers={"Location": "/image.png?x=1"})
        return web.Response(body=PAYLOAD)

    base = await serve(handler)
    assert await get(f"{base}/image.png", open_policy) == PAYLOAD
    assert await get(f"{base}/moved", open_policy) == PAYLOAD
    assert await get(f"HTTP{base[4:]}/image.png", open_policy) == PAYLOAD


async def test_urls_that_differ_in_letter_case_or_query_never_collide(serve, open_policy) -> None:
    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(body=request.raw_path.encode())

    base = await serve(handler)
    paths = ["/Cat.png", "/cat.png", "/cat.png?A", "/cat.png?a", "/%41", "/A%2Fb", "/A/b"]
    bodies = await asyncio.gather(*(get(base + path, open_policy) for path in paths * 3))
    assert len(set(bodies)) == len({b for p, b in zip(paths, bodies, strict=False)})
    assert bodies[0] != bodies[1] and bodies[2] != bodies[3]
    assert bodies[: len(paths)] * 3 == bodies


@pytest.mark.parametrize("status", [301, 404, 403, 410, 500, 503])
async def test_an_error_status_is_named_and_the_query_is_not(status, serve, open_policy) -> None:
    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        location = {"Location": "/gone?token=SECRET#SECRET"} if request.path == "/a.png" and status == 301 else {}
        return web.Response(status=status if location or status != 301 else 404, headers=location, reason="SECRET")

    base = await serve(handler)
    credentials = base.replace("http://", "http://SECRET:SECRET@")
    message = await refused(f"{credentials}/a.png?token=SECRET&x#SECRET", open_policy)
    assert f"HTTP {404 if status == 301 else status}" in message
    assert f"{base}/a.png" in message
    assert "SECRET" not in message


async def test_endless_redirects_end(serve, open_policy) -> None:
    seen = []

    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        seen.append(request.path)
        return web.Response(status=307, headers={"Location": f"/{len(seen)}?token=SECRET"})

    message = await refused(await serve(handler) + "/0?token=SECRET", open_policy)
    assert "redirects" in message and "SECRET" not in message
    assert len(seen) == 4


@pytest.mark.parametrize(
    "target", ["file:///etc/passwd", "ftp://127.0.0.1/x?SECRET", "data:,SECRET", "http://[::SECRET", "http:///x"]
)
async def test_redirects_are_checked(target: str, serve, open_policy) -> None:
    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(status=302, headers={"Location": target})

    message = await refused(await serve(handler) + "/a", open_policy)
    assert "SECRET" not in message


async def test_the_size_cap_holds_while_downloading(serve, open_policy) -> None:
    written: list[int] = []

    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse()
        response.enable_chunked_encoding()
        await response.prepare(request)
        for _ in range(int(request.query_string)):
            await response.write(b"x" * 1000)
            written.append(1000)
        return response

    base = await serve(handler)
    limits = MediaLimits(max_file_size_bytes=5000)
    assert len(await get(f"{base}/a?5", open_policy, limits)) == 5000
    assert "5000 byte" in await refused(f"{base}/a?6", open_policy, limits)
    assert "empty" in await refused(f"{base}/a?0", open_policy, limits)
    assert "5000 byte" in await refused(f"{base}/a?100000", open_policy, limits)
    assert sum(written) < 50_000_000


async def test_a_server_that_does_not_answer_in_time(serve, open_policy) -> None:
    never = asyncio.Event()

    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        await never.wait()
        return web.Response()

    base = await serve(handler)
    limits = MediaLimits(fetch_timeout=0.2)
    assert "0.2 s" in await refused(f"{base}/slow.png?token=SECRET", open_policy, limits)
    never.set()


async def test_many_slow_redirects_do_not_add_up(serve, open_policy) -> None:
    """Each hop stays below the timeout; their sum does not."""
    hops = 0

    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        nonlocal hops
        hops += 1
        await asyncio.sleep(0.2)
        return web.Response(status=302, headers={"Location": f"/{hops}"})

    assert "0.3 s" in await refused(await serve(handler) + "/0", open_policy, MediaLimits(fetch_timeout=0.3))
    assert hops <= 2


async def test_an_unreachable_server(serve, open_policy) -> None:
    await serve(lambda request: web.Response())
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        message = await refused(f"http://user:SECRET@127.0.0.1:{port}/a.png?SECRET", open_policy)
    assert "cannot be fetched" in message and "onnect" in message and "SECRET" not in message


async def test_a_body_that_breaks_off(serve, open_policy) -> None:
    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "100"})
        await response.prepare(request)
        await response.write(b"half")
        request.transport.close()
        return response

    assert "cannot be fetched" in await refused(await serve(handler) + "/a.png", open_policy)


@pytest.mark.parametrize(
    "url",
    [
        "http://example.com/a.png?SECRET",
        "https://127.0.0.1/a.png?SECRET",
        "https://localhost/a.png?SECRET",
        "https://169.254.169.254/latest/meta-data?SECRET",
        "https://[::1]/a",
        "https:///a.png?SECRET",
        "https://[bad/a.png?SECRET",
        "https:user:SECRET@host/x",
        "https://exa mple.com/a?SECRET",
        "https://example.com/a\n?SECRET",
    ],
)
async def test_the_default_policy_keeps_the_inside_closed(url: str) -> None:
    assert "SECRET" not in await refused(url)


async def test_a_proxy_that_is_not_trusted_is_no_fault_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("DYN_MM_TRUST_EGRESS_PROXY", raising=False)
    with pytest.raises(Unavailable, match="image 2: https://8.8.8.8/a cannot be fetched") as caught:
        await get("https://8.8.8.8/a?SECRET")
    assert "SECRET" not in str(caught.value)


@pytest.fixture
def allowed(tmp_path: Path) -> Path:
    folder = tmp_path / "allowed"
    folder.mkdir()
    (folder / "a b#c%41?.png").write_bytes(PAYLOAD)
    (folder / "A.png").write_bytes(b"upper")
    (folder / "a.png").write_bytes(b"lower")
    (tmp_path / "outside.png").write_bytes(b"outside")
    (tmp_path / "allowed-not").mkdir()
    (tmp_path / "allowed-not" / "x.png").write_bytes(b"outside")
    return folder


def local(folder: Path) -> UrlValidationPolicy:
    return UrlValidationPolicy(allowed_local_path=str(folder))


async def test_files_under_the_allowed_folder(allowed: Path) -> None:
    policy = local(allowed)
    path = allowed / "a b#c%41?.png"
    for url in (str(path), path.as_uri(), path.as_uri().replace("file://", "FILE://localhost")):
        assert await get(url, policy) == PAYLOAD
    assert await get(f"file://{allowed}/a.png?version=1", policy) == b"lower"
    assert await get(f"file:{allowed}/A.png", policy) == b"upper"
    (allowed / "link.png").symlink_to(allowed / "a.png")
    assert await get(str(allowed / "link.png"), policy) == b"lower"


async def test_no_file_without_an_allowed_folder(allowed: Path) -> None:
    for url in (str(allowed / "a.png"), (allowed / "a.png").as_uri()):
        assert "--allowed-local-media-path" in await refused(url)


async def test_nothing_outside_and_no_way_to_ask_what_exists(allowed: Path) -> None:
    (allowed / "link.png").symlink_to(allowed.parent / "outside.png")
    (allowed / "folder").symlink_to(allowed.parent)
    (allowed / "loop").symlink_to(allowed / "loop")
    references = [
        f"{allowed}/../outside.png",
        f"{allowed}/link.png",
        f"{allowed}/folder/outside.png",
        f"{allowed.parent}/allowed-not/x.png",
        f"{allowed}/missing.png",
        f"{allowed}/loop",
        "/etc/passwd",
        "/etc/no-such-file",
    ]
    outside = [*references, *(f"file://{r}" for r in references), f"file://{allowed}/%2e%2e/outside.png"]
    outside += [
        f"file://{allowed}/..%2Foutside.png",
        f"file://{allowed}/a.png%00",
        f"{allowed}/a.png\0",
        "a.png",
        "~/a",
    ]
    outside += [f"file://elsewhere{allowed}/a.png", f"file:{allowed.name}/a.png"]
    messages = [await refused(url, local(allowed)) for url in outside]
    assert {message.partition(" is not a file")[2] for message in messages} == {
        " that may be read: it must exist, under the folder that the operator allows, and be given by its absolute path"
    }


async def test_paths_are_not_relative_to_the_workers_folder(allowed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(allowed)
    for url in ("a.png", "./a.png", "file:a.png"):
        assert "absolute path" in await refused(url, local(allowed))


async def test_what_is_not_a_regular_file(allowed: Path) -> None:
    os.mkfifo(allowed / "fifo")
    (allowed / "empty.png").touch()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(allowed / "s"))
        assert "cannot be read" in await refused(str(allowed / "s"), local(allowed))
    assert "regular" in await refused(str(allowed / "fifo"), local(allowed))
    assert "regular" in await refused(str(allowed), local(allowed))
    assert "empty" in await refused(str(allowed / "empty.png"), local(allowed))


async def test_the_size_cap_holds_for_files(allowed: Path) -> None:
    limits = MediaLimits(max_file_size_bytes=5)
    assert await get(str(allowed / "a.png"), local(allowed), limits) == b"lower"
    (allowed / "a.png").write_bytes(b"larger")
    assert "limit of 5 bytes" in await refused(str(allowed / "a.png"), local(allowed), limits)


async def test_the_size_cap_holds_while_reading() -> None:
    """The kernel's files say that they have 0 bytes."""
    status = f"/proc/{os.getpid()}/status"
    assert os.stat(status).st_size == 0
    assert len(await get(status, local(Path("/proc")))) > 5
    assert "limit of 5 bytes" in await refused(status, local(Path("/proc")), MediaLimits(max_file_size_bytes=5))


async def test_a_file_that_grows_is_not_read_to_its_end(allowed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open(allowed / "large.png", "wb") as file:
        file.truncate(64 << 20)
    before = os.stat(allowed / "a.png")
    monkeypatch.setattr(os, "fstat", lambda descriptor: before)
    tracemalloc.start()
    message = await refused(str(allowed / "large.png"), local(allowed), MediaLimits(max_file_size_bytes=1 << 20))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "limit of 1048576 bytes" in message and peak < 8 << 20


async def test_a_file_that_may_not_be_read(allowed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*args: object, **kwargs: object) -> int:
        raise PermissionError(13, "Permission denied", "SECRET")

    monkeypatch.setattr(os, "open", denied)
    message = await refused(str(allowed / "a.png"), local(allowed))
    assert message.endswith("cannot be read: Permission denied")


@pytest.mark.parametrize(
    "url, text",
    [
        ("https://user:pw@example.com:8/a/b.png?q=1#f", "https://example.com:8/a/b.png"),
        ("https://example.com/@a?x@y", "https://example.com/@a"),
        ("data:image/png;base64,AAAA", "data:image/png URL (26 characters)"),
        ("data:" + "a" * 500, f"data:{'a' * 40} URL (505 characters)"),
        ("/data/a\nb\x1b.png", "/data/a\N{REPLACEMENT CHARACTER}b\N{REPLACEMENT CHARACTER}.png"),
        ("https://example.com/" + "a" * 500, "https://example.com/" + "a" * 100 + "... (520 characters)"),
    ],
)
def test_shown(url: str, text: str) -> None:
    assert shown(url) == text


def test_limits_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="max_items"):
        MediaLimits(max_items=0)
    with pytest.raises(ConfigError, match="fetch_timeout"):
        MediaLimits(fetch_timeout=float("nan"))
