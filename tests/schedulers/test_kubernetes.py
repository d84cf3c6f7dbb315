"""The manifests of ``examples/kubernetes``, against Kubernetes' published schemas and what ``phalanx run`` takes.

No cluster is asked. JobSet and TrainJob come with their controllers: they are held against the models that Kubeflow
Trainer publishes, and a JobSet by the Job inside too. The chart is rendered by the few actions of Helm's language that
it uses; Helm itself is not run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from phalanx.launch.cli._flags import parse
from phalanx.launch.cli._from_flags import config_from_args
from phalanx.launch.config._config import LaunchConfig

yaml = pytest.importorskip("yaml", reason="reading manifests needs PyYAML (pip install pyyaml)")

pytestmark = pytest.mark.fast

FOLDER = Path(__file__).parents[2] / "examples" / "kubernetes"
VERSIONS = ("1.29", "1.32", "1.37")
EXIT_DO_NOT_RETRY = 93


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def render(release: str, **more: Any) -> list[dict[str, Any]]:
    """The chart with its values: ``{{ .Values.x }}``, piped through ``quote`` or ``toJson``, and nothing else."""
    values = yaml.safe_load((FOLDER / "chart" / "values.yaml").read_text()) | more
    known = {".Release.Name": release, **{f".Values.{key}": value for key, value in values.items()}}

    def action(found: re.Match[str]) -> str:
        name, _, function = (word.strip() for word in found[1].partition("|"))
        value = known[name]
        return {"": str, "quote": lambda it: json.dumps(str(it)), "toJson": json.dumps}[function](value)

    text = re.sub(r"\{\{(.*?)\}\}", action, (FOLDER / "chart" / "templates" / "job.yaml").read_text())
    return list(yaml.safe_load_all(text))


def jobs() -> list[tuple[str, list[dict[str, Any]]]]:
    """All manifests that hold a Job, with what stands beside it."""
    (jobset,) = documents("jobset.yaml")
    (replicated,) = jobset["spec"]["replicatedJobs"]
    inside = {"apiVersion": "batch/v1", "kind": "Job", "metadata": jobset["metadata"], **replicated["template"]}
    return [("indexed-job", documents("indexed-job.yaml")), ("jobset", [inside]), ("chart", render("mine"))]


def config_of(spec: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> LaunchConfig:
    """What ``phalanx run`` makes of a container, in its first pod."""
    (container,) = spec["template"]["spec"]["containers"]
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "0")
    for variable in container["env"]:
        monkeypatch.setenv(variable["name"], variable["value"])
    words = [*container["command"], *container.get("args", [])]
    assert words[:2] == ["phalanx", "run"]
    args = parse(words[2:], {})
    assert (args.training_script, args.training_script_args) == ("examples/launch/train.py", ["--steps=200"])
    return config_from_args(args, 2)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("name", "found"), jobs(), ids=lambda value: value if isinstance(value, str) else "")
def test_manifests_are_what_kubernetes_takes(name, found, version):
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    for document in found:
        validate.validate(document, version, strict=True)
    wrong = json.loads(json.dumps(found[-1]))
    wrong["spec"]["template"]["spec"]["containers"][0]["livenessProb"] = {}
    with pytest.raises(validate.ValidationError):
        validate.validate(wrong, version, strict=True)


def fields_of(value: Any, path: str = "") -> Iterator[str]:
    """The paths of all fields of a document."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield f"{path}.{name}"
            yield from fields_of(inner, f"{path}.{name}")
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from fields_of(inner, f"{path}[{number}]")


@pytest.mark.parametrize(
    ("name", "model", "wrong"),
    [
        ("trainjob.yaml", "TrainerV1alpha1TrainJob", ("spec", "trainer", "numProcPerNode", "auto")),
        ("jobset.yaml", "JobsetV1alpha2JobSet", ("spec", "successPolicy", "operator", 3)),
    ],
)
def test_manifests_are_what_their_controllers_take(name, model, wrong):
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="pip install kubeflow-trainer-api")
    (document,) = documents(name)
    taken = getattr(models, model).from_dict(document)
    known = json.loads(taken.model_dump_json(by_alias=True, exclude_none=True))
    assert set(fields_of(document)) <= set(fields_of(known)), "a field that nobody knows"
    *path, field, value = wrong
    inner = document
    for key in path:
        inner = inner.setdefault(key, {})
    inner[field] = value
    with pytest.raises(ValueError, match=field):
        getattr(models, model).from_dict(document)


