# SPDX-License-Identifier: Apache-2.0
"""Runs the examples of docs/gateway.md, and checks deploy/."""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys

from conftest import ROOT, Gateway

TEXT = (ROOT / "docs" / "gateway.md").read_text()


def blocks(language: str, gateway: Gateway) -> list[str]:
    found = re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.M | re.S)
    assert found, language
    here = {"127.0.0.1:8000": gateway.http, "127.0.0.1:8001": gateway.grpc, "all-MiniLM-L6-v2": "embedder"}
    for there, at in here.items():
        found = [b.replace(there, at) for b in found]
    return found


def test_the_curl_examples(gateway: Gateway, tmp_path: pathlib.Path) -> None:
    as_json, raw = (subprocess.run(["bash", "-ec", b], cwd=tmp_path, capture_output=True, check=True).stdout for b in blocks("sh", gateway))
    assert json.loads(as_json)["outputs"][0]["data"] == [2 * i + 1 for i in range(16)]
    assert raw.split() == [b"1"] * 16


def test_the_python_example(gateway: Gateway) -> None:
    for block in blocks("python", gateway):
        subprocess.run([sys.executable, "-c", block], check=True)


def test_the_manifests() -> None:
    subprocess.run([sys.executable, ROOT / "deploy" / "kubernetes" / "check.py"], check=True)
