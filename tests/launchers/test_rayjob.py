"""The manifest for KubeRay has fields of KubeRay's published `ray.io/v1` only, with their types, and all required ones.

The schema here was written by hand after rayjob_types.go and raycluster_types.go of ray-project/kuberay. Its
helm-chart/kuberay-operator/crds/ray.io_rayjobs.yaml is generated from these two files. The checks that a schema cannot
express follow its validation.go. Fields are required that any release since v1.1 requires.
"""

from __future__ import annotations

import copy
import json
import re
import shlex
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from asyncrl.config.compose import composed

MANIFEST = Path(__file__).parents[2] / "launchers" / "rayjob.yaml"
TEXT, TRUTH, WHOLE, NUMBER = ({"type": name} for name in ("string", "boolean", "integer", "number"))
TEXTS = {"type": "object", "additionalProperties": TEXT}
QUANTITY = {
    "anyOf": [{"type": "integer"}, TEXT],
    "pattern": r"^[+-]?(\d+(\.\d*)?|\.\d+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?\d+(\.\d*)?)?$",
}
"""An amount as Kubernetes writes it, such as 8Gi or 500m."""
QUANTITIES = {"type": "object", "additionalProperties": QUANTITY}


def fields(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": required, "properties": properties, "additionalProperties": False}


CONTAINER = fields(
    ["name", "image"],
    name=TEXT,
    image=TEXT,
    resources=fields([], requests=QUANTITIES, limits=QUANTITIES),
    volumeMounts={"type": "array", "items": fields(["name", "mountPath"], name=TEXT, mountPath=TEXT)},
)
VOLUME = fields(
    ["name"],
    name=TEXT,
    persistentVolumeClaim=fields(["claimName"], claimName=TEXT),
    emptyDir=fields([], medium=TEXT, sizeLimit=QUANTITY),
)
POD = fields(
    ["spec"],
    metadata={"type": "object"},
    spec=fields(
        ["containers"],
        containers={"type": "array", "minItems": 1, "items": CONTAINER},
        volumes={"type": "array", "items": VOLUME},
    ),
)
"""The schema of a pod's template, with the fields that the manifest uses."""
HEAD = fields(
    ["rayStartParams", "template"],
    template=POD,
    headService={"type": "object"},
    enableIngress=TRUTH,
    rayStartParams=TEXTS,
    serviceType=TEXT,
)
WORKERS = fields(
    ["groupName", "maxReplicas", "minReplicas", "rayStartParams", "template"],
    suspend=TRUTH,
    groupName=TEXT,
    replicas=WHOLE,
    minReplicas=WHOLE,
    maxReplicas=WHOLE,
    idleTimeoutSeconds=WHOLE,
    rayStartParams=TEXTS,
    template=POD,
    scaleStrategy={"type": "object"},
    numOfHosts=WHOLE,
)
CLUSTER = fields(
    ["headGroupSpec"],
    suspend=TRUTH,
    managedBy=TEXT,
    autoscalerOptions={"type": "object"},
    headServiceAnnotations=TEXTS,
    enableInTreeAutoscaling=TRUTH,
    gcsFaultToleranceOptions={"type": "object"},
    headGroupSpec=HEAD,
    rayVersion=TEXT,
    workerGroupSpecs={"type": "array", "items": WORKERS},
)
JOB = fields(
    ["entrypoint", "rayClusterSpec"],
    activeDeadlineSeconds=WHOLE,
    backoffLimit=WHOLE,
    rayClusterSpec=CLUSTER,
    submitterPodTemplate=POD,
    metadata=TEXTS,
    clusterSelector=TEXTS,
    submitterConfig=fields([], backoffLimit=WHOLE),
    managedBy=TEXT,
    deletionStrategy={"type": "object"},
    entrypoint=TEXT,
    runtimeEnvYAML=TEXT,
    jobId=TEXT,
    submissionMode={"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode"]},
    entrypointResources=TEXT,
    entrypointNumCpus=NUMBER,
    entrypointNumGpus=NUMBER,
    ttlSecondsAfterFinished=WHOLE,
    shutdownAfterJobFinishes=TRUTH,
    suspend=TRUTH,
)
RAY_JOB = fields(
    ["apiVersion", "kind", "metadata", "spec"],
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata={"type": "object"},
    spec=JOB,
)


def manifest() -> Any:
    return yaml.safe_load(MANIFEST.read_text())


