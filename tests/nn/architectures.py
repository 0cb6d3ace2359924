"""Tiny models of other libraries with random weights, by name.

Each function returns (model, batch); `model(**batch)` returns a tensor or an object of tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import nn

IDS = {"vocab_size": 40, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
SIZES = IDS | {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
               "intermediate_size": 64}  # fmt: skip
GROUPED = SIZES | {"num_key_value_heads": 2, "head_dim": 8}
IMAGE = {k: v for k, v in SIZES.items() if k not in IDS} | {"image_size": 16, "patch_size": 8}

Made = tuple[nn.Module, dict[str, Any]]
MODELS: dict[str, tuple[str, Callable[[], Made]]] = {}
"""name -> (the package it needs, what makes the model and a batch)."""


def _ids(rows: int = 4, length: int = 8) -> torch.Tensor:
    return torch.randint(1, 40, (rows, length))


def _transformer(
    cls: str,
    batch: Callable[[], dict[str, Any]],
    sizes: dict[str, Any],
    config: str = "",
    **more: Any,
) -> None:
    def make() -> Made:
        library = import_module("transformers")
        kind = getattr(library, cls)
        return kind(kind.config_class(**sizes, **more)), batch()

    MODELS[cls] = "transformers", make


def _text() -> dict[str, Any]:
    return {"input_ids": _ids()}


def _seq2seq() -> dict[str, Any]:
    return {"input_ids": _ids(), "decoder_input_ids": _ids(length=5)}


def _pixels() -> dict[str, Any]:
    return {"pixel_values": torch.randn(4, 3, 16, 16)}


def _speech() -> dict[str, Any]:
    return {"input_features": torch.randn(4, 8, 12), "decoder_input_ids": _ids(length=5)}


def _waves() -> dict[str, Any]:
    return {"input_values": torch.randn(4, 400)}


def _text_and_pixels() -> dict[str, Any]:
    return _text() | _pixels()


GPT2 = IDS | {"n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4}
BART = IDS | {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
              "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
              "decoder_start_token_id": 0, "forced_eos_token_id": 0}  # fmt: skip
WAVES = SIZES | {"conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 8),
                 "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 8,
                 "num_conv_pos_embedding_groups": 2, "feat_proj_dropout": 0.0,
                 "mask_time_prob": 0.3, "mask_time_length": 2}  # fmt: skip

_transformer("GPT2LMHeadModel", _text, GPT2)
_transformer("GPTNeoXForCausalLM", _text, SIZES)
_transformer("OPTForCausalLM", _text, IDS, hidden_size=32, num_hidden_layers=2, ffn_dim=64,
             num_attention_heads=4, word_embed_proj_dim=32)  # fmt: skip
_transformer("BloomForCausalLM", _text, IDS, hidden_size=32, n_layer=2, n_head=4)
_transformer("GPTJForCausalLM", _text, GPT2, rotary_dim=4)
_transformer("StableLmForCausalLM", _text, SIZES, num_key_value_heads=2)
_transformer("LlamaForCausalLM", _text, GROUPED, tie_word_embeddings=True)
_transformer("MistralForCausalLM", _text, GROUPED)
_transformer("Qwen2ForCausalLM", _text, GROUPED)
_transformer("Qwen3ForCausalLM", _text, GROUPED)
_transformer("Gemma2ForCausalLM", _text, GROUPED)
_transformer("Phi3ForCausalLM", _text, GROUPED)
_transformer("MixtralForCausalLM", _text, GROUPED, num_local_experts=2)
_transformer("MambaForCausalLM", _text, IDS, hidden_size=32, num_hidden_layers=2, state_size=4)
_transformer("T5ForConditionalGeneration", _seq2seq, IDS, d_model=32, d_kv=8, num_layers=1,
             num_heads=4, d_ff=64, decoder_start_token_id=0)  # fmt: skip
_transformer("BartForConditionalGeneration", _seq2seq, BART)
_transformer("WhisperForConditionalGeneration", _speech, BART, num_mel_bins=8,
             max_source_positions=6, max_target_positions=8)  # fmt: skip
_transformer("BertForMaskedLM", _text, SIZES)
_transformer("RobertaForMaskedLM", _text, SIZES, max_position_embeddings=16)
_transformer("DistilBertForMaskedLM", _text, {"vocab_size": 40}, dim=32, n_layers=2, n_heads=4,
             hidden_dim=64)  # fmt: skip
_transformer("ElectraForMaskedLM", _text, SIZES, embedding_size=16)
_transformer("AlbertForMaskedLM", _text, SIZES, embedding_size=16)
_transformer("DebertaV2ForMaskedLM", _text, SIZES)
_transformer("ViTForImageClassification", _pixels, IMAGE)
_transformer("SwinForImageClassification", _pixels, {}, image_size=16, patch_size=2, embed_dim=16,
             depths=[1, 1], num_heads=[2, 4], window_size=4)  # fmt: skip
_transformer("CLIPModel", _text_and_pixels, {}, projection_dim=16,
             text_config=SIZES | {"max_position_embeddings": 16},
             vision_config=IMAGE)  # fmt: skip
_transformer("Wav2Vec2ForCTC", _waves, WAVES)


def _timm(name: str, size: int = 32, **settings: Any) -> None:
    def make() -> Made:
        library = import_module("timm")
        model = library.create_model(name, num_classes=5, **settings)
        return model, {"x": torch.randn(4, 3, size, size)}

    MODELS[f"timm {name}"] = "timm", make


SMALL = {"img_size": 32, "embed_dim": 32, "depth": 2}
_timm("vit_tiny_patch16_224", **SMALL, num_heads=4)
_timm("deit3_small_patch16_224", **SMALL, num_heads=4)
_timm("beit_base_patch16_224", **SMALL, num_heads=4)
_timm("eva02_tiny_patch14_224", img_size=28, size=28, embed_dim=32, depth=2, num_heads=4)
_timm("cait_xxs24_224", **SMALL, num_heads=4, depth_token_only=1)
_timm("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 8, 16, 32))
_timm("swin_tiny_patch4_window7_224", img_size=32, embed_dim=16, depths=(1, 1), num_heads=(2, 4),
      window_size=4)  # fmt: skip


def _torchvision(name: str, make_model: Callable[[Any], nn.Module], size: int = 32) -> None:
    def make() -> Made:
        models = import_module("torchvision").models
        return _Positional(make_model(models)), {"x": torch.randn(4, 3, size, size)}

    MODELS[f"torchvision {name}"] = "torchvision", make


class _Positional(nn.Module):
    """Calls a model with one positional argument."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> Any:
        return self.model(x)


