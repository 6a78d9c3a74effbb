"""Exceptions to the rules for tiny configs, by model type; "part.name" is a keyword of a nested config."""

from __future__ import annotations

from typing import Any

V = 96
TINY_BERT = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SHARED_KV = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}

MROPE = {"rope_parameters": {**ROPE, "mrope_section": [2, 1, 1]}}
PINPOINTS = {"image_grid_pinpoints": [[32, 32]]}
BLOCKS = {"window_size": 15, "downsample_rate": 5}
WINDOWS = {"window_size": 16, "fullatt_block_indexes": [1]}

EXCEPTIONS: dict[str, dict[str, Any]] = {
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "bamba": {"attn_layer_indices": [1]},
    "blip-2": {"image_token_index": 95},
    "blt": {"encoder_hash_byte_group_vocab": 64, "encoder_hash_byte_group_size": [3, 4]},
    "blt_patcher": {"num_hidden_layers": 2},
    "chameleon": {"vocabulary_map": {"<image>": 95, **{f"IMGIMG{chr(ord('A') + i)}Z": 60 + i for i in range(8)}}},
    "chameleon_vqgan": {"num_embeddings": 8},
    "clvp_encoder": {"num_attention_heads": 1},
    "cohere_compass_text": {"layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2,
                            "rope_parameters": {"sliding_attention": ROPE, "full_attention": ROPE}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "dots3_note_audio": {"adapter_input_size": 32},
    "dots3_note_text": {"per_layer_config": {2: {
        "head_dim": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "q_lora_rank": 16, "kv_lora_rank": 8,
        "num_attention_heads": 4, "num_key_value_heads": 4}}},
    "emu3": {"vocabulary_map": {"<image>": 95, "<|extra_200|>": 94, **{f"<|visual token {i:06d}|>": 60 + i for i in range(8)}}},
    "emu3_vqgan": {"codebook_size": 8, "base_channels": 32, "channel_multiplier": [1, 1, 1, 1]},
    "encodec": {"hidden_size": 32, "num_filters": 2, "codebook_size": 64, "codebook_dim": 32, "upsampling_ratios": [4, 2, 2, 2],
                "target_bandwidths": [18.0], "norm_type": "time_group_norm"},
    "encoder-decoder": {"encoder": {"model_type": "bert", **TINY_BERT},
                        "decoder": {"model_type": "bert", **TINY_BERT, "is_decoder": True, "add_cross_attention": True}},
    "ernie4_5_vl_moe_text": {"rope_parameters": {**ROPE, "mrope_section": [1, 1, 2]}},
    "exaone4_5_vision": WINDOWS,
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8},
    "fun_asr_nano": {"adaptor_config.intermediate_size": 8},
    "fun_asr_nano_adaptor": {"intermediate_size": 8},
    "gemma3n_text": {**SHARED_KV, "intermediate_size": [48] * 4, "activation_sparsity_pattern": [0.0] * 4, "laurel_rank": 8},
    "gemma4": {"vision_config": {
        "model_type": "gemma4_vision", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 4, "head_dim": 8, "patch_size": 8, "position_embedding_size": 64, "pooling_kernel_size": 2},
        "audio_config": {
        "model_type": "gemma4_audio", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "output_proj_dims": 32,
        "subsampling_conv_channels": [32, 8]}},
    "gemma4_text": SHARED_KV,
    "gemma4_unified": {"vision_config": {
        "model_type": "gemma4_unified_vision", "patch_size": 4, "pooling_kernel_size": 2, "mm_embed_dim": 32, "mm_posemb_size": 64,
        "output_proj_dims": 32}, "audio_config": {"model_type": "gemma4_unified_audio", "audio_embed_dim": 16}},
    "glm46v_text": MROPE,
    "glm4v_moe_text": {"head_dim": 16, **MROPE},
    "glm4v_text": MROPE,
    "glm5_next_text": {"index_kpool": 4},
    "glm_image_text": MROPE,
    "glm_image_vqmodel": {"latent_channels": 32, "num_embeddings": 60},
    "glm_ocr_text": MROPE,
    "glmasr_encoder": {"intermediate_size": 128},
    "glmga_text": MROPE,
    "granite4_vision": PINPOINTS,
    "granite_speech": BLOCKS,
    "granite_speech_plus": BLOCKS,
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2},
    "hrm_text": {"num_hidden_layers": 1, "num_layers_per_stack": None, "H_cycles": 2, "L_cycles": 1, "layer_types": None},
    "hunyuan_vl_text": MROPE,
    "instructblip": {"image_token_index": 95},
    "instructblipvideo": {"image_token_index": 95, "video_token_index": 94},
    "internvl_vision": {"image_size": [32, 32], "patch_size": [8, 8]},
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "led": {"attention_window": 8, "max_encoder_position_embeddings": 256, "max_decoder_position_embeddings": 256},
    "lfm2": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "llama4_vision_model": {"intermediate_size": 128, "pixel_shuffle_ratio": 0.5},
    "llava_next": PINPOINTS,
    "llava_next_video": PINPOINTS,
    "llava_onevision": PINPOINTS,
    "mamba2": {"num_heads": 8},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"], "num_hidden_layers": 2, "index_block_size": 4,
                           "index_topk_blocks": 2, "index_local_blocks": 1},
    "minicpm_ocr": {"image_token_id": 95, "video_token_id": 94},
    "minicpmv4_6": {"image_token_id": 95, "video_token_id": 94},
    "minicpmv4_7": {"image_token_id": 95, "video_token_id": 94},
    "mistral_large4_text": {"num_hidden_layers": 4, "kv_source_layers": [0, 1, 1, 3], "no_rope_layers": [1, 1, 1, 0],
                            "layer_types": ["indexed_attention"] * 4, "mlp_layer_types": ["dense"] + ["sparse"] * 3,
                            "indexer_types": ["full", "full", "shared", "full"]},
    "mllama_text_model": {"num_hidden_layers": 4, "cross_attention_layers": [1, 3]},
    "mllama_vision_model": {"intermediate_layers_indices": [0], "vision_output_dim": 64},
    "molmo2_adapter": {"vision_feature_layer": [0, 1], "text_hidden_size": 32},
    "moonshine": {"encoder_num_key_value_heads": 4, "decoder_num_key_value_heads": 4},
    "muse_glimmer": {"projection_hidden_size": 32, "out_hidden_size": 128},
    "muse_spark": {"out_hidden_size": 128},
    "muse_spark_audio": {"num_hidden_layers": 4},
    "musicgen_decoder": {"vocab_size": 64, "pad_token_id": 64, "bos_token_id": 64},
    "musicgen_melody_decoder": {"vocab_size": 64, "pad_token_id": 64, "bos_token_id": 64},
    "nemotron_h_omni": {"audio_config": {
        "model_type": "parakeet_encoder", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_mel_bins": 16, "subsampling_conv_channels": 8, "projection_hidden_size": 32, "projection_bias": False},
        "vision_config.video_temporal_patch_size": 2, "image_token_id": 95, "audio_token_id": 94},
    "paddleocr_vl_text": MROPE,
    "phi4_multimodal_audio": {"ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32, "nemo_conv_channels": 32},
    "pix2struct_vision_model": {"patch_embed_hidden_size": 192},
    "qianfan_ocr_vision": {"image_size": [32, 32], "patch_size": [8, 8]},
    "qwen2_5_omni_text": MROPE,
    "qwen2_5_omni_thinker": {"vision_start_token_id": 83},
    "qwen2_5_omni_vision_encoder": WINDOWS,
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 83},
    "qwen2_5_vl_text": MROPE,
    "qwen2_5_vl_vision": WINDOWS,
    "qwen2_vl_text": MROPE,
    "qwen4_exp_text": {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8, "indexer_compress_ratio": 4,
                       "ngram_vocab_size_base": 100, "split_ngram_parts": 2},
    "inkling2_loop_text": {"loop_layer_index_start": 1, "loop_layer_index_end": 2, "n_layers_per_attn_res_block": 1},
    "dory": {"num_hidden_layers": 3, "n_input_layers": 1, "n_recurrent_layers": 1, "n_output_layers": 1,
             "layer_types": ["sliding_attention", "full_attention", "full_attention"]},
    "recurrent_gemma": {"num_hidden_layers": 3, "block_types": ["recurrent", "recurrent", "attention"]},
    "reformer": {"axial_pos_embds_dim": (8, 24), "axial_pos_shape": (16, 16), "is_decoder": True},
    "sam_vision_model": {"global_attn_indexes": [1]},
    "seamless_m4t": {"vocoder_offset": 0},
    "seamless_m4t_v2": {"vocoder_offset": 0},
    "speech-encoder-decoder": {"decoder.is_decoder": True, "decoder.add_cross_attention": True},
    "step3p5": {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"],
                "rope_parameters": {"sliding_attention": ROPE, "full_attention": ROPE}},
    "unlimited_ocr_sam_vision_model": {"image_size": 64, "downsample_channels": [64, 32], "global_attn_indexes": [1]},
    "vibevoice_acoustic_tokenizer_encoder": {"num_filters": 2},
    "vibevoice": {"diffusion_head_config.latent_size": 32},
    "voxtral": {"audio_token_id": 95},
    "voxtral_encoder": {"intermediate_size": 128},
    "vipllava": {"vision_feature_layers": [-1]},
    "vision-encoder-decoder": {"decoder.is_decoder": True, "decoder.add_cross_attention": True},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "attention_hidden_size": 64, "attention_head_dim": 16,
              "layers_block_type": ["linear_attention", "linear_attention", "hybrid", "hybrid"]},
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2, "hybrid_layer_ids": [1, 3],
               "num_mem_blocks": 1, "n_mamba_heads": 8, "mamba_headdim": 8, "attention_hidden_size": 64, "attention_head_dim": 16},
}  # fmt: skip

SPEECH = {
    **{
        name: {"eng": 10}
        for name in ("text_decoder_lang_to_code_id", "t2u_lang_code_to_id", "vocoder_lang_code_to_id")
    },
    "id_to_text": {str(i): chr(ord("a") + i % 26) for i in range(V)},
    "char_to_id": {chr(ord("a") + i): 10 + i for i in range(26)},
}
MUSIC = {
    "bos_token_id": 64,
    "pad_token_id": 64,
    "decoder_start_token_id": 64,
    "eos_token_id": None,
    "guidance_scale": 3.0,
}
GENERATION: dict[str, dict[str, Any]] = {
    "musicgen": MUSIC,
    "musicgen_melody": MUSIC,
    "pop2piano": {"composer_to_feature_token": {f"composer{i + 1}": 60 + i for i in range(21)}},
    "seamless_m4t": SPEECH,
    "seamless_m4t_v2": SPEECH,
}
"""Entries that generate() of a family needs in its generation config, by model type."""
