# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dynamo_epd.contract.errors import ConfigError
from dynamo_epd.serve.graph import Service, load, order, ready_made


def names(services):
    return [service.name for service in services]


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("graphs.epd:Frontend", ["Frontend", "EncodeWorker", "PrefillWorker", "DecodeWorker"]),
        ("graphs.e_pd:Frontend", ["Frontend", "EncodeWorker", "AggWorker"]),
        ("graphs.agg:Frontend", ["Frontend", "AggWorker"]),
    ],
)
def test_ready_graphs_are_found_from_anywhere(target, expected, tmp_path):
    assert names(load(target, tmp_path).services) == expected


def test_all_ready_graphs_are_listed():
    assert ready_made() == ["graphs.agg", "graphs.e_pd", "graphs.epd"]


def test_graphs_in_one_process_do_not_share_links(tmp_path):
    load("graphs.epd:Frontend", tmp_path)
    assert names(load("graphs.e_pd:Frontend", tmp_path).services) == ["Frontend", "EncodeWorker", "AggWorker"]
    assert names(load("graphs.epd:Frontend", tmp_path).services)[-1] == "DecodeWorker"


def test_the_working_directory_comes_first(tmp_path):
    (tmp_path / "graphs").mkdir()
    (tmp_path / "graphs" / "agg.py").write_text(
        "from dynamo_epd.serve.graph import Service\nOnly = Service('Only', 'json.tool')\n"
    )
    assert names(load("graphs.agg:Only", tmp_path).services) == ["Only"]
    # A folder named graphs does not hide the ready ones that it lacks.
    assert names(load("graphs.epd:Frontend", tmp_path).services)[0] == "Frontend"


def test_from_an_installed_package_without_a_checkout(tmp_path):
    """As a wheel leaves it: the package alone on the path, another directory as the current one."""
    import dynamo_epd

    site = tmp_path / "site"
    site.mkdir()
    (site / "dynamo_epd").symlink_to(Path(dynamo_epd.__file__).parent)
    code = (
        "from pathlib import Path; from dynamo_epd.serve.graph import load; "
        "g = load('graphs.epd:Frontend', Path.cwd()); print(g.path); print([s.name for s in g.services])"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=True,
    )
    path, services = run.stdout.splitlines()
    assert path == str(site / "dynamo_epd" / "graphs" / "epd.py")
    assert services == "['Frontend', 'EncodeWorker', 'PrefillWorker', 'DecodeWorker']"


def test_order_puts_each_service_after_all_that_send_to_it():
    a, b, c, d = (Service(name, "m") for name in "abcd")
    a.link(c)
    a.link(b).link(d).link(c)
    assert names(order(a)) == ["a", "b", "d", "c"]
    assert names(order(d)) == ["d", "c"]


def test_a_circle_is_refused_by_name():
    a, b = Service("a", "m"), Service("b", "m")
    a.link(b).link(a)
    with pytest.raises(ConfigError, match=r"circle: (a -> b -> a|b -> a -> b)"):
        order(a)


def test_two_services_of_one_name_are_refused():
    a = Service("a", "m")
    a.link(Service("b", "m")).link(Service("a", "m"))
    with pytest.raises(ConfigError, match="two services named a"):
        order(a)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("graphs.epd", r"expected module:Name"),
        ("graphs.epd:", r"expected module:Name"),
        ("graphs/epd.py:Frontend", r"expected module:Name"),
        ("graphs.epdd:Frontend", r"'graphs.epdd' is neither .* did you mean 'graphs.epd'"),
        ("graphs.epd:Fronted", r"no service 'Fronted'; did you mean 'Frontend'"),
    ],
)
def test_errors_name_what_is_wrong_and_what_is_nearest(target, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        load(target, tmp_path)


def test_a_graph_that_fails_to_import_says_why(tmp_path):
    (tmp_path / "mine.py").write_text("import no_such_module_at_all\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_module_at_all"):
        load("mine:Front", tmp_path)
