"""Compare stock generate() with the paged cache on a tiny random model of every text architecture in transformers.

    PYTHONPATH=. python scripts/sweep.py [--seconds 60] [family ...]

One Markdown row per family: `=` same answer, `~` rounding (same in float64), `?` stock disagrees with itself,
`X` mismatch, `E` only paged raises, `-` stock itself cannot. Exit code 1 if there is any X, E or complaint.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import signal
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers as tf

import hf_paged
from hf_paged.integration.cache import paged_parts

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from compare import assert_clean, assert_equal, both  # it lives next to the tests

VOCABULARY, NEW = 96, 12
MAPPINGS = {"causal": tf.MODEL_FOR_CAUSAL_LM_MAPPING, "seq2seq": tf.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING}
TEXT_PARTS = ("text_config", "text_encoder", "encoder", "decoder", "decoder_config", "attn_config", "ffn_config")
LAYER_COUNT = r"^(num_hidden_layers|n_layers?|num_layers|depth|(\w+_)?(encoder|decoder)_layers|encoder_hidden_layers|num_blocks)$"

RULES = [(re.compile(pattern), value) for pattern, value in (
    (r"(^|_)vocab_size(_per_layer_input)?$", VOCABULARY),
    (r"^(qk_rope_head_dim|rotary_dim)$", 4),
    (r"^(qk_head_dim)$", 12),
    (r"head_dim$|^(d_kv|d_head|dim_head|kv_channels|attention_head_size)$|head_v?dim$", 8),
    (r"^(kv_lora_rank|o_lora_rank|hc_lowrank|laurel_rank|adapter_rank)$|_per_layer_input$", 8),
    (r"q_lora_rank$", 16),
    (r"moe\w*_intermediate_size$|shared\w*_intermediate_size$|^expert_ffn_hidden_size$", 16),
    (r"intermediate_size(_mlp)?$|ffn_dim$|^(d_ff|dff|dim_ff|ffn_hidden_size|feed_forward_size|d_inner|n_inner)$", 48),
    (r"hidden_size$|embed_dim$|^(d_model|n_embd|emb_dim|embedding_size|embedding_dim|lru_width|word_embed_proj_dim)$", 32),
    (r"^(input|output)_embedding_size$", 32),
    (r"num_key_value_heads$|^num_kv_heads$|^num_query_groups$", 2),
    (r"attention_heads$|^(n_heads?|num_heads|index_n_heads|linear_num_\w+_heads|linear_num_heads)$", 4),
    (r"^(num_experts|num_local_experts|n_routed_experts|moe_num_experts)$", 4),
    (r"^(num_experts_per_tok(en)?|moe_k|moe_topk|top_k_experts)$", 2),
    (r"^(n_group|topk_group|num_expert_group)$", 1),
    (r"^(sliding_window(_size)?|attention_window_size|window_size|local_attention\w*|attention_chunk_size)$", 6),
    (r"(max_(\w+_)?position(_embedding)?s|n_positions|n_ctx|max_seq_len|context_length|max_\w+_positions)$", 256),
    (r"^mamba_(n_heads|num_heads|d_head|headdim)$", 8),
    (r"^(mamba_d_state|state_size|ssm_state_size|time_step_rank|mamba_dt_rank|index_topk)$", 8),
    (r"^query_pre_attn_scalar$", 8),
)]  # fmt: skip

TINY_BERT = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SMALL_HASHES = {"encoder_hash_byte_group_vocab": 64, "encoder_hash_byte_group_size": [3, 4]}
SHARED_KV = {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2}
TWEAKS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "blt": SMALL_HASHES,
    "blt_patcher": {"num_hidden_layers": 2},
    "cohere_compass_text": {"layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2,
                            "rope_parameters": {"sliding_attention": ROPE, "full_attention": ROPE}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "dots3_note_text": {"per_layer_config": {2: {
        "head_dim": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "q_lora_rank": 16, "kv_lora_rank": 8,
        "num_attention_heads": 4, "num_key_value_heads": 4}}},
    "encoder-decoder": {"decoder": {"model_type": "bert", **TINY_BERT, "is_decoder": True, "add_cross_attention": True}},
    "gemma3n_text": {**SHARED_KV, "intermediate_size": [48] * 4, "activation_sparsity_pattern": [0.0] * 4, "laurel_rank": 8},
    "gemma4_text": SHARED_KV,
    "hrm_text": {"num_hidden_layers": 1, "num_layers_per_stack": None, "H_cycles": 2, "L_cycles": 1, "layer_types": None},
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "led": {"attention_window": 8, "max_encoder_position_embeddings": 256, "max_decoder_position_embeddings": 256},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"], "num_hidden_layers": 2, "index_block_size": 4,
                           "index_topk_blocks": 2, "index_local_blocks": 1},
    "mamba2": {"num_heads": 8},
    "qwen4_exp_text": {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8, "indexer_compress_ratio": 4,
                       "ngram_vocab_size_base": 100, "split_ngram_parts": 2},
    "recurrent_gemma": {"num_hidden_layers": 3, "block_types": ["recurrent", "recurrent", "attention"]},
    "reformer": {"axial_pos_embds_dim": (8, 24), "axial_pos_shape": (16, 16), "is_decoder": True},
    "vibevoice_acoustic_tokenizer_encoder": {"num_filters": 2},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "attention_hidden_size": 64, "attention_head_dim": 16,
              "layers_block_type": ["linear_attention", "linear_attention", "hybrid", "hybrid"]},
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2, "hybrid_layer_ids": [1, 3],
               "num_mem_blocks": 1, "n_mamba_heads": 8, "mamba_headdim": 8, "attention_hidden_size": 64, "attention_head_dim": 16},
}  # fmt: skip
"""What the rules get wrong, by model type."""


# ---- tiny configs


def tiny(cls: type, text: bool = True) -> dict[str, Any]:
    """The keywords of a shrunken config: widths, heads, vocabulary and layers of text parts, only the depth of towers."""
    base = cls()
    values = {name: value for name, value in base.to_dict().items() if name not in ("transformers_version", "architectures", "dtype")}
    before = dict(values)
    for name in cls.sub_configs:
        part = getattr(base, name, None)
        if part is not None:
            values[name] = {"model_type": part.model_type, **tiny(type(part), text and name in TEXT_PARTS)}
    _drop_layers(values, text)
    values = _all_small(values) if text else values
    if values.get("num_key_value_heads") and before.get("num_key_value_heads") == before.get("num_attention_heads"):
        values["num_key_value_heads"] = values["num_attention_heads"]
    for name, small in (("head_dim", 8), ("num_key_value_heads", 2)):
        if name in values and values[name] is None:
            values[name] = small
    if before.get("head_dim") and before["head_dim"] == before.get("qk_rope_head_dim"):
        values["head_dim"] = values["qk_rope_head_dim"]
    return values | TWEAKS.get(cls.model_type, {})


def _all_small(values: dict[str, Any]) -> dict[str, Any]:
    return {name: _small(name, value) if _is_number(value) else value for name, value in values.items()}


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _small(name: str, value: int) -> int:
    """The small number that stands for `value`."""
    if name.endswith(("token_id", "token_index")):
        return {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}.get(name, value if value < 90 else 95)
    found = next((small for pattern, small in RULES if pattern.search(name)), value)
    return min(found, value) if value > 0 else value


def _drop_layers(values: dict[str, Any], text: bool) -> None:
    """Keep two to four layers, one of every kind that the lists with one entry a layer tell apart."""
    counts = [name for name in values if re.search(LAYER_COUNT, name) and _is_number(values[name])]
    for name in counts:
        total = values[name]
        lists = {key: value for key, value in values.items() if isinstance(value, (list, tuple)) and len(value) == total > 4}
        told = [value for value in lists.values() if all(isinstance(entry, str) or entry in (0, 1) for entry in value)]
        kinds = list(zip(*told, strict=True)) or [()] * total
        kept = sorted({kinds.index(kind) for kind in kinds})[:4]
        kept = kept if len(kept) > 1 else [*kept, total - 1][: min(total, 2)]
        values[name] = min(total, len(kept)) if text else 1
        kept = kept[: values[name]]
        values.update({key: [value[i] for i in kept] for key, value in lists.items()})
        if values.get("per_layer_config"):
            old = {int(i): layer for i, layer in values["per_layer_config"].items()}
            values["per_layer_config"] = {new: _all_small(old[i]) for new, i in enumerate(kept) if i in old}


def build(kind: str, config_class: type) -> Any:
    """A family's model, the same random weights every time."""
    cls = MAPPINGS[kind][config_class]
    cls = cls[0] if isinstance(cls, tuple) else cls
    config = config_class(**tiny(config_class))
    if cls.config_class is config_class.sub_configs.get("text_config"):
        config = config.get_text_config()
    if kind == "causal" and hasattr(config, "is_decoder"):
        config.is_decoder = True
    torch.manual_seed(0)
    model = cls(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.2)
    start = {"decoder_start_token_id": 1} if config.is_encoder_decoder else {}
    model.generation_config = tf.GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=0, **start)
    return model