def test_the_manifest_for_kuberay_has_only_published_fields() -> None:
    jsonschema.validate(manifest(), RAY_JOB)


def workers(document: Any) -> Any:
    return document["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]


def limits(document: Any) -> Any:
    return workers(document)["template"]["spec"]["containers"][0]["resources"]["limits"]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda each: each["spec"].update(ttlSecondsAfterFinish=1), "'ttlSecondsAfterFinish' was unexpected"),
        (lambda each: each["spec"].update(backoffLimit="10"), "'10' is not of type 'integer'"),
        (lambda each: each.update(apiVersion="ray.io/v1alpha1"), "'ray.io/v1' was expected"),
        (lambda each: each["spec"]["rayClusterSpec"].pop("headGroupSpec"), "'headGroupSpec' is a required property"),
        (lambda each: workers(each).pop("rayStartParams"), "'rayStartParams' is a required property"),
        (lambda each: workers(each)["rayStartParams"].update({"num-cpus": 0}), "0 is not of type 'string'"),
        (lambda each: workers(each)["template"]["spec"].pop("containers"), "'containers' is a required property"),
        (lambda each: workers(each)["template"]["spec"]["containers"][0].update(img="x"), "'img' was unexpected"),
        (lambda each: limits(each).update(memory="32 GiB"), "'32 GiB' does not match"),
        (lambda each: limits(each).update(cpu=None), "None is not valid under any of the given schemas"),
    ],
)
def test_a_manifest_with_a_mistake_would_be_found(damage: Callable[[Any], object], reason: str) -> None:
    damaged = copy.deepcopy(manifest())
    damage(damaged)
    with pytest.raises(jsonschema.ValidationError, match=re.escape(reason)):
        jsonschema.validate(damaged, RAY_JOB)


def test_the_manifest_keeps_to_what_the_operator_demands_beside_its_schema() -> None:
    document = manifest()
    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,45}[a-z0-9])?", document["metadata"]["name"])
    spec = document["spec"]
    assert spec["shutdownAfterJobFinishes"], "else ttlSecondsAfterFinished is refused"
    assert spec["backoffLimit"] >= 0 <= spec["ttlSecondsAfterFinished"]
    for group in spec["rayClusterSpec"]["workerGroupSpecs"]:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        resources = group["rayStartParams"].get("resources", "'{}'")
        assert all(isinstance(each, int) for each in json.loads(shlex.split(resources)[0]).values())


def test_the_clusters_of_the_manifest_have_what_its_command_line_asks_for() -> None:
    spec = manifest()["spec"]
    words = dict(word.split("=", 1) for word in shlex.split(spec["entrypoint"])[2:])
    groups = {group["groupName"]: group for group in spec["rayClusterSpec"]["workerGroupSpecs"]}
    (disk,) = json.loads(shlex.split(groups["replay"]["rayStartParams"]["resources"])[0])
    assert words["cluster.ray.replay_resource"] == disk
    pools = yaml.safe_load(words["cluster.pools"])
    limits = groups["gpus"]["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert {pool["gpus"] for pool in pools.values()} == {int(limits["nvidia.com/gpu"])}
    assert sum(pool["nodes"] for pool in pools.values()) == groups["gpus"]["replicas"]


def test_the_manifest_names_the_version_of_ray_that_is_tested() -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    assert manifest()["spec"]["rayClusterSpec"]["rayVersion"] == version("ray")


def test_every_container_of_the_manifest_mounts_volumes_that_its_pod_has() -> None:
    spec = manifest()["spec"]["rayClusterSpec"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        mounted = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
        names = [volume["name"] for volume in pod["volumes"]]
        assert (mounted, len(mounted)) == (set(names), len(names)), "the names of a pod's volumes are unique"


def test_the_command_line_of_the_manifest_is_one_that_asyncrl_takes(tmp_path: Path) -> None:
    job = manifest()["spec"]
    program, command, *words = shlex.split(job["entrypoint"])
    assert (program, command) == ("asyncrl", "train")
    mine = tmp_path / "experiment.yaml"
    mine.write_text("model:\n  path: somewhere\n")
    config = composed([word.replace("/shared/experiment.yaml", str(mine)) for word in words])
    assert config.cluster.launcher == "ray"
    assert config.cluster.ray.replay_resource == "disk"
    assert sum(pool["nodes"] for pool in config.cluster.pools.values()) == 3
