# SPDX-License-Identifier: Apache-2.0
"""Runs a transformer on texts of different lengths.

    packed   the tokens of all texts in one row; attention looks at one text's tokens alone
    padded   texts of one bucket together, padded to the longest; for models that ignore padding
    equal    texts of equal length together
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from ..worker.axes import powers_of_two
from .graphs import Graphs

WAYS = ("packed", "padded", "equal")
MOST_TOKENS = 16_384  # of a forward pass, unless one text has more
_ATTENTION = "ringbatch_packed"

Tokens = dict[str, list[int]]  # of a text: input_ids, and what else the tokenizer gives

_now = threading.local()  # .ends: where the texts of this thread's forward pass end


def packed_attention(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: float | None = None, dropout: float = 0.0,
        is_causal: bool | None = None, **more: Any) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Of transformers' attention interface: [1, heads, tokens, width] in, [1, tokens, heads, width] out."""
    odd = [name for name in ("sliding_window", "softcap", "position_bias", "s_aux") if more.get(name) is not None]
    if odd or attention_mask is not None or query.shape[0] != 1 or key.shape[2] != query.shape[2]:
        raise NotImplementedError(f"packed attention with {', '.join(odd) or 'a mask'}")
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if key.shape[1] != query.shape[1]:
        key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
    if query.is_cuda:
        from torch.nn.attention.varlen import varlen_attn  # PyTorch 2.10 or newer

        scale: dict[str, Any] = {} if scaling in (None, query.shape[3] ** -0.5) else {"scale": scaling}
        q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
        y = varlen_attn(q, k, v, _now.offsets, _now.offsets, _now.most, _now.most, **_causal(causal), **scale)
        return torch.unsqueeze(y, 0), None  # type: ignore[arg-type]
    y = query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])
    begin = 0
    for end in _now.ends:
        row = slice(begin, end)
        part = F.scaled_dot_product_attention(query[:, :, row], key[:, :, row], value[:, :, row], is_causal=causal, scale=scaling)
        y[:, row] = part.transpose(1, 2)
        begin = end
    return y, None


@functools.lru_cache
def _causal(causal: bool) -> dict[str, Any]:
    from inspect import signature

    from torch.nn.attention.varlen import varlen_attn

    return {"is_causal": causal} if "is_causal" in signature(varlen_attn).parameters else {"window_size": (-1, 0 if causal else -1)}


