# SPDX-License-Identifier: Apache-2.0
"""The bytes behind a media reference: ``data:``, ``https:``, ``http:``, ``file:`` or a bare path.

What may be fetched is Dynamo's policy (``dynamo.common.http.url_validator``), as is the client that checks every
redirect against it. Nothing is cached here and no part of a URL is changed, so two URLs never stand for each other.
Messages show a URL without its query, fragment and credentials, and nothing of a payload.
"""

from __future__ import annotations

import asyncio
import base64
import os
import re
import stat
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from dynamo.common.http import HttpConfigurationError, HttpError, HttpStatusError, HttpTimeoutError, fetch_bytes
from dynamo.common.http.url_validator import UrlValidationError, UrlValidationPolicy, validate_local_path

from ..contract.errors import InvalidRequest, Unavailable
from .limits import MediaLimits

__all__ = ["MediaLimits", "fetch", "shown"]

_MAX_URL_LENGTH = 8192
_SHOWN_LENGTH = 120
_CHUNK = 1 << 20
_INLINE = 1 << 16
"""Characters of a ``data:`` URL that are decoded sooner than a thread is woken."""
_WHITESPACE = b" \t\r\n\f"


async def fetch(url: str, *, policy: UrlValidationPolicy, limits: MediaLimits, label: str) -> bytes:
    """The content of ``url``, 1 to ``limits.max_file_size_bytes`` bytes.

    Args:
        url: as the caller gave it. A path must be absolute and, with all links resolved, lie under
            ``policy.allowed_local_path``.
        policy: which hosts and folders may be read. Private addresses also need ``DYN_MM_ALLOW_INTERNAL=1`` in the
            environment, which Dynamo's connector reads.
        label: the item's name in messages (``"image 2"``).

    Raises:
        InvalidRequest: the reference is malformed, refused by the policy, empty, too large, or its server does not
            deliver within ``limits.fetch_timeout`` seconds: whoever chose the URL can choose another.
        Unavailable: an egress proxy is configured that Dynamo may not trust; the operator's fault, not the caller's.
    """
    try:
        return await asyncio.wait_for(_fetch(url, policy, limits, label), limits.fetch_timeout)
    except asyncio.TimeoutError as error:
        raise _timed_out(url, limits, label) from error


def shown(url: str) -> str:
    """``url`` for a message or a log line: no query, no fragment, no credentials, no payload, bounded."""
    if _scheme(url) == "data":
        media_type = re.match(r"[\w.+-]{0,40}(/[\w.+-]{0,60})?", url[5:110])
        return f"data:{media_type.group() if media_type else ''} URL ({len(url)} characters)"
    text = re.sub(r"[?#].*", "", url[: _MAX_URL_LENGTH + 1], flags=re.DOTALL)
    text = re.sub(r"^([A-Za-z][A-Za-z0-9+.-]*:/*)[^/]*@", r"\1", text)
    text = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
    return text if len(text) <= _SHOWN_LENGTH else f"{text[:_SHOWN_LENGTH]}... ({len(url)} characters)"


def _scheme(url: str) -> str:
    match = re.match(r"[A-Za-z][A-Za-z0-9+.-]{0,30}(?=:)", url)
    return match.group().lower() if match else ""


async def _fetch(url: str, policy: UrlValidationPolicy, limits: MediaLimits, label: str) -> bytes:
    scheme = _scheme(url)
    # Handled before anything parses the URL: urllib keeps its last parses, and these can be megabytes each.
    if scheme == "data":
        if len(url) <= _INLINE:
            return _decode_data_url(url, limits, label)
        return await asyncio.to_thread(_decode_data_url, url, limits, label)
    if not url or url[0].isspace():
        raise InvalidRequest("the URL is empty or begins with white space", item=label)
    if len(url) > _MAX_URL_LENGTH:
        raise InvalidRequest(f"the URL has {len(url)} characters, the limit is {_MAX_URL_LENGTH}", item=label)
    if scheme in ("http", "https"):
        return await _download(url, policy, limits, label)
    if scheme in ("", "file"):
        return await asyncio.to_thread(_read_file, url, scheme, policy, limits, label)
    raise InvalidRequest(f"URLs with the scheme {scheme}: are not fetched; use https:, data: or file:", item=label)


