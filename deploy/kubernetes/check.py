# SPDX-License-Identifier: Apache-2.0
"""Checks the manifests against Kubernetes' own schemas, without a cluster."""

from __future__ import annotations

import pathlib
import sys

import kubernetes_validate
import yaml

HERE = pathlib.Path(__file__).parent
KUBERNETES = "1.31"


def main() -> int:
    bad = 0
    for path in sorted(HERE.glob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            where = f"{path.name}: {document['kind']} {document['metadata']['name']}"
            try:
                kubernetes_validate.validate(document, KUBERNETES, strict=True)
                print(f"{where}: valid for Kubernetes {KUBERNETES}")
            except kubernetes_validate.ValidationError as e:
                bad += 1
                print(f"{where}: {e.message} at {list(e.path)}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
