# SPDX-License-Identifier: Apache-2.0
"""ringbatch.hf: answers equal the results of transformers for each text alone. The folders are made here, with random weights."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request

import numpy as np
import pytest
import ringbatch as rb
from conftest import broker_at, free_port, until_stopped

torch = pytest.importorskip("torch")
torch.set_num_threads(1)
tf = pytest.importorskip("transformers")
import ringbatch.hf  # noqa: E402
from ringbatch.hf.serving import TextModel  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers, processors  # noqa: E402

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(a + b for a in "bdfgklmnprst" for b in "aeiou")]
TEXTS = ["ba", "do fe gu", "", " ".join(WORDS[4:]), "ti " * 30, "ka lu", "no no no no"]
SHAPE = dict(vocab_size=len(WORDS), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, pad_token_id=0,
    max_position_embeddings=80)  # fmt: skip
LABELS = dict(id2label={0: "bad", 1: "fine", 2: "größer"}, label2id={"bad": 0, "fine": 1, "größer": 2})
DECODER = dict(SHAPE, num_key_value_heads=1, bos_token_id=2, eos_token_id=3)
XLNET = dict(vocab_size=len(WORDS), d_model=32, n_layer=2, n_head=2, d_inner=32, pad_token_id=0)


@pytest.fixture
def folder(tmp_path):
    def make(model: str, config: str, **settings) -> str:
        torch.manual_seed(1)
        getattr(tf, model)(getattr(tf, config)(**settings)).save_pretrained(tmp_path / "my-model.v1.5")
        t = Tokenizer(models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
        t.pre_tokenizer = pre_tokenizers.Whitespace()
        t.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
        tf.PreTrainedTokenizerFast(tokenizer_object=t, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
            model_max_length=70).save_pretrained(tmp_path / "my-model.v1.5")  # fmt: skip
        return str(tmp_path / "my-model.v1.5")

    return make


def bert(folder) -> str:
    return folder("BertModel", "BertConfig", **SHAPE)


def write(folder: str, name: str, about) -> None:
    path = os.path.join(folder, name)
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    with open(path, "w") as f:
        json.dump(about, f)


def direct(folder: str, kind: str, text: str) -> np.ndarray:
    """The last hidden states, or the logits."""
    model = getattr(tf, kind).from_pretrained(folder).eval()
    with torch.inference_mode():
        result = model(**tf.AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt", return_token_type_ids=False))
    return (result.logits if "Classification" in kind else result.last_hidden_state)[0].numpy()


@contextlib.contextmanager
def served(at: str, folder: str, **options):
    with broker_at(at), until_stopped(ringbatch.hf.serve, folder, socket=at, device="cpu", **options):
        with rb.connect("my-model.v1.5", socket=at, wait=100) as m:
            yield m


@pytest.mark.parametrize(
    ("model", "way", "settings"),
    [
        ("Bert", "packed", SHAPE),
        ("Roberta", "packed", SHAPE),
        ("DistilBert", "packed", dict(vocab_size=len(WORDS), dim=32, n_layers=2, n_heads=2, hidden_dim=64)),
        ("Llama", "packed", DECODER),
        ("MPNet", "padded", SHAPE),
        ("ModernBert", "padded", dict(SHAPE, local_attention=16)),
        ("XLNet", "padded", XLNET),
    ],
)
def test_each_text_is_embedded_as_alone(folder, model, way, settings):
    path = folder(f"{model}Model", f"{model}Config", **settings)
    m = TextModel(path, device="cpu")
    m.choose_way()
    assert m.encoder.way == way
    for taken in (way, "equal"):
        m.encoder.take(taken)
        for y, text in zip(m.lines(m.tokens(TEXTS)), TEXTS):
            np.testing.assert_allclose(y, direct(path, "AutoModel", text).mean(0), atol=1e-5)


@pytest.mark.parametrize(
    ("model", "way", "settings"),
    [("Bert", "packed", SHAPE), ("Roberta", "packed", SHAPE), ("Llama", "packed", DECODER), ("ModernBert", "padded", SHAPE)],
)
def test_each_text_is_classified_as_alone(folder, model, way, settings):
    path = folder(f"{model}ForSequenceClassification", f"{model}Config", **settings, **LABELS)
    m = TextModel(path, device="cpu")
    m.choose_way()
    assert m.encoder.way == way
    for y, text in zip(m.lines(m.tokens(TEXTS)), TEXTS):
        np.testing.assert_allclose(y, direct(path, "AutoModelForSequenceClassification", text), atol=1e-5)


def test_texts_become_vectors_and_a_text_that_is_too_long_fails_alone(folder, at):
    path = bert(folder)
    with served(at, path) as m:
        answers = [m.submit(text) for text in TEXTS]
        for answer, text in zip(answers, TEXTS):
            np.testing.assert_allclose(answer.result()["embedding"], direct(path, "AutoModel", text).mean(0), atol=1e-5)
            assert answer.result()["tokens"] == len(text.split()) + 2
        both = [m.submit("ba " * 69), m.submit("ba")]
        with pytest.raises(rb.Failed, match=r"^BadText: the text has 71 tokens, and the model takes 70"):
            both[0].result()
        assert both[1].result()["tokens"] == 3


def test_long_texts_are_cut_if_the_caller_says_so(folder, at):
    with served(at, bert(folder), truncate=True) as m:
        assert m("ba " * 700)["tokens"] == 70 and (m("ba " * 100)["embedding"] == m("ba " * 90)["embedding"]).all()


def test_a_classifier_answers_with_labels_and_scores(folder, at):
    path = folder("BertForSequenceClassification", "BertConfig", **SHAPE, **LABELS)
    pipeline = tf.pipeline("text-classification", model=path, device="cpu", top_k=None)
    with served(at, path) as m:
        for text in TEXTS:
            found, got = pipeline([text])[0], m(text)
            best, scores = found[0], {s["label"]: s["score"] for s in found}
            assert got["label"] == best["label"] and got["score"] == pytest.approx(best["score"], abs=1e-5)
            np.testing.assert_allclose(got["scores"], [scores[label] for label in LABELS["label2id"]], atol=1e-5)


@pytest.mark.parametrize(
    ("pooling", "want"),
    [
        ({"pooling_mode": "cls"}, lambda x: x[0]),
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, lambda x: x[-1]),
        ({"pooling_mode": ["max", "mean"]}, lambda x: np.concatenate([x.max(0), x.mean(0)])),
        ({"pooling_mode_mean_sqrt_len_tokens": True}, lambda x: x.sum(0) / len(x) ** 0.5),
        ({"pooling_mode_weightedmean_tokens": True}, lambda x: np.average(x, 0, np.arange(1, len(x) + 1))),
    ],
)
def test_the_pooling_is_that_of_sentence_transformers(folder, pooling, want):
    path = bert(folder)
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    parts = [{"name": at or "0", "path": at, "type": f"sentence_transformers.models.{kind}"} for at, kind in kinds.items()]
    write(path, "modules.json", parts)
    write(path, "1_Pooling/config.json", {"word_embedding_dimension": 32, **pooling})
    write(path, "sentence_bert_config.json", {"max_seq_length": 60})
    write(path, "config_sentence_transformers.json", {"prompts": {"q": "ka "}, "default_prompt_name": "q"})
    m = TextModel(path, device="cpu")
    m.choose_way()
    y = want(direct(path, "AutoModel", "ka do fe gu"))
    np.testing.assert_allclose(m.lines(m.tokens(["do fe gu", "ba"]))[0], y / np.linalg.norm(y), atol=1e-5)
    assert m.most == 60
    with contextlib.suppress(ImportError):
        from sentence_transformers import SentenceTransformer

        short = [text for text in TEXTS if len(text.split()) < 58]  # it cuts the others
        np.testing.assert_allclose(m.lines(m.tokens(short)), SentenceTransformer(path, device="cpu").encode(short), atol=1e-5)


def test_folders_that_cannot_be_served_say_why(folder, tmp_path):
    path = bert(folder)

    def refused(match: str, at: str = path, **options) -> None:
        with pytest.raises(rb.Invalid, match=match):
            ringbatch.hf.serve(at, device="cpu", **options)

    refused("lacks weights of BertForSequenceClassification: classifier", task="classify")
    refused("embed or classify", task="generate")
    refused("no such folder.*hf download", at="./sentence-transformers/none")
    refused("has no config.json", at=str(tmp_path))
    write(path, "modules.json", [{"path": "", "type": "sentence_transformers.models.Transformer"}, {"path": "", "type": "a.CNN"}])
    refused("module a.CNN cannot be served")
    write(path, "modules.json", [{"path": "gone", "type": "sentence_transformers.models.Transformer"}])
    refused("/gone is no folder of a Hugging Face model")
    os.remove(f"{path}/modules.json")
    with open(f"{path}/config.json") as f:
        about = json.load(f)
    write(path, "config.json", {**about, "architectures": ["BertForMaskedLM"]})
    refused('BertForMaskedLM.*task="embed"')
    write(path, "config.json", {**about, "architectures": ["GPT2LMHeadModel"]})
    refused('GPT2LMHeadModel.*task="embed"')
    write(path, "config.json", ["BertModel"])
    refused("config.json has a list")
    write(path, "config.json", about)
    os.chmod(f"{path}/tokenizer.json", 0o666)
    refused("tokenizer.json.*chmod", task="embed")
    os.chmod(f"{path}/tokenizer.json", 0o600)
    torch.save(tf.BertModel.from_pretrained(path).state_dict(), f"{path}/pytorch_model.bin")
    os.remove(f"{path}/model.safetensors")
    refused("no weights as safetensors.*allow_pickle", task="embed")
    assert TextModel(path, "embed", "cpu", pickles=True).width == 32
    os.remove(f"{path}/tokenizer.json")
    os.remove(f"{path}/tokenizer_config.json")
    refused("has no tokenizer: none of .*tokenizer.json", task="embed", allow_pickle=True)
    small = folder("BertModel", "BertConfig", **{**SHAPE, "vocab_size": 9})
    refused(f"the tokenizer is another model's. It has {len(WORDS)} tokens, BertModel 9", small)
    with pytest.raises(rb.Invalid, match="CLIPModel cannot embed"):
        TextModel(folder("CLIPModel", "CLIPConfig"), device="cpu")


def test_the_command_serves_a_folder_and_the_gateway_its_embeddings(folder, tmp_path):
    path, port = bert(folder), free_port()
    env = {**os.environ, "RINGBATCH_SOCKET": str(tmp_path / "b.sock"), "PYTHON": sys.executable}
    command = [rb.binary_path(), "serve", path, "--http", str(port), "--device", "cpu"]
    p = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)

    def ask(text: str):
        body = json.dumps({"model": "my-model.v1.5", "input": text}).encode()
        with urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{port}/v1/embeddings", body)) as answer:
            return json.load(answer)

    try:
        line = next(line for line in p.stdout if line.startswith("python: "))
        said = subprocess.check_output(line.removeprefix("python: ").replace("python3", sys.executable, 1), shell=True, env=env, text=True)
        assert "embedding" in said
        answer = ask("do fe gu")
        assert answer["usage"] == {"prompt_tokens": 5, "total_tokens": 5}
        np.testing.assert_allclose(answer["data"][0]["embedding"], direct(path, "AutoModel", "do fe gu").mean(0), atol=1e-5)
        with pytest.raises(urllib.error.HTTPError) as e:
            ask("ba " * 69)
        assert e.value.code == 400 and "the text has 71 tokens" in json.load(e.value)["error"]["message"]
    finally:
        p.send_signal(signal.SIGINT)
        p.stdout.read()
        assert p.wait(60) == 0


def test_without_transformers_the_command_says_how_to_install_it(tmp_path):
    code = "import sys; sys.modules['transformers'] = None; sys.argv[1:] = ['.']; from ringbatch.serve.hf_cli import main; sys.exit(main())"
    p = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert p.returncode == 1 and "pip install './python[hf]'" in p.stderr