def _decode_data_url(url: str, limits: MediaLimits, label: str) -> bytes:
    """RFC 2397, with the base64 marker last in the header and ASCII white space allowed in base64."""
    name = shown(url)
    header, comma, payload = url[len("data:") :].partition(",")
    if not comma:
        raise InvalidRequest(f"{name} has no comma between its media type and its data", item=label)
    is_base64 = header.rpartition(";")[2].strip().lower() == "base64" and ";" in header
    # Percent-encoding triples a byte at most, so that what passes here costs a small multiple of the limit.
    if len(payload) // 4 > limits.max_file_size_bytes + 2:
        raise InvalidRequest(f"{name} {limits.too_large}", item=label)
    try:
        data = unquote_to_bytes(payload)
        if is_base64:
            data = base64.b64decode(data.translate(None, _WHITESPACE), validate=True)
    except ValueError as error:
        raise InvalidRequest(f"{name} does not hold valid base64; encode the file again", item=label) from error
    limits.check_size(len(data), name, label)
    return data


async def _download(url: str, policy: UrlValidationPolicy, limits: MediaLimits, label: str) -> bytes:
    name = shown(url)
    if re.search(r"[\s\x00-\x1f\x7f]", url):
        raise InvalidRequest(f"{name}: the URL has white space or control characters; percent-encode them", item=label)
    try:
        data = await fetch_bytes(url, limits.fetch_timeout, policy=policy, max_bytes=limits.max_file_size_bytes)
    except UrlValidationError as error:
        raise InvalidRequest(
            f"{name} is refused: {_scrubbed(error)} (the deployment's policy allows certain hosts, 3 redirects and "
            f"{limits.max_file_size_bytes} bytes, --max-file-size-mb)",
            item=label,
        ) from error
    except HttpConfigurationError as error:
        raise Unavailable(f"{label}: {name} cannot be fetched: {_scrubbed(error)}") from error
    except HttpTimeoutError as error:
        raise _timed_out(url, limits, label) from error
    except HttpStatusError as error:
        raise InvalidRequest(
            f"{name}: the media server answered HTTP {error.status}; check the URL", item=label
        ) from error
    except HttpError as error:
        reason = _scrubbed(error.__cause__ or error)
        raise InvalidRequest(
            f"{name} cannot be fetched: {reason}; check that the encode worker can reach it", item=label
        ) from error
    except ValueError as error:
        raise InvalidRequest(f"{name}, or what it redirects to, is not a valid URL", item=label) from error
    limits.check_size(len(data), name, label)
    return data


def _timed_out(url: str, limits: MediaLimits, label: str) -> InvalidRequest:
    return InvalidRequest(
        f"{shown(url)} could not be read within {limits.fetch_timeout:g} s; check that the encode worker can reach it "
        "or send the content in a data: URL",
        item=label,
    )


def _scrubbed(error: BaseException) -> str:
    """The text of ``error`` without queries, fragments, credentials and payloads of the URLs in it."""
    text = re.sub(r"[?#]\S*", "", " ".join(str(error).split()))
    text = re.sub(r"\b(data:)\S*", r"\1...", text)
    return re.sub(r"\b([A-Za-z][A-Za-z0-9+.-]*:/*)[^\s/]*@", r"\1", text)[:300] or type(error).__name__


def _read_file(url: str, scheme: str, policy: UrlValidationPolicy, limits: MediaLimits, label: str) -> bytes:
    name = shown(url)
    if not policy.allowed_local_path:
        raise InvalidRequest(
            "local files are not read by this deployment; send the content in a data: URL, or start the encode worker "
            "with --allowed-local-media-path",
            item=label,
        )
    try:
        path = url if not scheme else _path_of(url)
        if not os.path.isabs(path):
            raise UrlValidationError("not an absolute path")
        resolved = validate_local_path(path, policy)
        return _read_regular(resolved, name, limits, label)
    except (UrlValidationError, RuntimeError) as error:  # RuntimeError: links in a circle, before Python 3.13
        # One message for a missing file and for one outside, which a caller must not be able to tell apart.
        raise InvalidRequest(
            f"{name} is not a file that may be read: it must exist, under the folder that the operator allows, and be "
            "given by its absolute path",
            item=label,
        ) from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise InvalidRequest(f"{name} cannot be read: {reason}", item=label) from error


def _path_of(url: str) -> str:
    parts = urlsplit(url)
    if parts.netloc.lower() not in ("", "localhost"):
        raise UrlValidationError("a file: URL with another host")
    return unquote(parts.path)


def _read_regular(path: os.PathLike[str], name: str, limits: MediaLimits, label: str) -> bytes:
    # Not blocking: a FIFO would wait for a writer. Not following: the last component was resolved before.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise InvalidRequest(f"{name} is not a regular file", item=label)
        limits.check_size(max(status.st_size, 1), name, label)
        data = bytearray()
        # The size of a file that grows or is made on the fly says nothing.
        while chunk := file.read(min(_CHUNK, limits.max_file_size_bytes + 1 - len(data))):
            data += chunk
    limits.check_size(len(data), name, label)
    return bytes(data)
