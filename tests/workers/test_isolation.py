# SPDX-License-Identifier: Apache-2.0
"""With ``--isolate-embedding-cache-by-salt`` no tenant can tell from the time it takes what another has sent."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from dynamo._core import Context
from dynamo.common.http.url_validator import UrlValidationPolicy

from dynamo_epd.media.limits import MediaLimits
from dynamo_epd.media.source import MediaReference
from dynamo_epd.workers.encode import EncodeWorker


class Cache:
    async def get(self, key, make):
        return key


@pytest.fixture
def worker():
    worker = EncodeWorker(SimpleNamespace(encoder="hf"))
    worker._family = SimpleNamespace(identity="m", resolved_options=lambda modality, options: {})
    worker._policy, worker._limits, worker._cache = UrlValidationPolicy(), MediaLimits(), Cache()
    worker._threads = ThreadPoolExecutor(1)
    yield worker
    worker._threads.shutdown()


async def keys(worker, salt, data="aGVsbG8="):
    ref = MediaReference("image", 0, "image 1", f"data:image/png;base64,{data}")
    digest, key, kept = await worker._item(ref, [1], {}, salt, worker.observer.request(Context("r")))
    assert kept == key
    return digest, key


async def test_a_salt_has_embeddings_of_its_own_and_the_content_digest_stays(worker):
    (plain, plain_key), (x, x_key), (y, y_key) = [await keys(worker, salt) for salt in (None, "x", "y")]
    assert plain == x == y == plain_key
    assert len({plain_key, x_key, y_key}) == 3
    assert (await keys(worker, "x")) == (x, x_key)
    assert (await keys(worker, "x", "b3RoZXI="))[1] != x_key
