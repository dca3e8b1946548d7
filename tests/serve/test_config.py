# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from fractions import Fraction

import pytest

from dynamo_epd.contract.errors import ConfigError
from dynamo_epd.serve import config
from dynamo_epd.serve.graph import load


@pytest.fixture
def resolved(fakes, tmp_path):
    """A function from YAML text and overrides to the services' configurations by name."""

    def resolve(text, *overrides, names=()):
        path = tmp_path / "config.yaml"
        path.write_text(text)
        sections = config.read(path)
        config.apply(sections, [config.override(*o.split("=", 1)) for o in overrides])
        deployment = config.resolve(sections, load("fakes:Front", fakes), names)
        return {c.service.name: c for c in deployment.services}

    return resolve


BASE = """
Common: {journal: /j, extra: from common}
Front: {common-configs: [journal], http-port: 8000}
Middle:
  common-configs: [journal, extra]
  ServiceArgs: {workers: 2, resources: {gpu: 1}}
Back: {common-configs: [journal]}
"""


def test_sections_common_and_service_args(resolved):
    services = resolved(BASE)
    assert list(services) == ["Front", "Middle", "Back"]
    assert services["Middle"].args == ("--name", "Middle", "--journal", "/j", "--extra", "from common")
    assert (services["Middle"].workers, services["Middle"].gpus) == (2, Fraction(1))
    assert services["Back"].args == ("--name", "Back", "--journal", "/j")
    assert (services["Back"].workers, services["Back"].gpus) == (1, Fraction(0))


def test_a_section_wins_over_common(resolved):
    text = BASE.replace("Back: {", "Back: {journal: /own, ")
    assert resolved(text)["Back"].args == ("--name", "Back", "--journal", "/own")


@pytest.mark.parametrize(
    ("override", "service", "attribute", "expected"),
    [
        ("--Back.journal=/x", "Back", "args", ("--name", "Back", "--journal", "/x")),
        ("--Common.journal=/x", "Back", "args", ("--name", "Back", "--journal", "/x")),
        ("--Back.ServiceArgs.workers=3", "Back", "workers", 3),
        ("--Middle.ServiceArgs.resources.gpu=0.25", "Middle", "gpus", Fraction(1, 4)),
        ("--Back.ServiceArgs.env.DYN_LOG=debug", "Back", "env", {"DYN_LOG": "debug"}),
        ("--Back.ServiceArgs.devices=2,3", "Back", "devices", ("2", "3")),
        ("--Back.ServiceArgs.devices=[2, GPU-a]", "Back", "devices", ("2", "GPU-a")),
    ],
)
def test_overrides(resolved, override, service, attribute, expected):
    assert getattr(resolved(BASE, override)[service], attribute) == expected


def test_an_override_replaces_another_spelling_of_the_key(resolved):
    assert resolved(BASE, "--Front.http_port=9000")["Front"].options["http-port"] == 9000


def test_underscores_aliases_and_values_of_all_kinds(resolved):
    text = """
Front: {journal: /j, port: 8000}
Middle:
  journal: /j
  never_ready: true
  ignore-term: false
  fast: no
  tags: [a, b]
  extra: {kv_cache_config: {max_tokens: 5}}
Back: {journal: /j, extra: -1, flavour: sour}
"""
    services = resolved(text)
    assert services["Front"].args[-2:] == ("--http-port", "8000")
    assert services["Middle"].args[4:] == (
        "--never-ready", "--no-fast", "--tags", "a", "b", "--extra", '{"kv_cache_config": {"max_tokens": 5}}',
    )  # fmt: skip
    assert services["Back"].args[4:] == ("--extra=-1", "--flavour", "sour")


