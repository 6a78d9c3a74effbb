"""Inputs of a decoder beside embeddings, cut into pieces and joined again (C23, C32), and prompts with
something in them.
"""

from __future__ import annotations

import pytest
import torch

from hf_paged.engine.multimodal.extras import DecoderExtras, decoder_extras, joined_extras
from hf_paged.engine.multimodal.media import Media, marks_of, media_arguments
from hf_paged.engine.worker.merging import moved
from hf_paged.scheduling import UNKNOWN

MASK = torch.tensor([False, True, True, False, False, True, False])
ROWS = torch.arange(6.0).reshape(3, 2)
KEY = b"key"


def media(
    ids: tuple[int, ...] = (5, 9, 9, 6, 9, 7), content: float = 1.0, marks: tuple[int, ...] = (9,)
) -> Media:
    return Media({"pixel_values": torch.full((2, 3), content), "sizes": [(4, 4)]}, ids, marks, KEY)


def test_a_mask_and_lists_of_features() -> None:
    given = {"mask": MASK[None], "features": [ROWS, ROWS + 10], "others": (ROWS * 2,)}
    found = decoder_extras(given, 7)
    assert found is not None
    assert (found.name, sorted(found.features)) == ("mask", ["features", "others"])
    for wrong in (
        {},
        {"mask": MASK[None]},
        {"features": [ROWS]},
        {**given, "number": 1},
        {**given, "positions": torch.arange(7)[None]},
        {**given, "mask": MASK},
        {**given, "mask": MASK[None, None]},
        {**given, "features": [ROWS[:2]]},
        {**given, "features": [None]},
    ):
        assert decoder_extras(wrong, 7) is None


def test_pieces_of_it_are_all_of_it() -> None:
    """Cut anywhere, beside pieces of others and tokens that come later: the same mask, the same features in
    the same order.
    """
    whole = DecoderExtras("mask", MASK, {"features": (ROWS, ROWS + 10)})
    for cut in range(1, 7):
        parts = [whole.part(0, cut), None, whole.part(cut, 9 - cut)]
        found = joined_extras(parts, [cut, 2, 9 - cut])
        assert torch.equal(
            found["mask"],
            torch.cat([MASK[:cut], torch.zeros(2, dtype=torch.bool), MASK[cut:], MASK.new_zeros(2)])[None],
        )
        assert all(
            torch.equal(one, other) for one, other in zip(found["features"], (ROWS, ROWS + 10), strict=True)
        )
    assert joined_extras([None, whole.part(3, 2), whole.part(7, 1)], [1, 2, 1]) == {}


def test_names() -> None:
    """A token in whose place something is put is named by all that is shown and by which token it is; others
    by their id.
    """
    names = media().names
    assert names[0::3] == (5, 6)
    assert names[1] == names[2] == names[4] != names[0]
    assert -(2**63) <= names[1] < UNKNOWN
    assert media().names == names
    assert media(content=2.0).names[1] != names[1]
    assert (
        Media({"pixel_values": torch.full((3, 2), 1.0), "sizes": [(4, 4)]}, (9,), (9,), KEY).names
        != names[1:2]
    )
    assert (
        Media({"pixel_values": torch.full((2, 3), 1.0), "sizes": [(4, 4)]}, (9,), (9,), b"other").names
        != names[1:2]
    )
    assert (
        Media({"pixel_values": torch.full((2, 3), 1.0), "sizes": [(4, 5)]}, (9,), (9,), KEY).names
        != names[1:2]
    )
    assert all(name < UNKNOWN for name in media(marks=(1,)).names), "nobody knows where anything is put"
    assert media(marks=(1,)).place == slice(0, 6)
    assert media().plain == [5, 5, 5, 6, 5, 7]


def test_where_tokens_stand() -> None:
    """In the prompt as its positions say, behind it moved, before its pictures as ever."""
    ids = (5, 9, 9, 6, 9, 7, 8)
    shown, text = media(ids), torch.arange(7).expand(3, 1, 7)
    here = torch.tensor([[0, 1, 1, 2, 3, 4, 5], [0, 1, 2, 2, 3, 4, 5], [0, 1, 1, 2, 3, 4, 5]])
    shown.positions, shown.rope_deltas = moved(shown, here[:, None], text)
    assert shown.rope_deltas == (-1, -1, -1)
    assert shown.where(0, 1) is None
    found = [shown.where(1, 3), shown.where(4, 4), shown.where(8, 1)]
    expected = [here[:, 1:4], torch.tensor([3, 4, 5, 6]).expand(3, -1), torch.tensor([7]).expand(3, -1)]
    assert all(
        one is not None and torch.equal(one, other) for one, other in zip(found, expected, strict=True)
    )
    for wrong in (
        here + (torch.arange(7) == 0),
        here * (torch.arange(7) != 5),
        text[:, 0],
    ):  # before, behind, nowhere
        assert moved(media(ids), wrong[:, None], text) == (None, ())
    assert moved(media(ids), here, text[:, 0]) == (None, ())
    assert moved(media(ids), here[:, None], text + 1) == (None, ())


def test_marks() -> None:
    class Config:
        def to_dict(self) -> dict[str, object]:
            return {
                "image_token_id": 90, "video_token_index": 91, "vision_start_token_id": 92, "visual_indicator_token_ids": [93, 94],
                "image_size": 32, "mm_tokens_per_image": 4, "eos_token_id": 2, "audio_token": "<audio>", "image_token": 95,
            }  # fmt: skip

    assert marks_of(Config()) == {90, 91, 92, 93, 94, 95}


def test_what_is_taken_and_what_is_left() -> None:
    """Inputs that a forward has no name for, and those given without media, are left to be refused."""

    class Model:
        class config:
            is_encoder_decoder = False

        class generation_config:
            temperature = 1.0

        def forward(
            self, input_ids=None, pixel_values=None, image_sizes=None, temperature=None, labels=None, **others
        ): ...  # type: ignore[no-untyped-def]

        def prepare_inputs_for_generation(self, input_ids, second_per_grid=None): ...  # type: ignore[no-untyped-def]

    keywords = {
        "pixel_values": MASK,
        "image_sizes": None,
        "second_per_grid": 2,
        "temperature": 0.5,
        "labels": 1,
        "image_grid": 3,
    }
    assert media_arguments(Model(), keywords) == {"pixel_values": MASK, "second_per_grid": 2}
    assert keywords == {"temperature": 0.5, "labels": 1, "image_grid": 3}
    assert media_arguments(Model(), {"image_sizes": MASK, "pixel_values": None}) == {}
    with pytest.raises(ValueError, match=r"Model takes no \['input_features'\]"):
        media_arguments(Model(), {"input_features": MASK})
