# SPDX-License-Identifier: Apache-2.0
"""Checks the manifests without a cluster.

The package kubernetes-validate has no schemas of KServe's custom resources. So a schema here
lists exactly the fields that the manifests use. The resulting pod is checked against Kubernetes' own schema.
"""

from __future__ import annotations

import pathlib
import sys

import jsonschema
import kubernetes_validate
import yaml

HERE = pathlib.Path(__file__).parent
KUBERNETES = "1.31"


def fields(required: list[str], **properties: object) -> dict[str, object]:
    """An object with these fields and no other: a misspelt one is an error."""
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


TEXT = {"type": "string", "minLength": 1}
METADATA = fields(["name"], name={"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"})
PROTOCOLS = {"enum": ["v1", "v2", "grpc-v1", "grpc-v2"]}
FORMAT = fields(["name"], name=TEXT, version=TEXT, autoSelect={"type": "boolean"})
SCHEMAS = {
    "ServingRuntime": fields(
        ["apiVersion", "kind", "metadata", "spec"],
        apiVersion={"const": "serving.kserve.io/v1alpha1"},
        kind={"const": "ServingRuntime"},
        metadata=METADATA,
        spec=fields(
            ["supportedModelFormats", "containers"],
            supportedModelFormats={"type": "array", "minItems": 1, "items": FORMAT},
            protocolVersions={"type": "array", "items": PROTOCOLS},
            containers={"type": "array", "minItems": 1},  # checked as a pod's
            volumes={"type": "array"},
        ),
    ),
    "InferenceService": fields(
        ["apiVersion", "kind", "metadata", "spec"],
        apiVersion={"const": "serving.kserve.io/v1beta1"},
        kind={"const": "InferenceService"},
        metadata=METADATA,
        spec=fields(
            ["predictor"],
            predictor=fields(
                ["model"],
                minReplicas={"type": "integer", "minimum": 0},
                maxReplicas={"type": "integer", "minimum": 1},
                terminationGracePeriodSeconds={"type": "integer", "minimum": 1},
                model=fields(
                    ["modelFormat", "runtime"],
                    runtime=TEXT,
                    protocolVersion=PROTOCOLS,
                    modelFormat=fields(["name"], name=TEXT, version=TEXT),
                    storageUri=TEXT,
                ),
            ),
        ),
    ),
}


def main() -> None:
    runtime = yaml.safe_load((HERE / "runtime.yaml").read_text())
    service = yaml.safe_load((HERE / "service.yaml").read_text())
    for manifest in (runtime, service):
        jsonschema.validate(manifest, SCHEMAS[manifest["kind"]])
    spec = {"containers": runtime["spec"]["containers"], "volumes": runtime["spec"]["volumes"]}
    spec["terminationGracePeriodSeconds"] = service["spec"]["predictor"]["terminationGracePeriodSeconds"]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "affine"}, "spec": spec}
    kubernetes_validate.validate(pod, KUBERNETES, strict=True)
    model = service["spec"]["predictor"]["model"]
    formats = [f["name"] for f in runtime["spec"]["supportedModelFormats"]]
    assert model["runtime"] == runtime["metadata"]["name"] and model["modelFormat"]["name"] in formats
    assert model["protocolVersion"] in runtime["spec"]["protocolVersions"]
    # A schema that lets everything pass would prove nothing.
    for broken in ({**runtime, "spec": {**runtime["spec"], "container": []}}, {**service, "kind": "Pod"}):
        try:
            jsonschema.validate(broken, SCHEMAS["ServingRuntime" if "containers" in broken["spec"] else "InferenceService"])
        except jsonschema.ValidationError:
            continue
        sys.exit(f"the schema takes {broken}")
    bad = {**pod, "spec": {**spec, "containers": [{**spec["containers"][0], "imagee": "x"}]}}
    try:
        kubernetes_validate.validate(bad, KUBERNETES, strict=True)
        sys.exit("kubernetes-validate takes a misspelt field")
    except kubernetes_validate.ValidationError:
        pass
    print("deploy/kserve: the KServe fields fit the schema here, the pod fits Kubernetes", KUBERNETES)


if __name__ == "__main__":
    main()
