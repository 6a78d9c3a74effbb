"""A tiny random model of any architecture in transformers, shrunk from its own default config."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers as tf
from packaging.version import Version
from tiny_exceptions import EXCEPTIONS, GENERATION
from transformers.models.auto import modeling_auto as auto

COMPLETE = Version("5.23")
"""The release from which on transformers has all families that tests name."""
VOCABULARY = 96
PROMPT_IDS = range(5, 80)
"""The ids that prompts are made of: those from 80 on are kept for a config's special tokens."""

LAYER_COUNT = re.compile(
    r"^(num_(hidden_)?layers|n_layers?|layers|depth|(\w+_)?(encoder|decoder)_layers|(encoder|decoder)_num_hidden_layers|num_blocks|"
    r"\w*num_(hidden|decoder|global|query)_?layers|resampler_depth)$"
)
RULES = [(re.compile(pattern), value) for pattern, value in (
    (r"(^|_)vocab_size(_per_layer_input)?$", VOCABULARY),
    (r"^(qk_rope_head_dim|rotary_dim)$", 4),
    (r"^(qk_head_dim)$", 12),
    (r"head_dim$|^(d_kv|d_head|dim_head|kv_channels|attention_head_size)$|head_v?dim$", 8),
    (r"^(kv_lora_rank|o_lora_rank|hc_lowrank|laurel_rank|adapter_rank)$|_per_layer_input$", 8),
    (r"q_lora_rank$", 16),
    (r"moe\w*_intermediate_size$|shared\w*_intermediate_size$|^expert_ffn_hidden_size$", 16),
    (r"intermediate_size(_mlp)?$|ffn_dim$|mlp_dim$|^(d_ff|dff|dim_ff|ffn_hidden_size|feed_forward_size|d_inner|n_inner)$", 48),
    (r"hidden_size$|embed_dim$|hidden_dim$|projection_dim$|^(d_model|n_embd|emb_dim|embedding_size|embedding_dim|lru_width)$", 32),
    (r"^(word_embed_proj_dim|output_dim|\w+_output_dim|projector_input_dim|adapter_(in|out)_dim)$", 32),
    (r"^(input|output)_embedding_size$", 32),
    (r"num_key_value_heads$|^num_kv_heads$|^num_query_groups$", 2),
    (r"attention_heads$|^(n_heads?|num_heads|index_n_heads|linear_num_\w+_heads|linear_num_heads|resampler_heads|resampler_n_heads)$", 4),
    (r"^(num_experts|num_local_experts|n_routed_experts|moe_num_experts)$", 4),
    (r"^(num_experts_per_tok(en)?|moe_k|moe_topk|top_k_experts)$", 2),
    (r"^(n_group|topk_group|num_expert_group)$", 1),
    (r"^(sliding_window(_size)?|attention_window_size|window_size|local_attention\w*|attention_chunk_size)$", 6),
    (r"(max_(\w+_)?position(_embedding)?s|n_positions|n_ctx|max_seq_len|context_length|max_\w+_positions)$", 256),
    (r"^mamba_(n_heads|num_heads|d_head|headdim|head_dim)$", 8),
    (r"^(mamba_d_state|state_size|ssm_state_size|time_step_rank|mamba_dt_rank|index_topk)$", 8),
    (r"^query_pre_attn_scalar$|^(mamba_)?chunk_size$", 8),
    (r"^(image_size|resolution|crop_size)$", 32),
    (r"^patch_size$", 8),
    (r"^(num_query_tokens|latent_query_num|resampler_n_latents|resampler_num_latents|mm_tokens_per_image)$", 4),
)]  # fmt: skip
SPECIAL_TOKEN = re.compile(r"token_(id|index)$|^(image|audio|video)_token$")
FIRST_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}


def mappings() -> dict[str, dict[Any, Any]]:
    """For each kind of model the configs that transformers knows and what it builds from them."""
    speech = auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING
    images = auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    others = getattr(auto, "MODEL_FOR_MULTIMODAL_LM_MAPPING", {})
    audio = {config: speech[config] for config in speech}
    audio.update(
        {config: others[config] for config in others if config not in images and config not in audio}
    )
    return {
        "causal": auto.MODEL_FOR_CAUSAL_LM_MAPPING,
        "seq2seq": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        "image": images,
        "audio": audio,
    }


def config_class(kind: str, model_type: str) -> Any:
    """The config of a family by its name; a test of one that an older release has not is skipped."""
    found = [config for config in mappings()[kind] if config.model_type == model_type]
    if not found and Version(tf.__version__) < COMPLETE:
        pytest.skip(f"transformers {tf.__version__} has no {model_type}")
    return found[0]


def model_class_of(kind: str, cls: Any) -> Any:
    """The model that transformers builds from a config."""
    found = mappings()[kind][cls]
    return found[0] if isinstance(found, tuple) else found


def build(kind: str, cls: Any) -> Any:
    """A family's model in float32, the same random weights every time."""
    return build_class(model_class_of(kind, cls), cls, kind)


def build_class(model_class: Any, cls: Any, kind: str = "") -> Any:
    """A model of this class from the config `cls`."""
    config = cls(**tiny(cls))
    if model_class.config_class is cls.sub_configs.get("text_config"):
        config = config.get_text_config()
    if kind == "causal" and hasattr(config, "is_decoder"):
        config.is_decoder = True
    torch.manual_seed(0)
    model = model_class(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1 or not parameter.any():  # gates that begin shut, too
                parameter.normal_(0, 0.2)
        for stored in model.state_dict().values():
            if (
                stored.ndim > 1 and stored.is_floating_point() and not stored.any()
            ):  # a codebook without codes
                stored.normal_(0, 0.2)
    start = {"decoder_start_token_id": 1} if config.is_encoder_decoder else {}
    known = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, **start}
    model.generation_config = tf.GenerationConfig(**{**known, **GENERATION.get(config.model_type, {})})
    return model