_torchvision(
    "VisionTransformer", lambda m: m.VisionTransformer(32, 16, 2, 4, 32, 64, num_classes=5)
)
_torchvision(
    "SwinTransformer",
    lambda m: m.SwinTransformer([4, 4], 16, [1, 1], [2, 4], [4, 4], num_classes=5),
)
_torchvision(
    "ConvNeXt",
    lambda m: m.ConvNeXt(
        [m.convnext.CNBlockConfig(16, 32, 1), m.convnext.CNBlockConfig(32, None, 1)]
    ),
)


def _open_clip(name: str, **settings: Any) -> None:
    def make() -> Made:
        library = import_module("open_clip")
        model = getattr(library, name)(
            embed_dim=16,
            vision_cfg={
                "layers": 2,
                "width": 32,
                "head_width": 8,
                "patch_size": 16,
                "image_size": 32,
            },
            text_cfg={"context_length": 8, "vocab_size": 40, "width": 32, "heads": 4, "layers": 2},
            **settings,
        )
        return model, {"image": torch.randn(4, 3, 32, 32), "text": _ids()}

    MODELS[f"open_clip {name}"] = "open_clip", make


_open_clip("CLIP")
_open_clip("CustomTextCLIP")


def _graph(name: str, *arguments: Any, **settings: Any) -> None:
    def make() -> Made:
        models = import_module("torch_geometric.nn.models")
        edges = torch.randint(12, (2, 40))
        x = torch.randn(12, 16)
        return getattr(models, name)(*arguments, **settings), {"x": x, "edge_index": edges}

    MODELS[f"torch_geometric {name}"] = "torch_geometric", make


for _kind in ("GCN", "GAT", "GraphSAGE", "GIN"):
    _graph(_kind, 16, 32, 2, 4)