def test_service_name_keeps_one_and_checks_all(resolved):
    assert list(resolved(BASE, names=["Middle"])) == ["Middle"]
    assert list(resolved("Middle: {journal: /j}", names=["Middle"])) == ["Middle"]
    with pytest.raises(ConfigError, match="Back: unknown key 'jurnal'"):
        resolved("Middle: {journal: /j}\nBack: {jurnal: /j}", names=["Middle"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Bakc: {}", r"unknown service 'Bakc' .*did you mean 'Back'"),
        ("Back: {jurnal: /j}", r"Back: unknown key 'jurnal'; did you mean 'journal'"),
        ("Back: {journal: /j, nam: x}", r"Back: unknown key 'nam'; did you mean 'name'"),
        ("Back: {journal: /j, name: x}", r"Back: 'name' is what makes it Back"),
        ("Back: {}", r"Back: 'journal' is missing"),
        ("Back: {journal: /j, flavour: swet}", r"Back: 'flavour' cannot be 'swet'; did you mean 'sweet'"),
        ("Back: {journal: /j, failures: many}", r"Back: 'failures' cannot be 'many'"),
        ("Back: {journal: /j, failures: }", r"Back: 'failures' has no value"),
        ("Back: {journal: /j, never-ready: 1}", r"Back: 'never-ready' is a switch"),
        ("Back: {journal: /j, Journal: /k}", r"'Journal' and 'journal' are the same key"),
        ("Back: {common-configs: [journal]}", r"Back: common-configs: Common has no 'journal'; there are none"),
        ("Common: {journal: /j}\nBack: {common-configs: [jurnal]}", r"no 'jurnal'; did you mean 'journal'"),
        ("Back: {common-configs: journal}", r"must be a list"),
        ("Back: {journal: /j, ServiceArgs: {worker: 2}}", r"unknown key 'worker'; did you mean 'workers'"),
        ("Back: {journal: /j, ServiceArgs: {workers: 0}}", r"workers must be a whole number from 1, not 0"),
        ("Back: {journal: /j, ServiceArgs: {workers: true}}", r"workers must be a whole number"),
        ("Back: {journal: /j, ServiceArgs: {resources: {gpus: 1}}}", r"unknown key 'gpus'; did you mean 'gpu'"),
        ("Back: {journal: /j, ServiceArgs: {resources: {gpu: 1.5}}}", r"gpu must be 0, a whole number, or a fraction"),
        ("Back: {journal: /j, ServiceArgs: {resources: {gpu: many}}}", r"gpu must be 0"),
        ("Back: {journal: /j, ServiceArgs: {env: [A]}}", r"env must hold named keys"),
        ("Front: {journal: /j, ServiceArgs: {workers: 2}}", r"one host runs one Front"),
        ("Discovery: {backnd: etcd}", r"Discovery: unknown key 'backnd'; did you mean 'backend'"),
        ("Environment: {A: [1]}", r"Environment.A must be one value"),
        ("Back: 5", r"Back must hold named keys"),
        ("- Back", r"must hold named keys"),
        ("Back: {journal: /j}\nBack: {journal: /k}", r"the key 'Back' stands twice"),
        ("Back: [", r"config.yaml: while parsing"),
    ],
)
def test_errors_name_the_place(resolved, text, message):
    with pytest.raises(ConfigError, match=message):
        resolved(text, names=["Back"])


def test_an_unknown_service_name(resolved):
    with pytest.raises(ConfigError, match="--service-name Bck: fakes:Front has no such service; did you mean 'Back'"):
        resolved(BASE, names=["Bck"])


def test_the_known_form_with_the_real_workers(tmp_path):
    """A file as 0.x had them, for this package's workers: keys are checked against their real flags."""
    text = """
Common: {model: MODEL, block-size: 32, served_model_name: m}
Frontend: {port: 8001, router: kv}
EncodeWorker: {common-configs: [model, served_model_name], max-file-size-mb: 10}
PrefillWorker:
  engine_args: MODEL/prefill.yaml
  override-engine-args: {kv_cache_config: {enable_block_reuse: true}}
  common-configs: [model, served_model_name]
DecodeWorker: {common-configs: [model], ServiceArgs: {workers: 2, resources: {gpu: 2, cpu: 10}}}
"""
    path = tmp_path / "c.yaml"
    path.write_text(text.replace("MODEL", "/models/qwen"))
    sections = config.read(path)
    graph = load("graphs.epd:Frontend", tmp_path)
    services = {c.service.name: c for c in config.resolve(sections, graph).services}
    assert services["Frontend"].args == ("--http-port", "8001", "--router-mode", "kv")
    assert services["PrefillWorker"].args == (
        "--disaggregation-mode", "prefill", "--model", "/models/qwen", "--served-model-name", "m",
        "--extra-engine-args", "/models/qwen/prefill.yaml",
        "--override-engine-args", '{"kv_cache_config": {"enable_block_reuse": true}}',
    )  # fmt: skip
    assert services["EncodeWorker"].gpus == 1
    assert services["DecodeWorker"].ignored == ("DecodeWorker: ServiceArgs.resources.cpu",)
    del sections["Common"]["model"]
    with pytest.raises(ConfigError, match="Common has no 'model'"):
        config.resolve(sections, graph)
    sections["Common"]["model"] = "/m"
    sections["EncodeWorker"]["max-file-size"] = 1
    with pytest.raises(ConfigError, match="EncodeWorker: unknown key 'max-file-size'; did you mean 'max-file-size-mb'"):
        config.resolve(sections, graph)
