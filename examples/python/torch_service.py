# SPDX-License-Identifier: Apache-2.0
"""A PyTorch service: the model process, and callers in any number of others.

    python examples/python/torch_service.py                  # serves; Ctrl-C ends it
    python examples/python/torch_service.py ask 8            # 8 callers, in another terminal
"""

import multiprocessing
import signal
import sys

import numpy as np
import ringbatch as rb


def serve():
    import torch

    @rb.worker("classify", inputs={"image": ("float32", (3, 64, 64))}, outputs={"scores": ("float32", (10,))}, max_batch_size=32)
    class Classify:
        def setup(self):  # once in each worker process: load your weights here
            torch.manual_seed(0)
            layers = [torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(8, 10)]
            self.net = torch.nn.Sequential(*layers).eval()

        @torch.inference_mode()
        def __call__(self, batch):
            images = torch.tensor(batch.inputs["image"])  # a copy of all rows: the inputs themselves are read-only
            batch.outputs["scores"][...] = self.net(images).numpy()

    rb.serve(Classify, processes=1)


def ask(caller):
    with rb.connect("classify", wait=60) as model:
        image = np.full((3, 64, 64), caller, "float32")
        return int(model(image, timeout=30).argmax())


if __name__ == "__main__":
    if sys.argv[1:2] == ["ask"]:
        callers = int(sys.argv[2])
        with multiprocessing.Pool(callers, signal.signal, (signal.SIGINT, signal.SIG_IGN)) as pool:
            print(len(pool.map(ask, range(callers))), "answers")
    else:
        serve()
