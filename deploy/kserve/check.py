# SPDX-License-Identifier: Apache-2.0
"""Checks the manifests without a cluster.

KServe's kinds are custom resources, of which the package kubernetes-validate
has no schemas. So their fields are checked against a schema of exactly those
that are used here; and the pod that they amount to is checked against
Kubernetes' own schema.

With a folder of KServe's own definitions (config/crd/full of its repository)
the manifests are checked against those too: check.py FOLDER.
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
SCHEMAS = {
    "ServingRuntime": fields(
        ["apiVersion", "kind", "metadata", "spec"],
        apiVersion={"const": "serving.kserve.io/v1alpha1"},
        kind={"const": "ServingRuntime"},
        metadata=METADATA,
        spec=fields(
            ["supportedModelFormats", "containers"],
            supportedModelFormats={"type": "array", "minItems": 1, "items": fields(["name"], name=TEXT, version=TEXT, autoSelect={"type": "boolean"})},
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


def strict(schema: dict[str, object]) -> dict[str, object]:
    """A definition's schema that refuses fields it does not know: Kubernetes would drop them."""
    for key in ("properties", "patternProperties"):
        for child in schema.get(key, {}).values():  # type: ignore[attr-defined]
            strict(child)
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            strict(schema[key])  # type: ignore[arg-type]
    if "properties" in schema and "additionalProperties" not in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        schema["additionalProperties"] = False
    if schema.pop("x-kubernetes-int-or-string", None):
        schema.pop("type", None)
    return schema


def check_definitions(folder: pathlib.Path, manifests: list[dict[str, object]]) -> None:
    """Checks the manifests against KServe's own definitions."""
    definitions = {d["spec"]["names"]["kind"]: d for d in map(yaml.safe_load, map(pathlib.Path.read_text, folder.glob("*.yaml"))) if "names" in d.get("spec", {})}
    for manifest in manifests:
        version = str(manifest["apiVersion"]).rpartition("/")[2]
        served = {v["name"]: v["schema"]["openAPIV3Schema"] for v in definitions[manifest["kind"]]["spec"]["versions"] if v["served"]}
        schema = served[version]
        schema["properties"].pop("metadata")  # Kubernetes' own
        schema = strict(schema)
        manifest = {k: v for k, v in manifest.items() if k != "metadata"}
        jsonschema.validate(manifest, schema)
        try:  # a schema that lets everything pass would prove nothing
            jsonschema.validate({**manifest, "spec": {**manifest["spec"], "misspelt": 1}}, schema)  # type: ignore[dict-item]
            sys.exit(f"the definition of {manifest['kind']} takes a misspelt field")
        except jsonschema.ValidationError:
            pass
    print("deploy/kserve: the manifests fit KServe's own definitions in", folder)


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
    if len(sys.argv) > 1:
        check_definitions(pathlib.Path(sys.argv[1]), [runtime, service])


if __name__ == "__main__":
    main()
