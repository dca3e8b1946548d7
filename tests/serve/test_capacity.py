# SPDX-License-Identifier: Apache-2.0
"""The queues against results that are known in closed form, and the plan against what it must reach."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_epd.commands import plan as command
from dynamo_epd.contract.errors import ConfigError
from dynamo_epd.serve.capacity import STAGES, Goal, Workload, arena_bytes, plan, simulate
from dynamo_epd.serve.queueing import fullest, held, serve

JOBS = 300_000
MANY = 3_000_000
"""Jobs for dealing in turn, which needs no loop over them."""


def erlang_c_wait(rate, service, servers):
    """Mean wait of M/M/c, in seconds."""
    load = rate * service
    inverse = sum(load**k / math.factorial(k) for k in range(servers))
    last = load**servers / math.factorial(servers) / (1 - load / servers)
    return last / (inverse + last) * service / (servers - load)


def waits(servers, utilisation, *, exponential, routing="least-loaded", slots=1, jobs=JOBS):
    rng = np.random.default_rng(1)
    arrival = np.cumsum(rng.exponential(1.0 / (utilisation * servers * slots), jobs))
    service = rng.exponential(1.0, jobs) if exponential else np.ones(jobs)
    return (serve(arrival, service, servers, slots=slots, routing=routing).start - arrival)[jobs // 10 :]


@pytest.mark.parametrize(("servers", "utilisation"), [(1, 0.5), (1, 0.8), (3, 0.7), (10, 0.85)])
def test_exponential_times_at_many_servers(servers, utilisation):
    expected = erlang_c_wait(utilisation * servers, 1.0, servers)
    # Waits of neighbours are alike, the more so the fuller the servers: the mean settles slowly there.
    tolerance = 0.03 if utilisation < 0.8 else 0.08
    assert waits(servers, utilisation, exponential=True).mean() == pytest.approx(expected, rel=tolerance)


def test_slots_are_servers_where_one_queue_feeds_all():
    expected = erlang_c_wait(0.8 * 6, 1.0, 6)
    assert waits(2, 0.8, exponential=True, slots=3).mean() == pytest.approx(expected, rel=0.04)


@pytest.mark.parametrize("utilisation", [0.3, 0.6, 0.8])
def test_constant_times_at_one_server(utilisation):
    """Pollaczek and Khinchine: M/D/1 waits half as long as M/M/1."""
    expected = utilisation / (2 * (1 - utilisation))
    assert waits(1, utilisation, exponential=False, routing="round-robin", jobs=MANY).mean() == pytest.approx(
        expected, rel=0.02
    )


def test_the_tail_of_one_exponential_server():
    """Of the time in the system, M/M/1: exponential with rate 1 - utilisation."""
    wait = waits(1, 0.7, exponential=True, routing="round-robin", jobs=MANY)
    assert (wait < 1e-6).mean() == pytest.approx(0.3, abs=0.002)
    expected = -math.log(0.05 / 0.7) / 0.3
    assert np.percentile(wait, 95) == pytest.approx(expected, rel=0.02)


def test_dealing_in_turn_to_two_is_a_queue_with_every_second_arrival():
    """E2/M/1: the wait follows from the root of sigma = (2 rate / (2 rate + 1 - sigma))**2."""
    rate = 0.8
    sigma = 0.5
    for _ in range(200):
        sigma = (2 * rate / (2 * rate + 1 - sigma)) ** 2
    wait = waits(2, 0.8, exponential=True, routing="round-robin", jobs=MANY)
    assert wait.mean() == pytest.approx(sigma / (1 - sigma), rel=0.02)
    assert wait.mean() > waits(2, 0.8, exponential=True).mean() * 1.3


@given(st.lists(st.floats(0, 10), min_size=1, max_size=60), st.integers(1, 5), st.floats(0.01, 3))
def test_constant_times_make_dealing_in_turn_as_good_as_one_queue(arrivals, workers, service):
    arrival, times = np.array(arrivals), np.full(len(arrivals), service)
    shared = serve(arrival, times, workers)
    dealt = serve(arrival, times, workers, routing="round-robin")
    np.testing.assert_allclose(shared.start, dealt.start)


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 6)), min_size=1, max_size=40),
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from(["round-robin", "least-loaded"]),
)
def test_no_worker_serves_more_than_it_can_and_none_idles_while_jobs_wait(jobs, workers, slots, routing):
    arrival, service = (np.array(column, dtype=float) for column in zip(*jobs, strict=True))
    start, end, worker = serve(arrival, service, workers, slots=slots, routing=routing)
    assert (start >= arrival).all() and set(worker) <= set(range(workers))
    for job in range(len(jobs)):
        mine = worker == worker[job]
        running = mine & (start <= start[job]) & (end > start[job])
        assert running.sum() <= slots
        if start[job] > arrival[job]:
            # It waited, so something of the same worker ended when it began.
            assert (end[mine] == start[job]).any()


def test_memory_held_by_littles_law():
    rng = np.random.default_rng(2)
    begin = np.cumsum(rng.exponential(0.01, 100_000))
    stay = rng.exponential(0.5, len(begin))
    mean, peak = held(begin, begin + stay, np.full(len(begin), 3.0))
    assert mean == pytest.approx(100 * 0.5 * 3, rel=0.02)
    assert peak > mean * 1.2
    assert held(np.array([0.0, 1.0, 1.0]), np.array([2.0, 1.5, 3.0]), np.array([4.0, 2.0, 1.0])) == (4.0, 7.0)


def test_the_fullest_of_several():
    begin, end = np.array([0.0, 0.0, 0.5, 5.0]), np.array([1.0, 1.0, 2.0, 6.0])
    assert fullest(begin, end, np.array([1.0, 5.0, 3.0, 7.0]), np.array([0, 1, 0, 0])) == 7.0
    assert fullest(begin, end, np.array([1.0, 5.0, 3.0, 2.0]), np.array([0, 1, 0, 0])) == 5.0
    assert fullest(begin[:0], end[:0], end[:0], np.array([], np.int64)) == 0.0


LOAD = Workload(
    qps=60,
    encode_ms=40,
    prefill_ms=100,
    prefill_hit_ms=20,
    images_per_request=1.5,
    hit_rate=0.6,
    decode_ms=1000,
    kv_mb=20,
)


def test_a_deployment_of_exponential_stages_waits_as_their_closed_forms_say():
    """What leaves an M/M/c queue is Poisson again, so each stage on its own is M/M/c."""
    load = Workload(
        qps=30, encode_ms=50, prefill_ms=80, variability=1, decode_ms=400, decode_slots=4, routing="least-loaded"
    )
    result = simulate(load, {"encode": 2, "prefill": 3, "decode": 4}, requests=120_000)
    for stage, service, servers in (("encode", 0.05, 2), ("prefill", 0.08, 3), ("decode", 0.4, 16)):
        found = result.stages[stage]
        assert found.utilisation == pytest.approx(30 * service / servers, rel=0.02)
        assert found.wait_ms == pytest.approx(erlang_c_wait(30, service, servers) * 1e3, rel=0.08)


def test_utilisation_is_the_load_over_the_workers():
    workers = {"encode": 3, "prefill": 6, "decode": 4}
    result = simulate(LOAD, workers, requests=100_000)
    for stage in STAGES:
        assert result.stages[stage].utilisation == pytest.approx(LOAD.load()[stage] / workers[stage], rel=0.03)


def test_without_queues_the_time_is_the_sum_of_the_stages():
    load = Workload(
        qps=1, encode_ms=40, prefill_ms=100, images_per_request=2, variability=0, decode_ms=500, kv_mb=50,
        embedding_mb=10, transfer_gb_per_s=1, transfer_latency_ms=2,
    )  # fmt: skip
    result = simulate(load, {stage: 500 for stage in STAGES}, requests=2000)
    assert result.ttft_ms == pytest.approx(2 * 40 + (2 + 20) + 100 + (2 + 50))


def test_hits_skip_encode_and_shorten_prefill():
    load = replace(LOAD, hit_rate=1.0, variability=0.0, kv_mb=0.0, embedding_mb=0.0)
    result = simulate(load, {stage: 500 for stage in STAGES}, requests=2000)
    assert result.ttft_ms == pytest.approx(20)
    assert result.stages["encode"].utilisation == 0 and result.stages["encode"].arena == 0


def test_arenas_hold_what_is_on_the_move():
    load = Workload(qps=100, encode_ms=1, prefill_ms=5, variability=0, embedding_mb=4, kv_mb=8, transfer_gb_per_s=0.4)
    one = simulate(load, {"encode": 1, "prefill": 1, "decode": 1}, requests=5000)
    # An embedding takes 10.5 ms to move, so that several are on the way at once; each is in both arenas meanwhile.
    assert one.stages["encode"].arena % 4e6 == 0 and one.stages["encode"].arena >= 8e6
    assert one.stages["prefill"].arena > one.stages["encode"].arena
    assert one.stages["decode"].arena >= 8e6
    two = simulate(load, {"encode": 1, "prefill": 2, "decode": 1}, requests=5000)
    assert two.stages["prefill"].arena < one.stages["prefill"].arena


def test_the_plan_reaches_its_goal_and_no_worker_is_too_many():
    goal = Goal(ttft_ms=400, percent=95, utilisation=0.8)
    result = plan(LOAD, goal, requests=8_000)
    counts = {stage: result.stages[stage].workers for stage in STAGES}
    assert result.percentile(95) <= 400
    for stage in STAGES:
        fewer = counts[stage] - 1
        if fewer >= LOAD.load()[stage] / goal.utilisation:
            assert simulate(LOAD, {**counts, stage: fewer}, requests=8_000).percentile(95) > 400
    assert plan(LOAD, goal, requests=8_000).percentile(95) == result.percentile(95)


def test_without_a_goal_the_load_decides():
    result = plan(LOAD, Goal(), requests=5000)
    assert {s: result.stages[s].workers for s in STAGES} == {"encode": 2, "prefill": 5, "decode": 3}
    assert plan(replace(LOAD, decode_ms=0.0), Goal(), requests=5000).stages["decode"].wait_ms == 0


def test_thousands_of_requests_per_second():
    load = replace(LOAD, qps=4000.0)
    result = plan(load, Goal(ttft_ms=300), requests=8_000)
    assert result.percentile(95) <= 300
    assert sum(result.stages[s].workers for s in STAGES) >= sum(load.load().values()) / 0.8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qps": 0}, "--qps must be above 0"),
        ({"hit_rate": 1.5}, "--hit-rate must lie between 0 and 1"),
        ({"images_per_request": -1}, "--images-per-request must not be negative"),
        ({"prefill_hit_ms": 0}, "--prefill-hit-ms must be above 0"),
    ],
)
def test_loads_that_make_no_sense(change, message):
    with pytest.raises(ConfigError, match=message):
        replace(LOAD, **change)


def test_a_goal_out_of_reach_says_how_far():
    with pytest.raises(ConfigError, match=r"within 30 ms: with no queue at all it takes \d+ ms"):
        plan(LOAD, Goal(ttft_ms=30), requests=2000)
    with pytest.raises(ConfigError, match="--decode-ms times qps needs"):
        simulate(replace(LOAD, qps=1e5, decode_ms=1e4), {stage: 1 for stage in STAGES})


def test_arena_sizes_are_rounded_up_and_hold_the_cache():
    found = plan(LOAD, Goal(), requests=2000).stages["encode"]
    bare, cached = arena_bytes(found, 0), arena_bytes(found, 2)
    assert bare >= found.arena * 1.25 and bare % (64 << 20) == 0
    assert cached - bare == 2 << 30


def run(capsys, *argv):
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    args = parser.parse_args(["plan", "--qps=60", "--encode-ms=40", "--prefill-ms=100", "--requests=5000", *argv])
    assert args.run(args) == 0
    return capsys.readouterr().out


def test_the_command_prints_a_table_and_flags(capsys):
    printed = run(capsys, "--decode-ms=1000", "--prefill-gpus=2", "--cache-gb=4")
    assert "60 requests per second: " in printed and "time to first token" in printed
    assert "--PrefillWorker.ServiceArgs.workers=8" in printed and "--DecodeWorker.ServiceArgs.workers=3" in printed
    from dynamo_epd.serve.options import flags
    from dynamo_epd.serve.services import worker

    assert "transfer-arena-bytes" in flags(worker("EncodeWorker", "encode").parser)


def test_the_command_prints_json(capsys):
    report = json.loads(run(capsys, "--json", "--prefill-gpus=2", "--percentile=90", "--cache-gb=4"))
    assert report["stages"].keys() == {"encode", "prefill"}
    assert report["gpus"] == report["stages"]["encode"]["workers"] + 2 * report["stages"]["prefill"]["workers"]
    assert report["ttft_ms"]["p50"] < report["ttft_ms"]["p90"] < report["ttft_ms"]["p99"]
    assert report["load"]["qps"] == 60
    assert report["stages"]["encode"]["transfer_arena_bytes"] > 4 << 30


def test_the_command_draws(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.png"
    run(capsys, f"--plot={path}", "--ttft-ms=500")
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="--plot .*no/such"):
        run(capsys, f"--plot={tmp_path}/no/such.png")