# ---- tiny configs


class Ids:
    """Small ids for a config's special tokens: one for each large one, wherever in the nested configs it
    stands.
    """

    def __init__(self) -> None:
        self._free = iter(range(VOCABULARY - 1, PROMPT_IDS.stop - 1, -1))
        self._given: dict[int, int] = {}

    def small(self, name: str, value: int) -> int:
        if name in FIRST_TOKENS:
            return FIRST_TOKENS[name]
        if value < PROMPT_IDS.start:
            return value
        if value not in self._given:
            self._given[value] = next(self._free, VOCABULARY - 1)
        return self._given[value]


def tiny(cls: Any, ids: Ids | None = None) -> dict[str, Any]:
    """The keywords of a shrunken config: small widths, heads, vocabulary, pictures, and few layers, in its
    nested configs too.
    """
    ids = ids or Ids()
    base = cls()
    values = {
        name: value
        for name, value in base.to_dict().items()
        if name not in ("transformers_version", "architectures", "dtype")
    }
    before = dict(values)
    for name in cls.sub_configs:
        part = getattr(base, name, None)
        if part is not None:
            values[name] = {"model_type": part.model_type, **tiny(type(part), ids)}
    _drop_layers(values, ids)
    values = _all_small(values, ids)
    if values.get("num_key_value_heads") and before.get("num_key_value_heads") == before.get(
        "num_attention_heads"
    ):
        values["num_key_value_heads"] = values["num_attention_heads"]
    for name, small in (("head_dim", 8), ("num_key_value_heads", 2)):
        if name in values and values[name] is None:
            values[name] = small
    if before.get("head_dim") and before["head_dim"] == before.get("qk_rope_head_dim"):
        values["head_dim"] = values["qk_rope_head_dim"]
    rope = values.get("rope_parameters")
    if isinstance(rope, dict) and rope.get("mrope_section"):
        values["rope_parameters"] = {**rope, "mrope_section": [2, 1, 1]}  # half of a head of 8
    if values.get("deepstack_visual_indexes"):
        values["deepstack_visual_indexes"] = [0]
    return _merged(values, EXCEPTIONS.get(cls.model_type, {}))


def _merged(values: dict[str, Any], exceptions: dict[str, Any]) -> dict[str, Any]:
    """The values with what the rules get wrong put right; a nested config's keywords are "part.name"."""
    for name, value in exceptions.items():
        part, _, inner = name.rpartition(".")
        if part:
            values[part] = {**values[part], inner: value}
        else:
            values[name] = value
    return values


def _all_small(values: dict[str, Any], ids: Ids) -> dict[str, Any]:
    return {name: _small(name, value, ids) for name, value in values.items()}


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _small(name: str, value: Any, ids: Ids) -> Any:
    """The small number that stands for `value`; anything else as it is."""
    if (
        name.endswith(("token_ids", "token_id"))
        and isinstance(value, (list, tuple))
        and all(map(_is_number, value))
    ):
        return [ids.small("", entry) for entry in value]
    if not _is_number(value):
        return value
    if SPECIAL_TOKEN.search(name) and value > 0:
        return ids.small(name, value)
    found = next((small for pattern, small in RULES if pattern.search(name)), value)
    return min(found, value) if value > 0 else value


def _drop_layers(values: dict[str, Any], ids: Ids) -> None:
    """Keep two to four layers, one of every kind that the lists with one entry a layer tell apart."""
    for name in [name for name in values if LAYER_COUNT.match(name) and _is_number(values[name])]:
        total = values[name]
        lists = {
            key: value
            for key, value in values.items()
            if isinstance(value, (list, tuple)) and len(value) == total > 4
        }
        kept = _kept_layers(list(lists.values()), total)
        values[name] = min(total, len(kept))
        values.update({key: [value[i] for i in kept] for key, value in lists.items()})
        if values.get("per_layer_config"):
            old = {int(i): layer for i, layer in values["per_layer_config"].items()}
            values["per_layer_config"] = {
                new: _all_small(old[i], ids) for new, i in enumerate(kept) if i in old
            }


def _kept_layers(lists: list[Any], total: int) -> list[int]:
    """The first layer of every kind; at least the first and the last."""
    told = [value for value in lists if all(isinstance(entry, str) or entry in (0, 1) for entry in value)]
    kinds = list(zip(*told, strict=True)) or [()] * total
    kept = sorted({kinds.index(kind) for kind in kinds})[:4]
    return kept if len(kept) > 1 else [*kept, total - 1][: min(total, 2)]


# ---- prompts


def prompts(kind: str) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """A whole batch of two prompts, and one with padding: on the left of a decoder's, on the right of an
    encoder's.
    """
    ids = torch.randint(PROMPT_IDS.start, PROMPT_IDS.stop, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    yield "whole", {"input_ids": ids, "attention_mask": mask}
    padding = (0, slice(-4, None)) if kind == "seq2seq" else (0, slice(None, 4))
    ids, mask = ids.clone(), mask.clone()
    ids[padding], mask[padding] = 0, 0
    yield "padded", {"input_ids": ids, "attention_mask": mask}
