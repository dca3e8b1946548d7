# SPDX-License-Identifier: Apache-2.0
"""The Kubernetes manifests: against the CRD, against each other, against the workers' flags and the engine files."""

from __future__ import annotations

import importlib.util
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml
from yamllint import config, linter

from dynamo_epd.serve import services
from dynamo_epd.serve.options import flags

ROOT = Path(__file__).parents[2]
K8S = ROOT / "launch" / "k8s"
MANIFESTS = sorted(K8S.glob("*.yaml"))
CRD = json.loads((ROOT / "tests" / "data" / "dynamographdeployment.crd.json").read_text())
SCHEMAS = {v["name"]: v["schema"]["openAPIV3Schema"] for v in CRD["spec"]["versions"]}

_SPEC = importlib.util.spec_from_file_location("configmap", K8S / "configmap.py")
configmap = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(configmap)


def documents(path):
    return list(yaml.safe_load_all(path.read_text()))


def deployment(path):
    return next(d for d in documents(path) if d["kind"] == "DynamoGraphDeployment")


def closed(schema):
    """``schema`` with unknown keys refused, as kubectl's strict validation does; only what is JSON schema is kept."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    out = {key: closed(value) for key, value in schema.items() if not key.startswith("x-kubernetes-validations")}
    if schema.get("x-kubernetes-int-or-string"):
        out.pop("type", None)
        out["anyOf"] = [{"type": "integer"}, {"type": "string"}]
        out.pop("pattern", None)
    open_ended = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
    if schema.get("type") == "object" and isinstance(schema.get("properties"), dict) and not open_ended:
        out["additionalProperties"] = False
    return out


def validate(manifest):
    version = manifest["apiVersion"].removeprefix("nvidia.com/")
    schema = closed(SCHEMAS[version])
    # The CRD says no more of metadata than that it is an object.
    schema["properties"]["metadata"] = {"type": "object", "required": ["name"]}
    jsonschema.Draft202012Validator(schema).validate(manifest)


class Worker:
    """One component of either version, in the same terms."""

    def __init__(self, name, kind, replicas, container, pod, gpus, nodes=1):
        self.name = name
        self.kind = kind
        self.replicas = replicas
        self.command = container["command"]
        self.args = container["args"]
        self.env = container.get("env", [])
        self.image = container["image"]
        self.mounts = {m["name"]: m["mountPath"] for m in container.get("volumeMounts", [])}
        self.claims = [c["name"] for c in container.get("resources", {}).get("claims", [])]
        self.volumes = {v["name"]: v for v in pod.get("volumes", [])}
        self.pod = pod
        self.gpus = int(gpus) * nodes

    def facts(self):
        return {k: v for k, v in vars(self).items() if k not in ("pod", "claims")}


def workers(manifest):
    found = {}
    if manifest["apiVersion"] == "nvidia.com/v1beta1":
        for c in manifest["spec"]["components"]:
            pod = c["podTemplate"]["spec"]
            (main,) = pod["containers"]
            gpus = main.get("resources", {}).get("limits", {}).get("nvidia.com/gpu", "0")
            found[c["name"]] = Worker(
                c["name"], c["type"], c["replicas"], main, pod, gpus, c.get("multinode", {}).get("nodeCount", 1)
            )
    else:
        for name, s in manifest["spec"]["services"].items():
            pod = s["extraPodSpec"]
            kind = s.get("subComponentType", s["componentType"])
            gpus = s.get("resources", {}).get("limits", {}).get("gpu", "0")
            found[name] = Worker(name, kind, s["replicas"], pod["mainContainer"], pod, gpus)
    return found


def test_all_are_there():
    assert {p.name for p in MANIFESTS} == {
        "epd.v1beta1.yaml", "epd.v1alpha1.yaml", "e_pd.v1beta1.yaml", "e_pd.v1alpha1.yaml", "gb200.v1beta1.yaml",
    }  # fmt: skip


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda p: p.name)
def test_it_is_valid_by_the_crd(path):
    manifest = deployment(path)
    assert path.name.split(".")[1] == manifest["apiVersion"].removeprefix("nvidia.com/")
    validate(manifest)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m["spec"]["components"][1].update(type="encode"), "'encode' is not one of"),
        (lambda m: m["spec"]["components"][1].update(replica=2), "replica"),
        (lambda m: m["spec"]["components"][1]["podTemplate"]["spec"].update(volume=[]), "volume"),
        (lambda m: m["spec"]["components"][1].update(replicas="2"), "'2' is not of type 'integer'"),
        (lambda m: m["spec"]["components"][1].pop("name"), "'name' is a required property"),
    ],
)
def test_the_validation_sees_what_is_wrong(change, message):
    manifest = deployment(K8S / "epd.v1beta1.yaml")
    change(manifest)
    with pytest.raises(jsonschema.ValidationError, match=message):
        validate(manifest)


@pytest.mark.parametrize("graph", ["epd", "e_pd"])
def test_both_versions_say_the_same(graph):
    beta, alpha = (workers(deployment(K8S / f"{graph}.{version}.yaml")) for version in ("v1beta1", "v1alpha1"))
    assert {n: w.facts() for n, w in beta.items()} == {n: w.facts() for n, w in alpha.items()}


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda p: p.name)
def test_workers_take_their_flags_and_find_their_files(path):
    maps = {configmap.name_of(f.parent): f.parent for f in (ROOT / "configs").rglob("prefill.yaml")}
    kinds = {"encode": "worker", "prefill": "prefill", "decode": "decode", "agg": "worker", "Frontend": "frontend"}
    for name, worker in workers(deployment(path)).items():
        assert worker.kind == kinds[name]
        service = services._MAKE[{"Frontend": "Frontend"}.get(name, f"{name.title()}Worker")]()
        assert worker.command == ["python3", "-m", service.module]
        given = [arg for arg in worker.args if arg.startswith("--")]
        assert set(given) <= {f"--{flag}" for flag in flags(service.parser)}
        assert all(isinstance(arg, str) for arg in worker.args)
        if name == "Frontend":
            continue
        assert worker.args[:2] == ["--disaggregation-mode", name]
        values = dict(zip(worker.args[::2], worker.args[1::2], strict=False))
        assert values["--model"].startswith(worker.mounts["models"] + "/")
        assert set(worker.mounts) == set(worker.volumes)
        if "--extra-engine-args" in values:
            mount, _, file = values["--extra-engine-args"].rpartition("/")
            assert worker.mounts["engine-configs"] == mount
            folder = maps[worker.volumes["engine-configs"]["configMap"]["name"]]
            assert (folder / file).is_file()
            engine = yaml.safe_load((folder / file).read_text())
            assert engine["kv_cache_config"]["enable_block_reuse"] is True
            assert worker.gpus == engine.get("tensor_parallel_size", 1)


def test_one_compute_domain_is_shared_by_encode_and_prefill():
    path = K8S / "gb200.v1beta1.yaml"
    (domain,) = (d for d in documents(path) if d["kind"] == "ComputeDomain")
    assert domain["apiVersion"] == "resource.nvidia.com/v1beta1"
    channel = domain["spec"]["channel"]["resourceClaimTemplate"]["name"]
    manifest = deployment(path)
    for name, worker in workers(manifest).items():
        if name == "Frontend":
            continue
        claims = {c["name"]: c["resourceClaimTemplateName"] for c in worker.pod["resourceClaims"]}
        assert [claims[name] for name in worker.claims] == [channel]
    assert {e["name"]: e["value"] for e in manifest["spec"]["env"]} == {
        "NCCL_MNNVL_ENABLE": "1",
        "NCCL_CUMEM_ENABLE": "1",
        "UCX_CUDA_IPC_ENABLE_MNNVL": "y",
        "UCX_TLS": "cuda_copy,cuda_ipc,tcp",
        "UCX_MEMTYPE_CACHE": "n",
    }


def lint(text, width=120):
    rules = (
        f"extends: default\nrules: {{line-length: {{max: {width}}}, "
        "comments: {min-spaces-from-content: 1}, "
        "document-start: disable, braces: {max-spaces-inside: 1}, truthy: {check-keys: false}}"
    )
    return [str(problem) for problem in linter.run(io.StringIO(text), config.YamlLintConfig(rules))]


LINTED = [*MANIFESTS, *sorted((ROOT / "configs" / "serve").glob("*.yaml"))]


@pytest.mark.parametrize("path", LINTED, ids=lambda p: p.name)
def test_it_is_well_written_yaml(path):
    assert lint(path.read_text()) == []


def test_the_lint_sees_what_is_wrong():
    assert len(lint("a: 1\na: 2 \n")) == 2


@pytest.mark.parametrize("folder", sorted({f.parent for f in (ROOT / "configs").rglob("prefill.yaml")}), ids=str)
def test_config_maps_hold_the_files_as_they_are(folder):
    text = configmap.config_map(folder, namespace="dynamo")
    made = yaml.safe_load(text)
    assert (made["kind"], made["metadata"]["namespace"]) == ("ConfigMap", "dynamo")
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", made["metadata"]["name"])
    assert made["data"].keys() == {f.name for f in folder.glob("*.yaml")}
    for name, content in made["data"].items():
        assert [line.rstrip() for line in (folder / name).read_text().splitlines()] == content.splitlines()
    # The engine files' own comments are indented here.
    assert lint(text, width=180) == []
    assert "\\n" not in text


def test_the_generator_as_a_command(tmp_path):
    def generate(*args):
        return subprocess.run([sys.executable, K8S / "configmap.py", *args], capture_output=True, text=True)

    engine = tmp_path / "agg.yaml"
    engine.write_text("a: 1   \n\tb: 2\n")
    assert generate(tmp_path).returncode == 2
    engine.write_text("# why\na: 1   \n")
    done = generate(tmp_path, "--name", "mine")
    assert done.returncode == 0
    assert yaml.safe_load(done.stdout)["data"] == {"agg.yaml": "# why\na: 1\n"}
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "no *.yaml in it" in generate(empty).stderr