@pytest.mark.parametrize(("name", "found"), jobs(), ids=lambda value: value if isinstance(value, str) else "")
def test_what_must_agree_agrees(name, found, monkeypatch):
    job = found[-1]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    config = config_of(job, monkeypatch)
    told = {variable["name"]: variable["value"] for variable in container["env"]}
    assert job["completions"] == job["parallelism"] == config.max_nodes == int(told["PHALANX_NUM_PODS"]) == 4
    assert config.min_nodes == 3
    assert config.rdzv_configs["is_host"] == "true"
    assert job["completionMode"] == "Indexed"
    assert pod["terminationGracePeriodSeconds"] > config.shutdown_timeout
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert config.dashboard == f"0.0.0.0:{ports[container['livenessProbe']['httpGet']['port']]}"
    assert config.rdzv_endpoint.endswith(f":{ports['rendezvous']}")
    assert pod["automountServiceAccountToken"] is False, "the least RBAC is none"
    assert "Role" not in {document["kind"] for document in found}
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}
    if name == "jobset":
        (jobset,) = documents("jobset.yaml")
        own = f"{jobset['metadata']['name']}-{jobset['spec']['replicatedJobs'][0]['name']}-0"
        assert config.rdzv_endpoint == f"{own}-0.{jobset['spec']['network']['subdomain']}:29400"
        return
    by_kind = {document["kind"]: document for document in found}
    own, service = by_kind["Job"]["metadata"]["name"], by_kind["Service"]
    assert config.rdzv_endpoint == f"{own}-0.{service['metadata']['name']}:29400"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert pod["serviceAccountName"] == by_kind["ServiceAccount"]["metadata"]["name"]
    label = {"batch.kubernetes.io/job-name": own}
    assert service["spec"]["selector"] == by_kind["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == label
    codes = [rule["onExitCodes"]["values"] for rule in job["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    assert codes == [[EXIT_DO_NOT_RETRY]]
    assert pod["restartPolicy"] == "Never", "podFailurePolicy wants it"


def test_the_chart_follows_its_values_and_is_the_manifest_otherwise():
    *_, job = render("other", pods=8, minPods=5, script="a b.py")
    words = job["spec"]["template"]["spec"]["containers"][0]["command"]
    assert (job["metadata"]["name"], job["spec"]["completions"]) == ("other", 8)
    assert "--nnodes=5:8" in words
    assert words[-1] == "a b.py"
    rendered, written = render("phalanx"), documents("indexed-job.yaml")
    for documents_of in (rendered, written):
        container = documents_of[-1]["spec"]["template"]["spec"]["containers"][0]
        container["command"] = [*container["command"], *container.pop("args", [])]
    assert rendered == written


def test_a_trainjob_says_what_the_torch_runtime_of_kubeflow_leaves_open(monkeypatch):
    (job,) = documents("trainjob.yaml")
    trainer = job["spec"]["trainer"]
    told = {"PET_MASTER_ADDR": "phalanx-node-0-0.phalanx", "PET_MASTER_PORT": "29400", "PET_NNODES": "4",
            "PET_NPROC_PER_NODE": "auto", "PET_NODE_RANK": "2"}  # fmt: skip
    given = [*trainer["command"], *trainer["args"]]
    words = [re.sub(r"\$\((\w+)\)", lambda name: told[name[1]], word) for word in given]
    config = config_from_args(parse(words[2:], told), 2)
    assert (config.rdzv_backend, config.rdzv_endpoint) == ("c10d", "phalanx-node-0-0.phalanx:29400")
    assert (config.min_nodes, config.max_nodes) == (3, trainer["numNodes"])