class _Given(torch.nn.Module):
    """Stands for the body of a classifier, whose hidden states are known."""

    def __init__(self, body: torch.nn.Module) -> None:
        super().__init__()
        self.pooler = getattr(body, "pooler", None)
        self.states: Any = None

    def forward(self, *_: Any, **__: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions

        pooled = self.pooler(self.states) if self.pooler is not None else None
        return BaseModelOutputWithPoolingAndCrossAttentions(last_hidden_state=self.states, pooler_output=pooled)


class Encoder:
    """The hidden states of texts, or the logits of a classifier."""

    def __init__(self, model: Any, device: torch.device, pad: int, classify: bool) -> None:
        self.model, self.device, self.pad, self.classify = model.to(device), device, pad, classify
        self.body = getattr(model, model.base_model_prefix, model) if classify else model
        place = next((m for name, m in self.body.named_modules() if name.endswith("position_embeddings")
            and isinstance(m, torch.nn.Embedding)), None)  # fmt: skip
        self.first_place = 0 if place is None or place.padding_idx is None else place.padding_idx + 1  # RoBERTa's
        #: None: there is no limit.
        self.most_tokens = place.num_embeddings - self.first_place if place is not None else None
        self.way, self._plain = "equal", model.config._attn_implementation
        self.graphs: Graphs | None = None

    def take(self, way: str) -> None:
        """Raises an error if the model has no such way."""
        self.way = way
        if way == "packed":
            from transformers import AttentionInterface, AttentionMaskInterface

            if self.device.type == "cuda" and self.model.dtype not in (torch.float16, torch.bfloat16):
                raise NotImplementedError("packed attention on a GPU needs 16 bits")
            AttentionInterface.register(_ATTENTION, packed_attention)
            AttentionMaskInterface.register(_ATTENTION, lambda *_, **__: None)
        self.model.set_attn_implementation(_ATTENTION if way == "packed" else self._plain)
        if way == "packed" and self.model.config._attn_implementation != _ATTENTION:
            raise NotImplementedError("its attention cannot be replaced")
        if way == "packed" and self.classify:
            self._head = copy.copy(self.model)  # the same weights; the body is replaced
            self._head._modules = {**self.model._modules, self.model.base_model_prefix: _Given(self.body)}

    @torch.inference_mode()
    def run(self, texts: Sequence[Tokens]) -> Iterator[tuple[list[int], torch.Tensor, list[int]]]:
        """Of some texts each: their numbers, and a line of logits for each, or the hidden states of each token; their sizes."""
        for some in self._groups([len(t["input_ids"]) for t in texts]):
            part = [texts[i] for i in some]
            sizes = [len(t["input_ids"]) for t in part]
            yield some, self._packed(part, sizes) if self.way == "packed" else self._padded(part, sizes), sizes

    def _groups(self, sizes: list[int]) -> Iterator[list[int]]:
        """Texts for one forward pass each."""
        order = range(len(sizes)) if self.way == "packed" else sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True)
        buckets = np.array(powers_of_two(max([16, *sizes])))
        some: list[int] = []
        cost, bucket = 0, 0
        for i in order:
            of = {"packed": 0, "equal": sizes[i], "padded": int(buckets.searchsorted(sizes[i]))}[self.way]
            more = sizes[i] if self.way == "packed" or not some else sizes[some[0]]
            if some and (of != bucket or cost + more > MOST_TOKENS):
                yield some
                some, cost, more = [], 0, sizes[i]
            some.append(i)
            cost, bucket = cost + more, of
        if some:
            yield some

    def _packed(self, texts: Sequence[Tokens], sizes: list[int]) -> torch.Tensor:
        columns = {name: np.concatenate([np.array(t[name]) for t in texts]) for name in texts[0]}
        columns["position_ids"] = np.concatenate([np.arange(self.first_place, self.first_place + n) for n in sizes])
        if self.graphs and self.graphs.fit(sizes):
            states = self.graphs.run(columns, sizes)
        else:
            offsets = np.cumsum([0, *sizes])
            _now.ends = offsets[1:].tolist()
            states = self._states({name: self._to(x[None]) for name, x in columns.items()}, self._to(offsets.astype("int32")), max(sizes))
        if not self.classify:
            return states
        self._head._modules[self.model.base_model_prefix].states = torch.nn.utils.rnn.pad_sequence(states.split(sizes), batch_first=True)
        return self._head(**self._columns(texts, sizes)).logits

    def _states(self, columns: Mapping[str, torch.Tensor], offsets: torch.Tensor, longest: int) -> torch.Tensor:
        _now.offsets, _now.most = offsets, longest
        return self.body(**columns, **self._uncached()).last_hidden_state[0]

    @torch.inference_mode()
    def record(self, text: Tokens, longest: int) -> None:
        """Records packed batches on a GPU. text: any. longest: the tokens of a text, at most."""
        if self.way == "packed" and self.device.type == "cuda":
            most = max(MOST_TOKENS, longest)
            self.graphs = Graphs(self._states, [*text, "position_ids"], most, longest, self.device)

    def _padded(self, texts: Sequence[Tokens], sizes: list[int]) -> torch.Tensor:
        columns = self._columns(texts, sizes)
        result = self.model(**columns, **self._uncached())
        return result.logits if self.classify else result.last_hidden_state[columns["attention_mask"].bool()]

    def _uncached(self) -> dict[str, Any]:
        return {"use_cache": False} if getattr(self.model.config, "use_cache", False) else {}

    def _columns(self, texts: Sequence[Tokens], sizes: list[int]) -> dict[str, torch.Tensor]:
        """The model's arguments, padded on the right."""
        most, columns = max(sizes), {}
        for name in (*texts[0], "attention_mask"):
            x = np.full((len(texts), most), self.pad if name == "input_ids" else 0)
            for row, t in zip(x, texts):
                row[: len(t["input_ids"])] = t.get(name, 1)
            columns[name] = self._to(x)
        return columns

    def _to(self, x: np.ndarray) -> torch.Tensor:
        t = torch.from_numpy(x)
        return t.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else t


def pool(states: torch.Tensor, sizes: list[int], modes: Sequence[str]) -> torch.Tensor:
    """A vector for each text, of the hidden states of all tokens."""
    n, states = len(sizes), states.float()
    counts = torch.tensor(sizes, device=states.device)
    ends = counts.cumsum(0)
    row = torch.arange(n, device=states.device).repeat_interleave(counts, output_size=len(states))

    def total(x: torch.Tensor) -> torch.Tensor:
        return x.new_zeros(n, x.shape[1]).index_add_(0, row, x)

    made = []
    for mode in modes:
        if mode == "cls":
            made.append(states[ends - counts])
        elif mode == "lasttoken":
            made.append(states[ends - 1])
        elif mode == "max":
            made.append(torch.stack([x.amax(0) for x in states.split(sizes)]))
        elif mode == "weightedmean":
            weight = torch.cat([torch.arange(1, k + 1, device=states.device) for k in sizes]).float()[:, None]
            made.append(total(states * weight) / total(weight))
        else:
            by = counts[:, None].float()
            made.append(total(states) / (by if mode == "mean" else by.sqrt()))
    return torch.cat(made, 1)
