# SPDX-License-Identifier: Apache-2.0
"""``ringbatch.hf.serve``: reads a folder, compares ways to batch with the model alone, and serves the quickest."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .. import errors
from ..binding.library import Duration
from ..torch.checks import tolerance
from ..torch.lanes import failure
from ..torch.preparing import device_of, settle_memory, short_sleeps
from ..worker import program, trials
from ..worker.batch import Batch
from ..worker.import_path import name_of
from ..worker.refusal import for_python
from ..worker.ring import worker_options
from ..worker.worker import Worker
from .encoder import WAYS, Encoder, Tokens, pool
from .folder import Head, head_of, load, task_of

_USUAL_TOKENS, _MOST_BYTES = 512, 64 << 10
# Of the texts that a model is tried with. First the short ones: an index out of range would end the use of a GPU.
_SHORT_TEXTS, _TRIED_TOKENS = 2, (7, 3, 40, 90, 512)


@for_python
def serve(
    folder: str | os.PathLike[str],
    model: str | None = None,
    *,
    task: str | None = None,
    truncate: bool = False,
    max_bytes: int | None = None,
    allow_pickle: bool = False,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    stop: threading.Event | None = None,
    wait: Duration = 10.0,
    socket: str | os.PathLike[str] | None = None,
    **policy: Any,
) -> None:
    """Attaches to the broker as a worker and serves the folder's model until stop is set.

    folder: config.json, safetensors and a tokenizer, as save_pretrained and sentence-transformers write them.
    model: the model's name (default: the folder's). task: "embed" (text -> embedding, tokens) or
    "classify" (text -> label, score, scores, tokens); by default config.json tells it.
    truncate: cut texts that are too long; otherwise they are refused, each alone.
    max_bytes: of a text in UTF-8 (default: 8 for each token, 32 with truncate, at most 64 KiB).
    allow_pickle: also load weights that are pickles, which may run any code.
    dtype: compute in torch.float16 or torch.bfloat16. policy: as in ringbatch.worker, max_batch_size=64.
    """
    path = Path(folder)
    texts = TextModel(path, task, device, dtype, allow_pickle, truncate, max_bytes)
    texts.choose_way()
    if texts.device.type == "cuda":
        policy.setdefault("gpu", f"{texts.device.index} {torch.cuda.get_device_name(texts.device)}")
    policy.setdefault("version", program.of_folder(path, [texts.task, texts.signature, dtype, truncate]))
    short_sleeps()
    settle_memory()
    worker = Worker(texts, model or name_of(str(path)), texts.signature, worker_options(depth=2, **policy))
    print(f"serving {worker.model}: {worker.signature} on {policy.get('gpu', texts.device)}; {texts.said}", flush=True)
    worker.run(socket=socket, stop=stop, wait=wait)


class BadText(ValueError):
    """A text that the model does not take. Its name begins the text of the failure; the gateway answers with 400 then."""


class TextModel:
    """A function of batches of texts."""

    def __init__(
        self, folder: str | os.PathLike[str], task: str | None = None, device: str | torch.device | None = None,
        dtype: torch.dtype | None = None, pickles: bool = False, truncate: bool = False, max_bytes: int | None = None,
    ) -> None:  # fmt: skip
        path, where = Path(folder), device_of(device)
        task = task_of(path, task)
        self.task, self.device, self._truncate, self.said = task, where, truncate, ""
        self.head = head_of(path, pickles) if task == "embed" else Head(path)
        module, self.tokenizer = load(self.head.path, task, dtype, pickles)
        config = module.config
        pad = next(x for x in (self.tokenizer.pad_token_id, getattr(config, "pad_token_id", None), 0) if x is not None)
        if where.type == "cuda":
            torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN's attention takes 40 ms to plan each new size
        self.encoder = Encoder(module, where, pad, task == "classify")
        self.dense = torch.nn.Sequential(*self.head.dense).to(where).eval()
        limits = [self.head.max_tokens, self.encoder.most_tokens, getattr(config, "max_position_embeddings", None)]
        limits.append(self.tokenizer.model_max_length if self.tokenizer.model_max_length < 1 << 30 else None)
        self.most = min([n for n in limits if n and n > 0] or [_USUAL_TOKENS])
        self.coarse = module.dtype in (torch.float16, torch.bfloat16) or where.type == "cuda"
        self.labels = [str(config.id2label[i]) for i in range(config.num_labels)] if task == "classify" else []
        self._scores = _scores_of(config)
        size = max_bytes or min((32 if truncate else 8) * self.most, _MOST_BYTES)
        try:
            self.width = self.lines(self.tokens(["a"])).shape[1]
        except (RuntimeError, TypeError, ValueError, AttributeError, IndexError) as e:
            raise errors.Invalid(f"{path}: {type(module).__name__} cannot {task}: {failure(e)}") from e
        longest = max([1, *(len(label.encode()) for label in self.labels)])
        outs = f"embedding:f32[{self.width}]" if task == "embed" else f"label:str[<={longest}] score:f32[] scores:f32[{self.width}]"
        self.signature = f"text:str[<={size}] -> {outs} tokens:i32[]"

    def tokens(self, texts: Sequence[str]) -> list[Tokens]:
        """Of each text, whatever its length."""
        given = [self.head.prompt + (t.lower() if self.head.lower else t) for t in texts]
        cut = dict(truncation=True, max_length=self.most) if self._truncate else {}
        found = self.tokenizer(given, padding=False, return_attention_mask=False, verbose=False, **cut)
        return [dict(zip(found.keys(), values)) for values in zip(*found.values())]

    def __call__(self, batch: Batch) -> dict[str, Any]:
        texts: Any = batch.inputs["text"]
        tokens = self.tokens(texts)
        wrong: dict[int, BadText] = {}
        for i, t in enumerate(tokens):
            n = len(t["input_ids"])
            if n > self.most:
                wrong[i] = BadText(f"the text has {n} tokens, and the model takes {self.most}: cut it, or serve the model with truncate")
            elif n == 0:
                wrong[i] = BadText("the text has no tokens")
        for i, why in wrong.items():
            batch.fail(batch.request_of(i), why)
        good = [i for i in range(len(tokens)) if i not in wrong]
        found = self.lines([tokens[i] for i in good]) if good else np.zeros((0, self.width), "float32")
        lines = np.zeros((len(tokens), self.width), "float32")
        lines[good] = found
        return {**self._outputs(lines), "tokens": np.array([len(t["input_ids"]) for t in tokens], "int32")}

    def lines(self, tokens: Sequence[Tokens]) -> np.ndarray:
        """A vector for each text, or its logits."""
        made: torch.Tensor | None = None
        for some, y, sizes in self.encoder.run(tokens):
            if self.task == "embed":
                with torch.inference_mode():
                    y = self.dense(pool(y, sizes, self.head.pooling))
                    y = torch.nn.functional.normalize(y, dim=1) if self.head.normalize else y
            made = y.new_zeros(len(tokens), y.shape[1], dtype=torch.float32) if made is None else made
            made[some] = y.float()
        assert made is not None
        return made.cpu().numpy()

    def _outputs(self, lines: np.ndarray) -> dict[str, Any]:
        if self.task == "embed":
            return {"embedding": lines}
        scores = self._scores(lines)
        best = scores.argmax(1)
        return {"label": [self.labels[i] for i in best], "score": scores[np.arange(len(best)), best], "scores": scores}

    # -- before serving

    def choose_way(self) -> None:
        """Takes the first way whose results are those of each text alone."""
        texts = self._examples()
        alone = np.concatenate([self.lines([t]) for t in texts])
        within, why = trials.HALF_TOLERANCE if self.coarse else tolerance(self.encoder.model, False), []
        for way in WAYS:
            try:
                self.encoder.take(way)
                if all(trials.agree([self.lines(texts[:n])], [alone[:n]], within) for n in (_SHORT_TEXTS, len(texts))):
                    break
                why.append(f"{way}: results differ")
            except (NotImplementedError, RuntimeError, TypeError, ValueError, KeyError, IndexError, AttributeError, ImportError) as e:
                why.append(f"{way}: {failure(e)}")
        else:
            raise errors.Invalid(f"texts give other results together than alone: {'; '.join(why)}")
        with contextlib.suppress(RuntimeError):  # some models cannot be recorded
            self.encoder.record(texts[0], self.most)
        if self.encoder.graphs and not trials.agree([self.lines(texts)], [alone], within):
            self.encoder.graphs = None
        how = {"packed": "texts are packed", "padded": "texts are padded in buckets", "equal": "texts of equal length share a batch"}[way]
        how += ", in CUDA graphs" * bool(self.encoder.graphs)
        self.said = f"{how}, at most {self.most} tokens{', cut' * self._truncate}" + f" (not {'; '.join(why)})" * bool(why)

    def _examples(self) -> list[Tokens]:
        """Texts of random tokens."""
        rng, made = np.random.default_rng(0), []
        for n in _TRIED_TOKENS:
            text = self.tokenizer.decode(rng.integers(0, len(self.tokenizer), n).tolist(), skip_special_tokens=True)
            found = self.tokenizer([text], padding=False, return_attention_mask=False, truncation=True, max_length=min(n, self.most))
            made.append({name: values[0] for name, values in found.items()})
        return [t for t in made if t["input_ids"]]


def _scores_of(config: Any) -> Callable[[np.ndarray], np.ndarray]:
    """From logits to scores, as transformers' pipeline does."""
    how = getattr(config, "function_to_apply", None)
    if config.problem_type == "regression" or how == "none":
        return lambda x: x
    if how:
        raise errors.Invalid(f"config.json: function_to_apply {how!r} cannot be served; 'none' can")
    if config.problem_type == "multi_label_classification" or config.num_labels == 1:
        return lambda x: 1 / (1 + np.exp(-x))

    def softmax(x: np.ndarray) -> np.ndarray:
        e = np.exp(x - x.max(1, keepdims=True))
        return e / e.sum(1, keepdims=True)

    return softmax
