"""Prompts with pictures, videos or recordings for any model that takes them: arguments are found by trying,
and by the model's errors.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch
from family_media import shown as shown_by_family
from tiny import PROMPT_IDS

MISMATCH = re.compile(
    r"tokens:? \[?\d+\]?, (?:\w+ )?features:? \[?(\d+)|value tensor of shape \[(\d+), \d\d+\] cannot be "
    r"broadcast|Got (\d+) feature vectors"
)
OF_ONE = re.compile(r"span_length=\d+, expected (\d+)")
"""How many placeholders a single picture wants."""
WIDTH = 32
"""Of every hidden state in a tiny model."""
MOST = 300
"""More placeholders than this are a misunderstanding."""
Inputs = dict[str, Any]


def with_pictures(model: Any, rows: int = 2, each: int = 1) -> Inputs | None:
    """Arguments for `rows` prompts, each around `each` pictures of its own; None if no way of showing them is
    known.
    """
    return _first(model, _pictures(model, rows, each), rows, each, "image")


def with_videos(model: Any, rows: int = 2, each: int = 1) -> Inputs | None:
    """The same with videos."""
    return _first(model, _videos(model, rows * each), rows, each, "video")


def with_recordings(model: Any, rows: int = 2, each: int = 1) -> Inputs | None:
    """The same with recordings."""
    return _first(model, _recordings(model, rows * each), rows, each, "audio")


def _first(model: Any, ways: Iterator[Inputs], rows: int, each: int, what: str) -> Inputs | None:
    """The first way that the model takes; the family's own if it has one."""
    own = shown_by_family(model, what, rows, each)
    if own is not None:
        texts = ("input_ids", "attention_mask", "mm_token_type_ids")
        return own if _matters(model, own, {name: own[name] for name in own if name not in texts}) else None
    prompts = (
        _prompt(model, shown, rows, each, _id_of(model, what), 1 + (what == "video")) for shown in ways
    )
    return next((found for found in prompts if found is not None), None)


def pad_left(inputs: Inputs) -> Inputs:
    """The same with four columns of padding before the second row."""
    padded = dict(inputs)
    for name, value in inputs.items():
        if name in ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids") and value.ndim == 2:
            wide = torch.nn.functional.pad(value, (4, 0))
            if name != "input_ids":
                wide[0, :4] = int(name == "attention_mask")
            else:
                wide[0, :4] = PROMPT_IDS.start
            padded[name] = wide
        elif name in ("cross_attention_mask", "image_attention_mask") and value.ndim > 2:
            padded[name] = torch.cat([value[:, :1].expand(-1, 4, *value.shape[2:]), value], 1)
    return padded


# ---- the prompt around it


def _prompt(
    model: Any, shown: Inputs, rows: int, each: int, placeholder: int | None, kind: int
) -> Inputs | None:
    """The prompt with as many placeholders as the model wants, if it wants any and looks at what is shown."""
    counts = [0] if placeholder is None else [4, 0, 1, 8, 16]
    for count in counts:  # what the model says adds to the list
        inputs = {**_text(model, rows, each, placeholder, count, kind), **shown}
        try:
            if _matters(model, inputs, shown):
                return inputs
        except Exception as error:
            found = MISMATCH.search(str(error))
            own = OF_ONE.search(str(error))
            for width in (1, WIDTH) if found and count else ():
                # Some count the features' numbers, not the features.
                wanted, left = divmod(int(found[1] or found[2] or found[3]), rows * each * width)
                if not left and wanted and wanted not in counts and wanted < MOST:
                    counts.append(wanted)
            counts += [int(own[1])] if own and int(own[1]) not in counts else []
    return None


def _text(model: Any, rows: int, each: int, placeholder: int | None, count: int, kind: int) -> Inputs:
    """Prompts of text with `each` runs of placeholders in them, and of what kind each token is."""
    if model.config.is_encoder_decoder and model.main_input_name != "input_ids":
        return {}
    text = torch.randint(
        PROMPT_IDS.start, PROMPT_IDS.stop, (rows, 4 + 3 * each), generator=torch.Generator().manual_seed(1)
    )
    middle = torch.full((rows, count), placeholder or 0)
    begin = getattr(model.config, "vision_start_token_id", None)
    if count and isinstance(begin, int):
        text[:, 3:-1:3] = begin
    runs = [torch.cat([middle, text[:, 4 + 3 * i : 7 + 3 * i]], 1) for i in range(each)]
    ids = torch.cat([text[:, :4], *runs], 1)
    types = torch.zeros_like(ids) if placeholder is None else (ids == placeholder).long() * kind
    taken = inspect.signature(model.forward).parameters
    typed = {name: types for name in ("token_type_ids", "mm_token_type_ids") if name in taken and count}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **typed}


