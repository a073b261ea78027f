#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes ResNet-50 with random weights as TorchScript: resnet50.py FILE"""

import sys

import torch
import torchvision

torch.manual_seed(1)
model = torchvision.models.resnet50(weights=None).eval()
with torch.inference_mode():
    traced = torch.jit.trace(model, torch.rand(2, 3, 224, 224))
torch.jit.save(traced, sys.argv[1])
