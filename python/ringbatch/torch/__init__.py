# SPDX-License-Identifier: Apache-2.0
"""Serves a PyTorch module: whole batches straight from the ring.

    import ringbatch.torch as rt

    rt.serve(module, "resnet50", inputs=["x:f32[3,224,224]"], dtype=torch.float16, max_batch_size=32)

or from the command line, for an exported program, a TorchScript file, or a
function that makes a module:

    ringbatch torch resnet50.pt2
    ringbatch torch resnet50.jit --input 'x:f32[3,224,224]' --half --channels-last
    ringbatch torch mymodels.vision:resnet50 --input 'x:f32[3,224,224]' --processes 2

The ring is pinned once. Inputs are copied on a second stream while the batch before
them computes; outputs are written in place. A module is recorded as CUDA graphs if
that works.
"""

from .follow import follow
from .options import Options
from .serving import serve

__all__ = ["Options", "follow", "serve"]
