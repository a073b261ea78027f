# SPDX-License-Identifier: Apache-2.0
"""Architectures as their libraries make them: small configurations with random weights. Nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

TOKENS = ["input_ids:i64[<=32]", "attention_mask:i64[<=32]"]
IDS, IMAGE = ["input_ids:i64[<=32]"], ["x:f32[3,64,64]"]


class Entry(NamedTuple):
    library: str
    name: str
    make: Callable[[], Any]
    inputs: list[str]
    outputs: list[str] | None = None  # those to serve, by name
    refused: str | None = None  # what the refusal says
    lists: bool = False  # list in, list of dicts out


ENTRIES: list[Entry] = []


def entry(
    library: str, name: str, make: Callable[[], Any], inputs: list[str], outputs: list[str] | None = None, refused: str | None = None
) -> None:  # fmt: skip
    ENTRIES.append(Entry(library, name, make, inputs, outputs, refused))


# -- transformers

TEXT = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, max_position_embeddings=64)
DECODER = dict(TEXT, num_key_value_heads=2, pad_token_id=None, bos_token_id=1, eos_token_id=2)
SEEN = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=64, patch_size=16)


def transformer(model: str, config: str, inputs: list[str], outputs: list[str] | None = None, refused: str | None = None, **settings: Any):
    def make() -> Any:
        import transformers

        return getattr(transformers, model)(getattr(transformers, config)(**settings))

    entry("transformers", model, make, inputs, outputs, refused)


transformer("BertModel", "BertConfig", ["input_ids:i64[<=32]", "token_type_ids:i64[<=32]", "attention_mask:i64[<=32]"], **TEXT)
for head in ("SequenceClassification", "TokenClassification", "QuestionAnswering", "MaskedLM"):
    transformer(f"BertFor{head}", "BertConfig", TOKENS, **TEXT)
transformer("RobertaModel", "RobertaConfig", TOKENS, **TEXT)
transformer("ElectraModel", "ElectraConfig", TOKENS, **TEXT)
transformer("MPNetModel", "MPNetConfig", TOKENS, **TEXT)
transformer("AlbertModel", "AlbertConfig", TOKENS, **TEXT, embedding_size=16)
transformer("DistilBertModel", "DistilBertConfig", TOKENS, vocab_size=64, dim=32, n_layers=2, n_heads=2, hidden_dim=64)
transformer("DebertaV2Model", "DebertaV2Config", TOKENS, **TEXT)
transformer("T5EncoderModel", "T5Config", TOKENS, vocab_size=64, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2)
transformer("GPT2LMHeadModel", "GPT2Config", IDS, vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=64, bos_token_id=1,
    eos_token_id=2)  # fmt: skip
transformer("OPTForCausalLM", "OPTConfig", TOKENS, **TEXT, ffn_dim=64, word_embed_proj_dim=32)
transformer("LlamaForCausalLM", "LlamaConfig", TOKENS, **DECODER)
transformer("MistralForCausalLM", "MistralConfig", TOKENS, **DECODER)
transformer("Qwen2ForCausalLM", "Qwen2Config", TOKENS, **DECODER)
transformer("GPTNeoXForCausalLM", "GPTNeoXConfig", TOKENS, **TEXT)
transformer("BloomForCausalLM", "BloomConfig", TOKENS, vocab_size=64, hidden_size=32, n_layer=2, n_head=2)
transformer("CLIPTextModelWithProjection", "CLIPTextConfig", TOKENS, **TEXT, projection_dim=16, bos_token_id=1, eos_token_id=2)
PIXELS = ["pixel_values:f32[3,64,64]"]
transformer("CLIPVisionModel", "CLIPVisionConfig", PIXELS, **SEEN)
CLIP = dict(text_config=dict(TEXT, bos_token_id=1, eos_token_id=2), vision_config=SEEN, projection_dim=16)
transformer("CLIPModel", "CLIPConfig", ["input_ids:i64[8]", *PIXELS], ["text_embeds", "image_embeds"], **CLIP)
transformer("CLIPModel", "CLIPConfig", ["input_ids:i64[8]", *PIXELS], refused="rows of this model depend on one another", **CLIP)
for vision in ("ViT", "DeiT", "Beit", "Dinov2"):
    transformer(f"{vision}Model", f"{vision}Config", PIXELS, **SEEN)
transformer("ViTForImageClassification", "ViTConfig", PIXELS, **SEEN)
transformer("YolosForObjectDetection", "YolosConfig", PIXELS, **{**SEEN, "image_size": [64, 64]}, num_detection_tokens=5)
RESNET = dict(embedding_size=8, hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1])
transformer("DetrForObjectDetection", "DetrConfig", PIXELS, use_timm_backbone=False, use_pretrained_backbone=False, d_model=32,
    backbone_config=dict(RESNET, model_type="resnet", out_features=["stage4"]), encoder_layers=1, decoder_layers=1, num_queries=5,
    encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32)  # fmt: skip
transformer("SwinModel", "SwinConfig", PIXELS, image_size=64, patch_size=4, embed_dim=16, depths=[1, 1], num_heads=[2, 2], window_size=4)
transformer("ConvNextModel", "ConvNextConfig", PIXELS, hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1])
transformer("ResNetModel", "ResNetConfig", PIXELS, **RESNET)
transformer("SegformerForSemanticSegmentation", "SegformerConfig", PIXELS, hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1],
    num_attention_heads=[1, 1, 1, 1], decoder_hidden_size=16)  # fmt: skip
SOUND = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, conv_dim=(16, 16), conv_stride=(5, 4),
    conv_kernel=(10, 8), num_feat_extract_layers=2, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=2)  # fmt: skip
for sound in ("Wav2Vec2", "Hubert"):
    transformer(f"{sound}Model", f"{sound}Config", ["input_values:f32[1600]"], **SOUND)
transformer("WhisperForAudioClassification", "WhisperConfig", ["input_features:f32[80,64]"], d_model=32, encoder_layers=2,
    encoder_attention_heads=2, encoder_ffn_dim=64, max_source_positions=32)  # fmt: skip


# -- Hugging Face folders: text in, vectors or labels out

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(a + b for a in "bdfgklmnprst" for b in "aeiou")]


def folder(model: str, config: str, **settings: Any):
    """make gives a temporary folder, which goes with it."""

    def make() -> Any:
        import tempfile

        import transformers
        from tokenizers import Tokenizer, models, pre_tokenizers, processors

        made = tempfile.TemporaryDirectory(prefix="rb-zoo-")
        getattr(transformers, model)(getattr(transformers, config)(**settings)).save_pretrained(made.name)
        t = Tokenizer(models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
        t.pre_tokenizer = pre_tokenizers.Whitespace()
        t.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
        transformers.PreTrainedTokenizerFast(tokenizer_object=t, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(made.name)
        return made

    entry("folder of transformers", model, make, ["text:str[<=256]"])


PADDED = dict(TEXT, pad_token_id=0)
folder("BertModel", "BertConfig", **PADDED)
folder("RobertaModel", "RobertaConfig", **PADDED)
folder("MPNetModel", "MPNetConfig", **PADDED)
folder("ModernBertModel", "ModernBertConfig", **dict(PADDED, bos_token_id=2, eos_token_id=3, cls_token_id=2, sep_token_id=3))
folder("LlamaModel", "LlamaConfig", **dict(DECODER, pad_token_id=0))
folder("T5EncoderModel", "T5Config", vocab_size=64, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2)
for model in ("Bert", "DistilBert", "Electra"):
    sizes = PADDED if model != "DistilBert" else dict(vocab_size=64, dim=32, n_layers=2, n_heads=2, hidden_dim=64)
    folder(f"{model}ForSequenceClassification", f"{model}Config", num_labels=3, **sizes)


# -- torchvision


def vision(name: str, inputs: list[str] = IMAGE, refused: str | None = None, **settings: Any):
    def make() -> Any:
        import torchvision

        return torchvision.models.get_model(name, weights=None, **settings)

    entry("torchvision", name, make, inputs, refused=refused)


for name in ("resnet18", "mobilenet_v3_small", "squeezenet1_1", "shufflenet_v2_x0_5", "mnasnet0_5", "efficientnet_b0", "regnet_y_400mf"):
    vision(name)
vision("googlenet", init_weights=False)
vision("lraspp_mobilenet_v3_large", weights_backbone=None)
vision("deeplabv3_mobilenet_v3_large", weights_backbone=None, aux_loss=True)
FOUND = ["boxes:f32[found<=20,4]", "labels:i64[found<=20]", "scores:f32[found<=20]"]


def detector(name: str, **settings: Any):
    def make() -> Any:
        import torchvision

        return torchvision.models.detection.__dict__[name](weights=None, weights_backbone=None, **settings)

    ENTRIES.append(Entry("torchvision", name, make, ["image:f32[3,64,64]"], FOUND, lists=True))


SMALL = dict(min_size=64, max_size=64)
detector("fasterrcnn_mobilenet_v3_large_320_fpn", box_detections_per_img=20, box_score_thresh=0.0, **SMALL)
detector("retinanet_resnet50_fpn", detections_per_img=20, score_thresh=0.0, **SMALL)
detector("fcos_resnet50_fpn", detections_per_img=20, score_thresh=0.0, **SMALL)
detector("ssdlite320_mobilenet_v3_large", detections_per_img=20, score_thresh=0.0)


# -- timm


def timm_model(name: str, **settings: Any):
    def make() -> Any:
        import timm

        return timm.create_model(name, pretrained=False, **settings)

    entry("timm", name + " (features)" * bool(settings.get("features_only")), make, IMAGE)


for name in ("resnet10t", "mobilenetv4_conv_small", "lcnet_050", "convnext_atto", "ghostnet_050"):
    timm_model(name)
timm_model("resnet10t", features_only=True)
for name in ("vit_tiny_patch16_224", "deit_tiny_patch16_224", "mixer_s16_224"):
    timm_model(name, img_size=64, num_classes=10)


# -- segmentation_models_pytorch, diffusers


def segments(name: str):
    def make() -> Any:
        import segmentation_models_pytorch as smp

        return getattr(smp, name)("timm-mobilenetv3_small_minimal_100", encoder_weights=None)

    entry("segmentation_models_pytorch", name, make, IMAGE)


for name in ("Unet", "FPN", "Linknet"):
    segments(name)


def diffuser(name: str, inputs: list[str], **settings: Any):
    def make() -> Any:
        import diffusers

        return getattr(diffusers, name)(**settings)

    entry("diffusers", name, make, inputs)


diffuser("UNet2DModel", ["sample:f32[3,16,16]", "timestep:i64[]"], sample_size=16, block_out_channels=(8, 16), layers_per_block=1,
    norm_num_groups=4, down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"))  # fmt: skip
diffuser("AutoencoderKL", ["sample:f32[3,16,16]"], block_out_channels=(8,), norm_num_groups=4, layers_per_block=1)
diffuser("AutoencoderTiny", ["sample:f32[3,16,16]"], encoder_block_out_channels=(8, 8), decoder_block_out_channels=(8, 8),
    num_encoder_blocks=(1, 1), num_decoder_blocks=(1, 1))  # fmt: skip


# -- scikit-learn


def estimator(module: str, name: str, **settings: Any):
    def make() -> Any:
        import importlib

        import numpy as np

        rng = np.random.default_rng(0)
        x = rng.random((60, 8))
        return getattr(importlib.import_module(f"sklearn.{module}"), name)(**settings).fit(x, (x[:, 0] > 0.5).astype("int64"))

    entry("scikit-learn", name, make, ["x:f64[8]"])


estimator("linear_model", "LogisticRegression")
estimator("linear_model", "Ridge")
estimator("ensemble", "RandomForestClassifier", n_estimators=10)
estimator("ensemble", "GradientBoostingRegressor", n_estimators=10)
estimator("svm", "SVC")
estimator("neighbors", "KNeighborsClassifier")
estimator("neural_network", "MLPClassifier", hidden_layer_sizes=(8,), max_iter=20)
estimator("preprocessing", "StandardScaler")
estimator("decomposition", "PCA", n_components=3)
estimator("cluster", "KMeans", n_clusters=3, n_init=1)
