#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""ResNet-50 with random weights.

    resnet50.py FILE.jit                  # writes it as TorchScript
    resnet50.py FILE.pt2                  # exported, in float16 and channels last, for a GPU
    ringbatch torch resnet50:make …       # or makes it in each process
"""

import sys

import torch
import torchvision


def make():
    torch.manual_seed(1)
    return torchvision.models.resnet50(weights=None).eval()


def export(file):
    net = make().half().cuda().to(memory_format=torch.channels_last)
    x = torch.rand(2, 3, 224, 224, dtype=torch.float16, device="cuda").contiguous(memory_format=torch.channels_last)
    batch = torch.export.Dim("batch", min=1, max=1024)
    torch.export.save(torch.export.export(net, (x,), dynamic_shapes=({0: batch},)), file)


if __name__ == "__main__":
    if sys.argv[1].endswith(".pt2"):
        export(sys.argv[1])
    else:
        with torch.inference_mode():
            traced = torch.jit.trace(make(), torch.rand(2, 3, 224, 224))
        torch.jit.save(traced, sys.argv[1])
