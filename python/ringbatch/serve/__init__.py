# SPDX-License-Identifier: Apache-2.0
"""Starts and watches a broker and worker processes; the commands serve, torch and onnx."""