def _matters(model: Any, inputs: Inputs, shown: Inputs) -> bool:
    """True if another picture of the last prompt changes its logits: where placeholders are too few a model
    may take the first's.
    """
    floating = {
        name: value
        for name, value in shown.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.ndim > 1
    }
    other = {name: value.clone() for name, value in floating.items()}
    for value in other.values():
        half = len(value) // 2
        value[half:] = value[half:].roll(1, 1 if value.shape[1] > 1 else -1) * 1.5 + 0.1
    both = (inputs, {**inputs, **other})
    answers = [_first_step(model, given) for given in both]
    if all("logits" in answer for answer in answers):
        guided = (model.generation_config.guidance_scale or 1) > 1  # its second half has seen nothing
        scores = [answer["logits"][0].chunk(1 + guided)[0] for answer in answers]
    elif _differ(*answers):  # its generate() hands out no logits, but what it made of them
        return True
    else:
        scores = [_logits(model, given) for given in both]
    return bool((scores[0] - scores[1])[-1].abs().max() > 1e-4) and bool(scores[0].isfinite().all())


def _first_step(model: Any, inputs: Inputs) -> Any:
    """The answer of generate()."""
    options = {
        "max_new_tokens": 1,
        "min_new_tokens": 1,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    return model.generate(**{**options, "do_sample": False, **inputs})


def _differ(one: Any, other: Any) -> bool:
    """True if a tensor of an answer is another one's."""
    pairs = [(value, other[name]) for name, value in one.items() if isinstance(value, torch.Tensor)]
    return any(mine.shape != theirs.shape or not torch.equal(mine, theirs) for mine, theirs in pairs)


@torch.no_grad()
def _logits(model: Any, inputs: Inputs) -> torch.Tensor:
    """The logits of a transducer for its first token, at every frame."""
    begin = torch.full(
        (len(inputs["input_features"]), 1), model.generation_config.decoder_start_token_id or 0
    )
    return model(**inputs, decoder_input_ids=begin).logits


def _id_of(model: Any, what: str) -> int | None:
    """The token that stands for a picture (or a recording) in a prompt."""
    names = (
        f"{what}_token_id",
        f"{what}_token_index",
        f"{what}_patch_id",
        "image_token_id",
        "media_token_id",
    )
    parts = [part for part in vars(model.config).values() if hasattr(part, "to_dict")]
    found = [getattr(model.config, name, None) for name in names]
    found += [getattr(part, name, None) for name in names for part in parts]
    found.append((getattr(model.config, "vocabulary_map", None) or {}).get(f"<{what}>"))
    return next((value for value in found if isinstance(value, int)), None)


# ---- pictures


def _part(config: Any, *names: str) -> Any:
    return next((part for name in names if (part := getattr(config, name, None)) is not None), config)


def _number(config: Any, default: int, *names: str) -> int:
    for name in names:
        value = getattr(config, name, None)
        value = value[0] if isinstance(value, (list, tuple)) and value else value
        if isinstance(value, int):
            return value
    return default


def _noise(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(4)) * 2 - 1


def _pictures(model: Any, prompts: int, each: int = 1) -> Iterator[Inputs]:
    """Ways of showing `each` pictures per prompt, the likely ones first."""
    rows = prompts * each
    taken = inspect.signature(model.forward).parameters
    vision = _part(model.config, "vision_config", "vq_config", "encoder")
    size = _number(vision, 32, "image_size", "resolution")
    patch = _number(vision, 8, "model_patch_size", "patch_size")
    channels = _number(vision, 3, "in_channels", "in_chans", "num_channels")
    area = channels * patch * patch
    if "image_grid_thw" in taken:
        yield from _grids(
            rows,
            area,
            _number(vision, 2, "temporal_patch_size"),
            (channels, patch, patch),
            "image_merge_sizes" in taken,
        )
    if "flattened_patches" in taken:
        place = torch.arange(1, 17).float()[:, None].expand(rows, 16, 1)
        extra = _extra(taken, prompts, each, size)
        wide = _number(vision, area, "patch_embed_hidden_size")
        yield {"flattened_patches": torch.cat([place, place, _noise(rows, 16, wide)], 2), **extra}
    yield from _in_patches(taken, prompts, each, channels, patch)
    if "spatial_shapes" in taken:
        shape = {
            "spatial_shapes": torch.tensor([[4, 4]] * rows),
            "pixel_attention_mask": torch.ones(rows, 16, dtype=torch.long),
        }
        yield {"pixel_values": _noise(rows, 16, area), **shape}
    if "aspect_ratio_ids" in taken:
        ones = torch.ones(prompts, each, dtype=torch.long)
        ratio = {"aspect_ratio_ids": ones, "aspect_ratio_mask": ones[..., None].repeat(1, 1, 4)}
        seen = {"cross_attention_mask": torch.ones(prompts, 4 + 3 * each, each, 4, dtype=torch.long)}
        yield {"pixel_values": _noise(prompts, each, 4, channels, size, size), **ratio, **seen}
    if "pixel_values" in taken:
        extra = _extra(taken, prompts, each, size)
        for given in (extra, {}) if extra else ({},):
            for shape in ((rows,), (rows, 1), (rows, 2), *([(prompts, each)] if each > 1 else [])):
                yield {"pixel_values": _noise(*shape, channels, size, size), **given}
    if "image_pixel_values" in taken:
        crops = {"image_attention_mask": torch.ones(rows, 2, size // patch, size // patch, dtype=torch.long)}
        sides = {"image_sizes": torch.tensor([[size, size]] * rows)}
        yield {"image_pixel_values": _noise(rows, 2, channels, size, size), **crops, **sides}
    if "pixel_attention_mask" in taken:
        shown = torch.ones(prompts, each, dtype=torch.bool)
        yield {"pixel_values": _noise(prompts, each, channels, size, size), "pixel_attention_mask": shown}
    if "high_res_pixel_values" in taken:
        fine = _number(_part(model.config, "high_res_vision_config"), size, "image_size")
        yield {
            "pixel_values": _noise(rows, channels, size, size),
            "high_res_pixel_values": _noise(rows, channels, fine, fine),
        }


def _in_patches(taken: Any, prompts: int, each: int, channels: int, patch: int) -> Iterator[Inputs]:
    """Pictures of 4 x 4 patches, as processors cut them up that know no one size."""
    rows, area = prompts * each, channels * patch * patch
    sides = torch.tensor([[4, 4]] * rows)
    if "image_patches" in taken:
        yield {"pixel_values": _noise(rows, 16, area)}
    if "image_position_ids" in taken:
        place = torch.stack([torch.arange(16) % 4, torch.arange(16) // 4], 1)
        yield {
            "pixel_values": _noise(rows, 16, area),
            "image_position_ids": place.expand(rows, 16, 2).contiguous(),
        }
    if "target_sizes" in taken:
        yield {"pixel_values": _noise(1, channels, patch, rows * 16 * patch), "target_sizes": sides}
        yield {"pixel_values": _noise(rows, channels, patch, 16 * patch), "target_sizes": sides}
    if "image_grid_hw" in taken:
        yield {"pixel_values": _noise(rows * 16, area), "image_grid_hw": sides}


def _grids(rows: int, area: int, frames: int, patch: tuple[int, ...], merges: bool) -> Iterator[Inputs]:
    """Patches of all pictures in one list, and how many there are of each."""
    grid: Inputs = {"image_grid_thw": torch.tensor([[1, 4, 4]] * rows)}
    if merges:
        grid["image_merge_sizes"] = torch.tensor([2] * rows)
    for shape in ((frames * area,), (area,), patch):
        yield {"pixel_values": _noise(rows * 16, *shape), **grid}


def _extra(taken: Any, prompts: int, each: int, size: int) -> Inputs:
    """The other inputs of a forward with plain pictures."""
    rows, text = prompts * each, 4 + 3 * each
    known = {
        "image_sizes": torch.tensor([[size, size]] * rows),
        "qformer_input_ids": torch.full((rows, 3), PROMPT_IDS.start),
        "image_attention_mask": torch.ones(prompts, text, each, dtype=torch.long),
        "bbox": torch.full((prompts, text, 4), 0.3),
        "image_embeds_position_mask": (torch.arange(text) // 4 == 0)
        .long()
        .expand(prompts, text)
        .contiguous(),
        "width": torch.full((rows,), 4),
        "height": torch.full((rows,), 4),
    }
    return {name: value for name, value in known.items() if name in taken}


# ---- videos and recordings


def _videos(model: Any, rows: int) -> Iterator[Inputs]:
    """Ways of showing a video per row, the likely ones first."""
    taken = inspect.signature(model.forward).parameters
    vision = _part(model.config, "vision_config", "vq_config", "encoder")
    size = _number(vision, 32, "image_size", "resolution")
    patch = _number(vision, 8, "model_patch_size", "patch_size")
    channels, frames = (
        _number(vision, 3, "in_channels", "in_chans", "num_channels"),
        _number(vision, 2, "temporal_patch_size"),
    )
    if "video_grid_thw" in taken:
        for long in (2, 1):
            grid: Inputs = {"video_grid_thw": torch.tensor([[long, 4, 4]] * rows)}
            if "video_merge_sizes" in taken:
                grid["video_merge_sizes"] = torch.tensor([2] * rows)
            if "video_second_per_grid" in taken:
                grid["video_second_per_grid"] = torch.tensor([1.0] * rows)
            for shape in (
                (frames * channels * patch * patch,),
                (channels * patch * patch,),
                (channels, patch, patch),
            ):
                yield {"pixel_values_videos": _noise(rows * long * 16, *shape), **grid}
    elif "target_sizes_videos" in taken:
        yield {
            "pixel_values_videos": _noise(1, channels, patch, rows * 16 * patch),
            "target_sizes_videos": torch.tensor([[4, 4]] * rows),
        }
    elif "num_frames_per_video" in taken:
        place = (
            torch.stack([torch.arange(16) % 4, torch.arange(16) // 4], 1).expand(2 * rows, 16, 2).contiguous()
        )
        said = {"video_position_ids": place, "num_frames_per_video": torch.tensor([2] * rows)}
        yield {"pixel_values_videos": _noise(2 * rows, 16, channels * patch * patch), **said}
    elif "video_position_ids" in taken:
        place = torch.stack([torch.arange(16) % 4, torch.arange(16) // 4], 1)
        yield {
            "pixel_values_videos": _noise(rows, 2, 16, channels * patch * patch),
            "video_position_ids": place.expand(rows, 2, 16, 2).contiguous(),
        }
    elif "pixel_values_videos" in taken:
        for shape in ((rows, 2), (rows, 8), (2 * rows,)):
            yield {"pixel_values_videos": _noise(*shape, channels, size, size)}
    elif "qformer_input_ids" in taken:
        said = {"qformer_input_ids": torch.full((rows, 3), PROMPT_IDS.start)}
        yield {"pixel_values": _noise(rows, 4, channels, size, size), **said}


def _recordings(model: Any, rows: int) -> Iterator[Inputs]:
    """Ways of playing a recording per row, the likely ones first."""
    audio = _part(model.config, "audio_config", "encoder_config", "encoder")
    names = (
        "num_mel_bins",
        "input_feat_per_channel",
        "n_mels",
        "input_dim",
        "feature_projection_input_dim",
        "input_size",
        "num_chroma",
    )
    parts = [audio, model.config, *(part for part in vars(audio).values() if hasattr(part, "to_dict"))]
    widths = dict.fromkeys(width for part in parts for name in names if (width := _number(part, 0, name)))
    for bins in widths or [80]:
        yield from _of_width(model, rows, audio, bins)


def _of_width(model: Any, rows: int, audio: Any, bins: int) -> Iterator[Inputs]:
    """Recordings with so many numbers a frame."""
    taken = inspect.signature(model.forward).parameters
    frames = 2 * _number(audio, 50, "max_source_positions")
    masks = [
        name for name in ("feature_attention_mask", "input_features_mask", "attention_mask") if name in taken
    ]
    if "audio_input_features" in taken:
        whole = {
            "audio_embed_sizes": torch.tensor([8] * rows),
            "audio_attention_mask": torch.ones(rows, 64, dtype=torch.bool),
        }
        yield {"audio_input_features": _noise(rows, 64, bins), **whole}
    for name in ("input_features", "input_values"):
        if name in taken:
            for length in (frames, 64, 200, 120):
                waves = [(rows, 16 * length), (rows, 1, 16 * length)]
                shapes = [(rows, bins, length), (rows, length, bins)] if name == "input_features" else waves
                for shape in shapes:
                    yield {name: _noise(*shape)}
                    for mask in masks:
                        yield {
                            name: _noise(*shape),
                            mask: torch.ones(
                                rows, length if name == "input_features" else shape[-1], dtype=torch.long
                            ),
                        }
