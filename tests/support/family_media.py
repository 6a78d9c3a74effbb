"""Prompts with pictures, videos or recordings of families whose inputs cannot be found by trying: made as the
family's processor makes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from tiny import PROMPT_IDS

Inputs = dict[str, Any]
TEXT = 3
"""Tokens of text behind each picture."""


def shown(model: Any, what: str, rows: int, each: int) -> Inputs | None:
    """The whole inputs of a family that needs its own; None if there is no such entry."""
    family = FAMILIES.get((model.config.model_type, what))
    return None if family is None else family(model, rows, each)


# ---- text around what is shown


def _noise(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(4)) * 2 - 1


def _prompt(
    rows: int, each: int, run: Sequence[int], types: Sequence[int] = (), tail: Sequence[int] = ()
) -> Inputs:
    """Prompts of text with `each` times the tokens `run` in them, which are of the kinds `types`; `tail` ends
    them.
    """
    count = 4 + TEXT * each
    words = torch.randint(
        PROMPT_IDS.start, PROMPT_IDS.stop, (rows, count), generator=torch.Generator().manual_seed(1)
    ).tolist()
    ids = []
    kinds = []
    for row in words:
        ids.append(row[:4])
        kinds.append([0] * 4)
        for begin in range(4, count, TEXT):
            ids[-1] += [*run, *row[begin : begin + TEXT]]
            kinds[-1] += [*types, *[0] * TEXT]
        ids[-1] += tail
        kinds[-1] += [0] * len(tail)
    inputs = {
        "input_ids": torch.tensor(ids),
        "attention_mask": torch.ones(rows, len(ids[0]), dtype=torch.long),
    }
    return {**inputs, "mm_token_type_ids": torch.tensor(kinds)} if types else inputs


# ---- pictures


def _glm_image(model: Any, rows: int, each: int) -> Inputs:
    """Pictures to be changed: their grids, then the grid of the picture to be made, whose tokens are generated."""
    config = model.config
    run = [config.image_start_token_id, *[config.image_token_id] * 16, config.image_end_token_id]
    area = config.vision_config.in_channels * config.vision_config.patch_size**2
    return {
        **_prompt(rows, each, run, tail=[config.image_start_token_id]),
        "pixel_values": _noise(rows * each * 16, area),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * rows * (each + 1)),
        "images_per_sample": torch.tensor([each + 1] * rows),
    }


def _inkling2(model: Any, rows: int, each: int) -> Inputs:
    """Patches of `spatial_merge_size` squared patches, each of which becomes a token."""
    vision = model.config.vision_config
    side = vision.spatial_merge_size * vision.patch_size
    return {
        **_prompt(rows, each, [model.config.image_token_id] * 4),
        "pixel_values": _noise(rows * each * 4, side, side, vision.num_channels),
        "image_grid_thw": torch.tensor([[1, 2, 2]] * rows * each),
    }


def _one_frame(model: Any, rows: int, each: int) -> Inputs:
    """Pictures as videos of one frame."""
    size, queries = model.config.vision_config.image_size, model.config.num_query_tokens
    return {
        **_prompt(rows, each, [model.config.video_token_index] * queries),
        "pixel_values": _noise(rows * each, 1, 3, size, size),
        "qformer_input_ids": torch.full((rows * each, 3), PROMPT_IDS.start),
    }


def _step3p7(model: Any, rows: int, each: int) -> Inputs:
    """A view of the whole picture and two crops of it, which a stride of four makes tokens of."""
    side = 8 * model.config.vision_config.patch_size
    return {
        **_prompt(rows, each, [model.config.image_token_id] * (2 * 4 + 4)),
        "pixel_values": _noise(rows * each, 3, side, side),
        "pixel_values_local": _noise(rows * each * 2, 3, side, side),
        "num_local_patches": [2] * rows * each,
    }


def _unlimited_ocr(model: Any, rows: int, each: int) -> Inputs:
    """A view of the whole picture and two crops side by side; a newline ends each of their lines."""
    sam = model.config.vision_config.sam_config
    side = sam.image_size // sam.patch_size // 4
    local, whole = side * (2 * side + 1), side * (side + 1)
    return {
        **_prompt(rows, each, [model.config.image_token_id] * (local + whole + 1)),
        "pixel_values": _noise(rows * each, 3, sam.image_size, sam.image_size),
        "pixel_values_local": _noise(rows * each * 2, 3, sam.image_size, sam.image_size),
        "num_local_patches": [2] * rows * each,
        "patches_grid": [[2, 1]] * rows * each,
    }


# ---- videos


def _glm_video(model: Any, rows: int, each: int) -> Inputs:
    """Two frames between the tokens of a video, each between those of a picture and with a time behind it."""
    config = model.config
    vision = config.vision_config
    frame = [
        config.image_start_token_id,
        *[config.image_token_id] * 4,
        config.image_end_token_id,
        PROMPT_IDS.start,
    ]
    of_frame = [0, 2, 2, 2, 2, 0, 0]
    area = vision.temporal_patch_size * vision.in_channels * vision.patch_size**2
    return {
        **_prompt(
            rows,
            each,
            [config.video_start_token_id, *frame * 2, config.video_end_token_id],
            [0, *of_frame * 2, 0],
        ),
        "pixel_values_videos": _noise(rows * each * 2 * 16, area),
        "video_grid_thw": torch.tensor([[2, 4, 4]] * rows * each),
    }


def _nemotron_omni_video(model: Any, rows: int, each: int) -> Inputs:
    """The frames of all videos in one list, two of them in a patch."""
    side = 4 * model.config.vision_config.patch_size
    return {
        **_prompt(rows, each, [model.config.image_token_id] * 8),
        "pixel_values_videos": _noise(rows * each * 4, 3, side, side),
    }


# ---- recordings


def _granite_speech(model: Any, rows: int, each: int) -> Inputs:
    """A few queries for each window of frames."""
    config = model.config
    frames = 64
    queries = math.ceil(frames / config.window_size) * (config.window_size // config.downsample_rate)
    return {
        **_prompt(rows, each, [config.audio_token_id] * queries),
        "input_features": _noise(rows * each, frames, config.encoder_config.input_dim),
        "input_features_mask": torch.ones(rows * each, queries, dtype=torch.bool),
    }


def _gemma4_audio(model: Any, rows: int, each: int) -> Inputs:
    """Mel bins of which two convolutions leave a quarter of the frames; as many bins as the first has channels."""
    return _masked_frames(model, rows, each, 64, model.config.audio_config.subsampling_conv_channels[0], 16)


def _gemma4_unified_audio(model: Any, rows: int, each: int) -> Inputs:
    """Frames of the wave itself, a token each."""
    return _masked_frames(model, rows, each, 8, model.config.audio_config.audio_embed_dim, 8)


def _masked_frames(model: Any, rows: int, each: int, frames: int, width: int, tokens: int) -> Inputs:
    return {
        **_prompt(rows, each, [model.config.audio_token_id] * tokens, [3] * tokens),
        "input_features": _noise(rows * each, frames, width),
        "input_features_mask": torch.ones(rows * each, frames, dtype=torch.bool),
    }


def _musicgen(model: Any, rows: int, each: int) -> Inputs | None:
    """A text, and music to go on with: the first tokens of the decoder."""
    return {**_prompt(rows, 1, []), "input_values": _noise(rows, 1, 128)} if each == 1 else None


def _musicgen_melody(model: Any, rows: int, each: int) -> Inputs | None:
    """A text, and a melody whose notes are put before it."""
    return (
        {**_prompt(rows, 1, []), "input_features": _noise(rows, 10, model.config.num_chroma)}
        if each == 1
        else None
    )


def _clvp(model: Any, rows: int, each: int) -> Inputs | None:
    """A text, and a voice to speak it with."""
    bins = model.config.decoder_config.feature_size
    return {**_prompt(rows, 1, []), "input_features": _noise(rows, bins, 40)} if each == 1 else None


def _transducer(model: Any, rows: int, each: int) -> Inputs | None:
    bins = model.config.encoder_config.num_mel_bins
    return {"input_features": _noise(rows, 100, bins)} if each == 1 else None


def _pop2piano(model: Any, rows: int, each: int) -> Inputs | None:
    return {"input_features": _noise(rows, 20, model.config.d_model)} if each == 1 else None


def _speech_to_speech(model: Any, rows: int, each: int) -> Inputs | None:
    """One recording a prompt, answered in a language; the tokens behind the waves come back with them."""
    width = model.config.feature_projection_input_dim
    answer = {
        "tgt_lang": "eng",
        "return_intermediate_token_ids": True,
        "return_dict_in_generate": False,  # both of its inner calls would get it, and the second may not
        "output_scores": False,
        "output_logits": False,
        "max_new_tokens": 12,
    }
    if each > 1 or not hasattr(
        model, "vocoder"
    ):  # one that answers with text is shown recordings as others are
        return None
    return {"input_features": _noise(rows, 60, width), **answer}


class NoiseScheduler:
    """The least that takes the place of a scheduler of the package diffusers."""

    timesteps = torch.tensor([2, 1])

    def set_timesteps(self, num_inference_steps: int) -> None:
        self.timesteps = torch.arange(num_inference_steps, 0, -1)

    def step(self, noise: torch.Tensor, timestep: torch.Tensor, sample: torch.Tensor) -> Any:
        return SimpleNamespace(prev_sample=sample - 0.3 * noise)


def _vibevoice(model: Any, rows: int, each: int) -> Inputs:
    """Voices to speak with; then speech begins, whose every token is sampled by diffusion."""
    config = model.config
    hop = math.prod(config.audio_config.downsampling_ratios)
    return {
        **_prompt(rows, each, [config.audio_token_id] * 2, tail=[config.audio_bos_token_id]),
        "input_values": _noise(rows * each, 1, 2 * hop),
        "padding_mask": torch.ones(rows * each, 2 * hop, dtype=torch.bool),
        "noise_scheduler": NoiseScheduler(),
        "num_diffusion_steps": 2,
    }


FAMILIES: dict[tuple[str, str], Callable[[Any, int, int], Inputs | None]] = {
    ("clvp", "audio"): _clvp,
    ("gemma4", "audio"): _gemma4_audio,
    ("gemma4_unified", "audio"): _gemma4_unified_audio,
    ("glm46v", "video"): _glm_video,
    ("glm4v", "video"): _glm_video,
    ("glm4v_moe", "video"): _glm_video,
    ("glm5_next", "video"): _glm_video,
    ("glm_image", "image"): _glm_image,
    ("glm_ocr", "video"): _glm_video,
    ("glmga", "video"): _glm_video,
    ("granite_speech", "audio"): _granite_speech,
    ("granite_speech_plus", "audio"): _granite_speech,
    ("inkling2", "image"): _inkling2,
    ("instructblipvideo", "image"): _one_frame,
    ("musicgen", "audio"): _musicgen,
    ("musicgen_melody", "audio"): _musicgen_melody,
    ("nemotron3_5_asr", "audio"): _transducer,
    ("nemotron_asr_streaming", "audio"): _transducer,
    ("nemotron_h_omni", "video"): _nemotron_omni_video,
    ("parakeet_rnnt", "audio"): _transducer,
    ("parakeet_tdt", "audio"): _transducer,
    ("pop2piano", "audio"): _pop2piano,
    ("seamless_m4t", "audio"): _speech_to_speech,
    ("seamless_m4t_v2", "audio"): _speech_to_speech,
    ("step3p7", "image"): _step3p7,
    ("unlimited_ocr", "image"): _unlimited_ocr,
    ("vibevoice", "audio"): _vibevoice,
}