# ---- modes


def modes(kind: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every way of calling generate() that a family goes through."""
    ids = torch.randint(5, 90, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    padding = (0, slice(None, 4)) if kind == "causal" else (0, slice(-4, None))
    padded, padded_mask = ids.clone(), mask.clone()
    padded[padding], padded_mask[padding] = 0, 0
    batch = {"input_ids": ids, "attention_mask": mask}
    yield "greedy", batch
    yield "padded", {"input_ids": padded, "attention_mask": padded_mask}
    yield "beams", {**batch, "num_beams": 3}
    yield "sample", {**batch, "do_sample": True, "num_return_sequences": 2}
    if kind == "causal":
        repeating = ids[:1, :4].repeat(1, 4)
        yield "lookup", {"input_ids": repeating, "attention_mask": torch.ones_like(repeating), "prompt_lookup_num_tokens": 3}
        yield "chunks", {**batch, "prefill_chunk_size": 4}
    yield "details", {**batch, "output_scores": True, "output_hidden_states": True}


def run_mode(model: Any, arguments: dict[str, Any]) -> tuple[str, str, Any]:
    """The mark of one mode, what is wrong, and the paged answer."""
    arguments = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True, **arguments}
    try:
        torch.manual_seed(0)
        stock = model.generate(**arguments)
    except Exception as error:
        return "-", f"{type(error).__name__}: {error}", None
    try:
        torch.manual_seed(0)
        paged = model.generate(**arguments, cache_implementation="paged", cache_config={"block_size": 4})
    except Exception:
        return "E", traceback.format_exc(), None
    difference = _difference(stock, paged)
    if not difference:
        return "=", "", paged
    torch.manual_seed(0)
    if _difference(stock, model.generate(**arguments)):
        return "?", "stock disagrees with itself", paged
    return ("~" if _same_in_double(model, arguments) else "X"), difference, paged


def _difference(stock: Any, paged: Any) -> str:
    try:
        assert_equal(_without_cache(stock), _without_cache(paged))
    except AssertionError as error:
        return str(error).strip().replace("\n", " ")[:300]
    return ""


def _without_cache(answer: Any) -> dict[str, Any]:
    return {name: value for name, value in answer.items() if name not in ("past_key_values", "cache_params", "state")}


def _same_in_double(model: Any, arguments: dict[str, Any]) -> bool:
    """Whether a difference goes away where rounding cannot make one."""
    try:
        return not _difference(*both(model.double(), **arguments))
    except Exception:
        return False
    finally:
        model.float()


# ---- a family


def run_family(kind: str, config_class: type) -> dict[str, Any]:
    """All modes of one family: marks, paths, and what else went wrong."""
    found: dict[str, Any] = {"marks": {}, "notes": [], "paths": "", "warned": ""}
    try:
        model = build(kind, config_class)
    except Exception as error:
        return {**found, "unbuilt": f"{type(error).__name__}: {error}"}
    setting = model.config._attn_implementation
    for name, arguments in modes(kind):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            mark, text, answer = run_mode(model, arguments)
        found["marks"][name] = mark
        if text:
            found["notes"].append(f"{name} {mark}: {text}")
        if answer is None:
            continue
        told = [str(entry.message) for entry in caught if issubclass(entry.category, hf_paged.FallbackWarning)]
        parts = paged_parts(answer.get("past_key_values"))
        if parts and not found["paths"]:
            found["paths"] = " + ".join(_count(part.paths) for part in parts)
        found["warned"] = found["warned"] or (told[0] if told else "")
        if not parts and not told:
            found["notes"].append(f"{name} !: neither paged nor warned")
        del answer, parts, caught
        gc.collect()
        try:
            assert_clean(model, setting)
        except AssertionError as error:
            found["notes"].append(f"{name} !: not clean: {error or traceback.format_exc()}")
    return found


def _count(paths: list[str]) -> str:
    return ", ".join(f"{number} {path}" for path, number in Counter(paths).items())


def in_child(kind: str, config_class: type, seconds: int) -> dict[str, Any]:
    """Run a family in a fork: a crash, a hang or a leak is its own."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(seconds)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        with os.fdopen(writing, "w") as pipe:
            json.dump(run_family(kind, config_class), pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    return json.loads(text) if text else {"marks": {}, "notes": [], "paths": "", "warned": "", "unbuilt": f"died of signal {status & 127}"}


# ---- the report


def main() -> int:
    """Go through the families, print a row for each, and add them up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="model types; all of them by default")
    parser.add_argument("--seconds", type=int, default=120, help="limit for one family")
    parser.add_argument("--details", action="store_true", help="print tracebacks and what stock cannot do")
    options = parser.parse_args()
    tf.logging.set_verbosity_error()
    totals: Counter[str] = Counter()
    print(f"transformers {tf.__version__}, torch {torch.__version__}\n\n| family | marks | paths | remark |\n|---|---|---|---|")
    for kind, mapping in MAPPINGS.items():
        for config_class in mapping:
            if not options.families or config_class.model_type in options.families:
                found = in_child(kind, config_class, options.seconds)
                totals.update(_report(f"{config_class.model_type} ({kind})", found, options.details))
    print("\n" + ", ".join(f"{name}: {number}" for name, number in sorted(totals.items())))
    return 1 if any(totals[name] for name in ("mode X", "mode E", "complaints")) else 0


def _report(name: str, found: dict[str, Any], details: bool) -> Counter[str]:
    """Print a family's row, and count what is in it."""
    marks = "".join(found["marks"].values())
    shown = [note for note in found["notes"] if details or not re.match(r"\w+ [-~?]:", note)]
    remark = " ".join(found.get("unbuilt", "").split()) or found["warned"].split("'paged': ")[-1].split("; transformers")[0]
    lines = [re.sub(r"\s+", " ", note if details else note.strip().splitlines()[-1]) for note in shown]
    cells = (marks or "not built", found["paths"], "; ".join([remark, *lines] if remark else lines))
    print(f"| {name} | " + " | ".join(cell.replace("|", "/")[: 4000 if details else 400] for cell in cells) + " |", flush=True)
    totals = Counter({f"mode {mark}": number for mark, number in Counter(marks).items()})
    totals["complaints"] += sum(" !: " in note for note in found["notes"])
    totals["families"] += 1
    totals["families not built" if "unbuilt" in found else "families on pages" if found["paths"] else "families not on pages"] += 1
    return totals


if __name__ == "__main__":
    sys.exit(main())
