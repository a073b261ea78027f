# SPDX-License-Identifier: Apache-2.0
"""Reads a Hugging Face folder: the task, the weights, the tokenizer, and how sentence-transformers pools."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .. import errors
from ..torch.lanes import failure
from ..worker.trust import refuse_way_of_others

TASKS = ("embed", "classify")
POOLINGS = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")  # in the order of joined vectors

# The names in 1_Pooling/config.json before sentence-transformers 5.
_OLD_POOLINGS = {f"pooling_mode_{name}": mode for name, mode in (("cls_token", "cls"), ("max_tokens", "max"), ("mean_tokens", "mean"),
    ("mean_sqrt_len_tokens", "mean_sqrt_len_tokens"), ("weightedmean_tokens", "weightedmean"), ("lasttoken", "lasttoken"))}  # fmt: skip

# In the names of sentence_bert_config.json and its older siblings.
_TRANSFORMERS = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")


class Head(NamedTuple):
    """What follows the transformer, as modules.json says."""

    path: Path  # of the transformer
    pooling: tuple[str, ...] = ("mean",)
    dense: tuple[torch.nn.Module, ...] = ()
    normalize: bool = False
    prompt: str = ""
    max_tokens: int | None = None
    lower: bool = False


def task_of(folder: Path, given: str | None) -> str:
    if given and given not in TASKS:
        raise errors.Invalid(f"--task {given}: want {' or '.join(TASKS)}")
    if not folder.is_dir():
        raise errors.Invalid(f"{folder}: there is no such folder. Download a model of the Hugging Face Hub before (hf download)")
    if given:
        return given
    if (folder / "modules.json").exists():
        return "embed"
    names = read_json(folder / "config.json", needed=True).get("architectures") or []
    if any(name.endswith("ForSequenceClassification") for name in names):
        return "classify"
    if any(name.endswith(("Model", "Encoder")) and "Head" not in name for name in names):
        return "embed"
    raise errors.Invalid(f"{folder} has {', '.join(names) or 'no architecture'} in config.json, which is for another task: --task embed "
        "serves the mean of its hidden states")


def read_json(path: Path, needed: bool = False) -> Any:
    if not path.exists():
        if needed:
            raise errors.Invalid(f"{path.parent} is no folder of a Hugging Face model: it has no {path.name}")
        return {}
    refuse_way_of_others(path)
    try:
        found = json.loads(path.read_text())
    except ValueError as e:
        raise errors.Invalid(f"{path}: {e}") from None
    if not isinstance(found, list if path.name == "modules.json" else dict):
        raise errors.Invalid(f"{path} has a {type(found).__name__}, which is not what transformers writes there")
    return found


def head_of(folder: Path, pickles: bool) -> Head:
    """Pooling and what follows it, of a folder of sentence-transformers; mean pooling for others."""
    if not (folder / "modules.json").exists():
        print(f"{folder} has no modules.json: its vectors are the mean of the last hidden states, not normalized", flush=True)
        return Head(folder)
    head, dense = Head(folder), []
    for m in read_json(folder / "modules.json"):
        kind, part = m["type"].rpartition(".")[2], folder / m["path"]
        if kind == "Transformer":
            files = (read_json(part / f"sentence_{name}_config.json") for name in _TRANSFORMERS)
            about: dict[str, Any] = next(filter(None, files), {})
            head = head._replace(path=part, max_tokens=about.get("max_seq_length"), lower=bool(about.get("do_lower_case")))
        elif kind == "Pooling":
            head = head._replace(pooling=_pooling(part / "config.json"))
        elif kind == "Dense":
            dense += _dense(part, pickles)
        elif kind == "Normalize":
            head = head._replace(normalize=True)
        elif kind != "Dropout":
            raise errors.Invalid(f"{folder}/modules.json: the module {m['type']} cannot be served")
        if kind == "Dense" and head.normalize:
            raise errors.Invalid(f"{folder}/modules.json: Dense behind Normalize cannot be served")
    about = read_json(folder / "config_sentence_transformers.json")
    prompt = (about.get("prompts") or {}).get(about.get("default_prompt_name")) or ""
    if prompt and any(read_json(p).get("include_prompt") is False for p in folder.glob("*_Pooling/config.json")):
        raise errors.Invalid(f"{folder}: a default prompt that is left out of the pooling (include_prompt) cannot be served")
    return head._replace(dense=tuple(dense), prompt=prompt)


def _pooling(path: Path) -> tuple[str, ...]:
    about = read_json(path, needed=True)
    found = about.get("pooling_mode") or [mode for key, mode in _OLD_POOLINGS.items() if about.get(key)] or ["mean"]
    modes = (found,) if isinstance(found, str) else tuple(found)
    if wrong := [mode for mode in modes if mode not in POOLINGS]:
        raise errors.Invalid(f"{path}: pooling {', '.join(wrong)} cannot be served; {', '.join(POOLINGS)} can")
    return modes


def _dense(part: Path, pickles: bool) -> list[torch.nn.Module]:
    about = read_json(part / "config.json", needed=True)
    module, _, name = about.get("activation_function", "torch.nn.modules.activation.Tanh").rpartition(".")
    if not module.startswith("torch.nn.modules.") or not hasattr(torch.nn, name) or about.get("module_input_name",
            "sentence_embedding") != "sentence_embedding":  # fmt: skip
        raise errors.Invalid(f"{part}/config.json: activation {module}.{name}, or its input, cannot be served")
    linear = torch.nn.Linear(about["in_features"], about["out_features"], bias=about.get("bias", True))
    file = part / "model.safetensors"
    if file.exists():
        refuse_way_of_others(file)
        from safetensors.torch import load_file

        weights = load_file(file)
    elif pickles:
        refuse_way_of_others(part / "pytorch_model.bin")
        weights = torch.load(part / "pytorch_model.bin", map_location="cpu", weights_only=True)
    else:
        raise errors.Invalid(f"{part} has no model.safetensors. A pickle may run any code: --allow-pickle loads it")
    linear.load_state_dict({key.removeprefix("linear."): w for key, w in weights.items()})
    return [linear, getattr(torch.nn, name)()]


def load(path: Path, task: str, dtype: torch.dtype | None, pickles: bool) -> tuple[Any, Any]:
    """The model and its tokenizer. Nothing is downloaded, and no code of the folder runs."""
    import transformers

    config = read_json(path / "config.json", needed=True)
    for file in [path, *path.iterdir()]:
        refuse_way_of_others(file)
    if not pickles and not any(path.glob("*.safetensors")):
        raise errors.Invalid(f"{path} has no weights as safetensors. Others are pickles, which may run any code: --allow-pickle loads them")
    name = (config.get("architectures") or [""])[0]
    cls = transformers.AutoModelForSequenceClassification if task == "classify" else transformers.AutoModel
    if task == "embed" and name.endswith("EncoderModel"):  # of T5: the automatic one has a decoder
        cls = getattr(transformers, name, cls)
    own: Mapping[str, Any] = dict(local_files_only=True, trust_remote_code=False)
    try:
        transformers.logging.disable_progress_bar()
        model, found = cls.from_pretrained(path, **own, use_safetensors=None if pickles else True, dtype=dtype or "auto",
            output_loading_info=True, ignore_mismatched_sizes=True)  # fmt: skip
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, **own)
    except Exception as e:  # safetensors has errors of its own
        raise errors.Invalid(f"{path} cannot be loaded by transformers {transformers.__version__}: {failure(e)}") from e
    files = sorted(set(getattr(tokenizer, "vocab_files_names", {}).values()))
    if files and not any((path / name).exists() for name in files):  # transformers would take every word for an unknown one
        raise errors.Invalid(f"{path} has no tokenizer: none of {', '.join(files)}. Copy it from the model's origin, or "
            "tokenizer.save_pretrained(...)")  # fmt: skip
    with contextlib.suppress(NotImplementedError):  # not every model has one table
        ids = getattr(model.get_input_embeddings(), "num_embeddings", len(tokenizer))
        if ids < len(tokenizer):
            raise errors.Invalid(f"{path}: the tokenizer is another model's. It has {len(tokenizer)} tokens, {type(model).__name__} {ids}")
    lacks = [key for key in found["missing_keys"] if task == "classify" or "pooler" not in key] + [*found["mismatched_keys"]]
    if lacks:
        raise errors.Invalid(f"{path} lacks weights of {type(model).__name__}: {', '.join(map(str, lacks))[:200]}"
            + ". Was it made for another task?" * (task == "classify"))  # fmt: skip
    return model.eval(), tokenizer
