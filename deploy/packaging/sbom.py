# SPDX-License-Identifier: Apache-2.0
"""The bill of materials of the ringbatch command, CycloneDX 1.5.

    sbom.py BINARY >sbom.cdx.json

The binary itself lists every linked module (go version -m).
The C library and the extension need only libc; the Python package needs NumPy.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import uuid
from datetime import datetime, timezone
from pathlib import Path

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

REPOSITORY = Path(__file__).resolve().parents[2]


def components(binary: str) -> tuple[str, list[dict]]:
    """The Go version, and the modules."""
    lines = subprocess.check_output(["go", "version", "-m", binary], text=True).splitlines()
    found = []
    for line in lines[1:]:
        kind, *rest = line.strip().split("\t")
        if kind != "dep":
            continue
        path, version, checksum = (*rest, "")[:3]
        entry = {"type": "library", "bom-ref": f"{path}@{version}", "name": path, "version": version,
            "purl": f"pkg:golang/{path}@{version}"}
        if checksum.startswith("h1:"):  # of the module's files, as in go.sum
            entry["hashes"] = [{"alg": "SHA-256", "content": base64.b64decode(checksum[3:]).hex()}]
        found.append(entry)
    return lines[0].split()[-1], found


def main() -> int:
    version = (REPOSITORY / "VERSION").read_text(encoding="utf-8").strip()
    go, modules = components(sys.argv[1])
    if not modules:
        sys.exit(f"{sys.argv[1]} names no modules")
    when = datetime.fromtimestamp(int(os.environ["SOURCE_DATE_EPOCH"]), timezone.utc)
    ours = f"pkg:golang/github.com/ringbatch/ringbatch@v{version}"
    standard = {"type": "library", "bom-ref": f"std@{go}", "name": "std", "version": go, "purl": f"pkg:golang/std@{go[2:]}",
        "licenses": [{"license": {"id": "BSD-3-Clause"}}]}
    numpy = {"type": "library", "bom-ref": "numpy", "name": "numpy", "purl": "pkg:pypi/numpy", "scope": "optional",
        "description": "needed by the Python package, installed by pip"}
    parts = [standard, *modules, numpy]
    bom = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, ours + when.isoformat())}",  # the same commit, the same number
        "version": 1,
        "metadata": {
            "timestamp": when.isoformat(),
            "component": {"type": "application", "bom-ref": ours, "name": "ringbatch", "version": version, "purl": ours,
            "licenses": [{"license": {"id": "Apache-2.0"}}]},
        },
        "components": parts,
        "dependencies": [{"ref": ours, "dependsOn": [p["bom-ref"] for p in parts]}],
    }
    text = json.dumps(bom, indent=1)
    wrong = JsonStrictValidator(SchemaVersion.V1_5).validate_str(text)
    if wrong:
        sys.exit(f"not CycloneDX 1.5: {wrong}")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
