"""Prompts with pictures and recordings: the tokens of generate() on that prompt alone, shared by content
(C18, C23, C24, C29, C30, C34).
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as tf
from cases import once_each
from engine_answers import PROMPTS, alone, answers
from engine_answers import alone_with_media as right
from engine_answers import small_engine as small
from engine_steps import job_of, watch_plans
from engine_ways import GREEDY, WAYS
from families import BY_NAME
from families import build as family
from pictures import with_pictures, with_recordings
from rank_models import SHOWN
from releases import FLAT_STATES
from tape import record
from tiny import build, config_class

from hf_paged.engine import Engine
from hf_paged.engine.worker.runner import Runner
from hf_paged.model.rehearsal import RECORDERS

FORMS = {
    "llava": "flat",
    "llava_next": "flat",
    "idefics3": "flat",
    "mistral3": "flat",
    "internvl": "flat",
    "llama4": "rows",
    "qwen2_vl": "flat",
    "qwen3_5": "flat",
    "qwen3_5_moe": "flat",
}
BEFORE, AFTER = [5, 6, 7, 8, 9], [20, 21, 22]
PLACES = 16
"""So many tokens stand for a picture of the small Llava."""


@functools.cache
def kept(name: str) -> Any:
    return build("image", config_class("image", name))


@pytest.fixture
def model() -> Any:
    return kept("llava")


def picture(*seeds: int) -> torch.Tensor:
    """Pixels [pictures, 3, 32, 32]."""
    return torch.stack(
        [torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(seed)) * 2 - 1 for seed in seeds]
    )


def asks(*seeds: int, before: list[int] = BEFORE, after: list[int] = AFTER) -> dict[str, torch.Tensor]:
    """A prompt around pictures, as a processor answers."""
    mark = kept("llava").config.image_token_id
    ids = torch.tensor([[*before, *([mark] * PLACES + [11]) * len(seeds), *after]])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": picture(*seeds)}


LOOKED: list[int] = []


def looks(monkeypatch: pytest.MonkeyPatch, model: Any) -> list[int]:
    """How many pictures the model has looked at, each time that it has."""
    tower = model.model.vision_tower
    LOOKED.clear()
    # Not a closure: what that has would count as the model's state.
    monkeypatch.setattr(tower, "forward", functools.partial(_looked, tower.forward))
    return LOOKED


def _looked(forward: Any, pixels: torch.Tensor, **keywords: Any) -> Any:
    LOOKED.append(len(pixels))
    return forward(pixels, **keywords)


def one_each(name: str) -> list[dict[str, torch.Tensor]]:
    """Two prompts of equal ids, each around a picture (or a recording) of its own."""
    if name == "qwen3_asr":
        shown = with_recordings(build("audio", config_class("audio", name)), rows=1)
    else:
        shown = with_pictures(kept(name), rows=1)
    assert shown is not None
    return [
        shown,
        {key: value * 0.5 + 0.1 if value.is_floating_point() else value for key, value in shown.items()},
    ]


def marked(name: str) -> Any:
    """A family as a parameter."""
    return pytest.param(name, marks=FLAT_STATES if name.startswith("qwen3_5") else ())


@pytest.mark.parametrize("name", [*map(marked, FORMS), "qwen3_asr"])
def test_families(name: str) -> None:
    """In chunks, recomputed, beside texts in the same steps; row by row where the model cannot do
    otherwise.
    """
    if name == "llama4" and name not in SHOWN:
        pytest.skip(f"Llama 4's own forward fails in transformers {tf.__version__}, whatever it gets")
    model = build("audio", config_class("audio", name)) if name == "qwen3_asr" else kept(name)
    given = one_each(name)
    expected = (
        [right(model, each, **GREEDY) for each in given],
        [alone(model, prompt, **GREEDY) for prompt in PROMPTS[:2]],
    )
    with small(model) as engine:
        handles = [engine.submit(**each, **GREEDY) for each in given]
        others = [engine.submit(prompt, **GREEDY) for prompt in PROMPTS[:2]]
        for _ in range(4):
            engine.step()
        engine.pause()
        engine.resume()
        found = (
            [answers(handle.result()) for handle in handles],
            [answers(handle.result()) for handle in others],
        )
        assert found == expected
        assert handles[0].result().preemptions == 1
        assert engine.stats()["form"] == FORMS.get(name, "flat")
        engine.check()


@FLAT_STATES
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_states_behind_a_picture(name: str) -> None:
    """C18: a snapshot behind a picture is found with that picture, and with no other one."""
    model = kept(name)
    one, other = one_each(name)
    asked = one, one, other
    expected = [right(model, each, **GREEDY) for each in asked]
    with small(model, state_every=4) as engine:
        outputs = [engine.submit(**each, **GREEDY).result() for each in asked]
        assert [answers(output) for output in outputs] == expected
        found = [output.cached_tokens for output in outputs]
        assert found[0] == 0
        assert found[1] > found[2]
        assert engine.stats()["states"]["hits"] > 0
        engine.check()
    paged = model.generate(**one, **GREEDY, cache_implementation="paged")
    assert torch.equal(paged, model.generate(**one, **GREEDY))


@pytest.mark.parametrize("way", WAYS)
def test_every_way(model: Any, way: str) -> None:
    """Processors see the ids as they were given."""
    inputs = asks(1)
    with small(model) as engine:
        output = engine.submit(**inputs, **WAYS[way]).result()
        assert answers(output) == right(model, inputs, **WAYS[way])
        assert output.prompt_token_ids == inputs["input_ids"][0].tolist()
        handle = engine.submit(**inputs, **WAYS[way])
        for _ in range(5):
            engine.step()
        engine.pause()
        engine.resume()
        assert answers(handle.result()) == answers(output)


@pytest.mark.parametrize("way", WAYS)
def test_several_pictures(model: Any, way: str) -> None:
    """Under beams stock's Llava repeats pictures one by one, so that its rows see others' pictures: there its
    own embeddings say what is right."""
    inputs = asks(1, 2, 3)
    expected = inputs
    if WAYS[way].get("num_beams", 1) > 1:
        expected = {"input_ids": inputs["input_ids"], "inputs_embeds": merged(model, inputs)}
    with small(model) as engine:
        assert answers(engine.submit(**inputs, **WAYS[way]).result()) == right(model, expected, **WAYS[way])


def merged(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The embeddings [1, tokens, hidden] that the decoder is given for a prompt with pictures."""
    found: list[torch.Tensor] = []
    hook = model.get_decoder().register_forward_pre_hook(
        lambda _, __, given: found.append(given["inputs_embeds"]), with_kwargs=True
    )
    with hook:
        model.generate(**inputs, max_new_tokens=1)
    return found[0]


def test_draws(model: Any) -> None:
    """C35: samples draw the same in a crowd, after a preemption, and alone."""
    options = {
        "do_sample": True,
        "num_return_sequences": 3,
        "temperature": 1.4,
        "seed": 5,
        "max_new_tokens": 9,
    }
    with small(model, num_blocks=200) as roomy:
        expected = answers(roomy.submit(**asks(1), **options).result())
    assert len({tuple(row) for row in expected}) > 1
    with small(model) as engine:
        crowd = [engine.submit(prompt, **GREEDY) for prompt in PROMPTS[:4]]
        handle = engine.submit(**asks(1), **options)
        for _ in range(8):
            engine.step()
        engine.pause()
        engine.resume()
        assert answers(handle.result()) == expected
        assert [answers(each.result()) for each in crowd] == [
            alone(model, prompt, **GREEDY) for prompt in PROMPTS[:4]
        ]


def test_prefixes_are_shared_by_content(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """C18, C24: the same picture is looked at and computed once, another behind the same ids never taken for
    it; text before it is text.
    """
    seen = looks(monkeypatch, model)
    with small(model, num_blocks=100, check_hits=True) as engine:
        for inputs, cached, looked in (
            (
                asks(1),
                0,
                2,
            ),  # once for its embeddings, and once for generate(), to which the first of its kind is held
            (asks(1), 24, 0),
            (asks(2), 4, 1),
            (asks(1), 24, 0),
            (asks(1, 2), 4, 1),
            (asks(1, 2), 40, 0),
            (asks(2, 1), 4, 1),
            (asks(1, after=[30]), 22, 1),
            (asks(1, before=[*BEFORE, 10]), 4, 1),
        ):
            seen.clear()
            output = engine.submit(**inputs, **GREEDY).result()
            assert (output.cached_tokens, len(seen)) == (cached, looked)
            assert answers(output) == right(model, inputs, **GREEDY)
        text = [*BEFORE, 40, 41]
        assert engine.submit(text, **GREEDY).result().cached_tokens == 4
        assert engine.submit(asks(1)["input_ids"], **GREEDY).result().cached_tokens == 4
        assert engine.submit(**asks(1), salt="mine", **GREEDY).result().cached_tokens == 0
        seen.clear()
        twins = [engine.submit(**asks(7), **GREEDY) for _ in range(3)]
        assert [handle.result().cached_tokens for handle in twins] == [4, 24, 24]
        assert seen == [1]


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_few_blocks(model: Any, preemption: str) -> None:
    """C29, C30: whoever has to go comes back with the picture it came with."""
    options = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False}
    given = [asks(1), asks(2), asks(1, 3)]
    with small(model, num_blocks=24, preemption=preemption, prefix_caching=preemption == "swap") as engine:
        handles = [engine.submit(**inputs, **options) for inputs in given]
        others = [engine.submit(prompt, **options) for prompt in PROMPTS[:2]]
        found = [answers(handle.result()) for handle in [*handles, *others]]
        stats = engine.stats()
        assert stats["preemptions"] > 0
        assert (stats["swapped_in"] > 0) == (preemption == "swap")
        engine.check()
    expected = [right(model, inputs, **options) for inputs in given]
    assert found == [*expected, *(alone(model, prompt, **options) for prompt in PROMPTS[:2])]


def test_steps_that_run_ahead(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of pictures beside tokens that the host has not heard of; steps of ids only are captured
    ones.
    """
    monkeypatch.setitem(RECORDERS, "cpu", record)
    given = [asks(1), asks(2, 1), asks(1, before=[])]
    with small(model, run_ahead=True, num_blocks=90) as engine:
        handles = []
        for inputs, prompt in zip(given, PROMPTS, strict=False):
            handles += [engine.submit(**inputs, **GREEDY), engine.submit(prompt, **GREEDY)]
            for _ in range(6):
                engine.step()
        found = [answers(handle.result()) for handle in handles]
        assert engine.stats()["graphs"]["replayed"] > 3
    expected = (
        [right(model, each, **GREEDY) for each in given],
        [alone(model, prompt, **GREEDY) for prompt in PROMPTS[:3]],
    )
    assert (found[::2], found[1::2]) == expected


def test_a_thread(model: Any) -> None:
    with small(model) as engine:
        engine.start()
        handles = [engine.submit(**asks(seed), **GREEDY) for seed in (1, 2)]
        assert [answers(handle.result(120)) for handle in handles] == [
            right(model, asks(seed), **GREEDY) for seed in (1, 2)
        ]


def test_how_long_what_was_made_is_kept(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the pictures' part of the prompt is computed, and not longer; the pictures themselves as long as
    the request runs.
    """
    seen = looks(monkeypatch, model)
    inputs = asks(1)
    expected = right(model, inputs, **GREEDY)
    with small(model, prefix_caching=False) as engine:
        assert answers(engine.submit(**inputs, **GREEDY).result()) == expected
        seen.clear()
        handle = engine.submit(**inputs, **GREEDY)
        media = job_of(handle).params.media
        assert media is not None
        assert seen == []
        inputs["pixel_values"].zero_()  # its owner's own business
        engine.step()
        assert media.made is not None
        assert seen == [1]
        engine.pause()  # in the middle
        assert media.made is None
        engine.resume()
        for _ in range(3):
            engine.step()
        assert media.made is None
        assert seen == [1, 1]
        assert media.inputs
        engine.pause()
        engine.resume()
        assert answers(handle.result()) == expected
        assert seen == [1, 1, 1]
        assert not media.inputs
        cancelled = engine.submit(**inputs, **GREEDY)
        engine.step()
        cancelled.cancel()
        media = job_of(cancelled).params.media
        assert media is not None
        assert media.made is None
        assert not media.inputs


def test_other_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """C24: an eye that was changed while the engine was paused sees something else, and so does who looks
    later.
    """
    model = build("image", config_class("image", "llava"))
    with small(model) as engine:
        handle = engine.submit(**asks(1), **GREEDY)
        for _ in range(2):
            engine.step()
        before = right(model, asks(1), **GREEDY)
        engine.pause()
        with torch.no_grad():
            model.model.multi_modal_projector.linear_2.weight.mul_(-1.5)
        engine.resume()
        after = right(model, asks(1), **GREEDY)
        assert after != before
        assert answers(handle.result()) == after
        with torch.no_grad():
            model.model.multi_modal_projector.linear_2.weight.mul_(-1.0)
        output = engine.submit(**asks(1), **GREEDY).result()
        assert output.cached_tokens == 0
        assert answers(output) == right(model, asks(1), **GREEDY)


def test_a_failure_is_the_requests_own(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """C34: a picture of another size, a prompt with too few places for it, an eye that raises."""
    tower = model.model.vision_tower
    forward = tower.forward

    def choke(pixels: torch.Tensor, **keywords: Any) -> Any:
        if (pixels == 5).any():
            raise ValueError("indigestible")
        return forward(pixels, **keywords)

    with small(model) as engine:
        monkeypatch.setattr(tower, "forward", choke)
        good = [engine.submit(prompt, **GREEDY) for prompt in PROMPTS[:2]]
        bad = [
            engine.submit(**{**asks(1), "pixel_values": torch.full((1, 3, 32, 32), 5.0)}, **GREEDY),
            engine.submit(**{**asks(1), "pixel_values": picture(1)[..., :24]}, num_beams=2, **GREEDY),
            engine.submit(**{**asks(1), "pixel_values": picture(1, 2)}, **GREEDY),
        ]
        good += [engine.submit(**asks(1), **GREEDY)]
        for handle, error in zip(bad, ("indigestible", "size", "do not match"), strict=True):
            output = handle.result()
            assert output.finish_reason == "error"
            assert error in str(output.error)
        expected = [
            *(alone(model, prompt, **GREEDY) for prompt in PROMPTS[:2]),
            right(model, asks(1), **GREEDY),
        ]
        assert [answers(handle.result()) for handle in good] == expected
        engine.check()


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl"])
def test_captured_steps_get_the_positions_of_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs from before the first picture go; later ones take both kinds of sequences, in any place of a
    step, and chunks of both. Rows behind a picture that one number moves are in the table with others.
    """
    monkeypatch.setitem(RECORDERS, "cpu", record)
    model, options = kept(name), {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False}
    given = [stands(name, 1), stands(name, 2, 3), stands(name, 4, after=[7 + i for i in range(30)])]
    expected = (
        [right(model, each, **options) for each in given],
        [alone(model, prompt, **options) for prompt in PROMPTS[:3]],
    )
    with small(model, num_blocks=90) as engine:

        def replayed() -> int:
            return int(engine.stats()["graphs"].get("replayed", 0))

        assert answers(engine.submit(PROMPTS[0], **options).result()) == expected[1][0]
        assert replayed() > 3
        assert answers(engine.submit(**given[0], **options).result()) == expected[0][0]
        before = replayed()
        assert answers(engine.submit(**given[0], **options).result()) == expected[0][0]
        assert replayed() - before > 12, "a sequence by itself whose tokens stand elsewhere"
        before = replayed()
        decodes: list[int] = []
        watch_plans(engine, lambda plan: decodes.append(plan.batch.decodes))
        handles = [
            each
            for i in range(3)
            for each in (engine.submit(PROMPTS[i], **options), engine.submit(**given[i], **options))
        ]
        found = [answers(handle.result()) for handle in handles]
        assert (found[1::2], found[::2]) == expected
        assert replayed() - before > 12
        assert max(decodes) == len(handles)
        engine.check()


def test_a_model_that_does_more_with_pictures() -> None:
    """Found where the decoder is called, and told by name; texts beside it are served, and so are pictures
    that it takes as they come.
    """
    model = kept("gemma3")
    shown, other = one_each("gemma3")
    plain = {name: value for name, value in shown.items() if name != "token_type_ids"}
    expected = [alone(model, prompt, **GREEDY) for prompt in PROMPTS[:2]], right(model, plain, **GREEDY)
    with small(model) as engine:
        texts = [engine.submit(prompt, **GREEDY) for prompt in PROMPTS[:2]]
        engine.step()
        output = engine.submit(**shown, **GREEDY).result()
        assert output.finish_reason == "error"
        assert "gives its decoder other ['attention_mask']" in str(output.error)
        assert "use generate()" in str(output.error)
        with pytest.raises(ValueError, match="attention_mask"):
            engine.submit(**other, **GREEDY)
        assert [answers(handle.result()) for handle in texts] == expected[0]
        assert answers(engine.submit(**plain, **GREEDY).result()) == expected[1]
        engine.check()


def stands(
    name: str, *seeds: int, before: list[int] = BEFORE, after: list[int] = AFTER
) -> dict[str, torch.Tensor]:
    """A prompt around pictures for Qwen-VL: tokens stand on three axes, those behind a picture closer than
    their number. Qwen3-VL's first layers are given something for a picture's tokens, too."""
    config = kept(name).config
    begin, mark = config.vision_start_token_id, config.image_token_id
    ids = torch.tensor([[*before, *[begin, *[mark] * 8, 11] * len(seeds), *after]])
    patches = [
        torch.rand(32, 3 * 2 * 8 * 8, generator=torch.Generator().manual_seed(seed)) * 2 - 1 for seed in seeds
    ]
    said = {
        "image_grid_thw": torch.tensor([[1, 8, 4]] * len(seeds)),
        "mm_token_type_ids": (ids == mark).long(),
    }
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.cat(patches),
        **said,
    }


@pytest.mark.parametrize(
    ("name", "way"), [*once_each(["qwen2_vl", "qwen3_vl"], [*WAYS]), ("qwen3_vl", "greedy")]
)
def test_tokens_that_stand_elsewhere(name: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On several axes, in chunks, behind hits that leave nothing to look at, recomputed and beside others
    whose tokens stand as ever.
    """
    model, inputs, seen = kept(name), stands(name, 1, 2), []
    expected = [
        right(model, stands(name, 1, 2, after=after), **WAYS[way]) for after in (AFTER, AFTER, [33, 34], [])
    ]
    texts = [alone(model, prompt, **GREEDY) for prompt in PROMPTS[:2]]
    with small(model, num_blocks=120, max_batch_tokens=17, max_batch_sequences=16) as engine:
        show = Runner.encode_media

        def watched(runner: Runner, media: Any, *adapters: Any) -> None:
            seen.append(media)
            show(runner, media, *adapters)

        monkeypatch.setattr(Runner, "encode_media", watched)
        others = [engine.submit(prompt, **GREEDY) for prompt in PROMPTS[:2]]
        handles = [engine.submit(**inputs, **WAYS[way])]
        for _ in range(3):
            engine.step()
        handles += [
            engine.submit(**stands(name, 1, 2, after=after), **WAYS[way]) for after in (AFTER, [33, 34], [])
        ]
        for _ in range(7):
            engine.step()
        engine.pause()
        engine.resume()
        assert [answers(handle.result()) for handle in handles] == expected
        assert [answers(each.result()) for each in others] == texts
        assert len(seen) > 2
        seen.clear()
        again = engine.submit(**inputs, **WAYS[way]).result()
        assert again.cached_tokens == 27
        assert not seen
        assert answers(again) == expected[0]
        engine.check()


@pytest.mark.parametrize(("name", "preemption"), [("qwen2_vl", "swap"), ("qwen3_vl", "recompute")])
def test_few_blocks_for_tokens_that_stand_elsewhere(
    name: str, preemption: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C29, C30: and they stand there when they come back, in captured steps and others."""
    monkeypatch.setitem(RECORDERS, "cpu", record)
    model, options = kept(name), {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False}
    expected = [right(model, stands(name, seed), **options) for seed in (1, 2, 3)]
    texts = [alone(model, prompt, **options) for prompt in PROMPTS[:2]]
    with small(model, num_blocks=20, preemption=preemption, run_ahead=True) as engine:
        handles = [engine.submit(**stands(name, seed), **options) for seed in (1, 2, 3)]
        others = [engine.submit(prompt, **options) for prompt in PROMPTS[:2]]
        assert [answers(handle.result()) for handle in handles] == expected
        assert [answers(handle.result()) for handle in others] == texts
        assert engine.stats()["preemptions"] > 0
        assert (engine.stats()["swapped_in"] > 0) == (preemption == "swap")
        alike = [engine.submit(prompt, **options) for prompt in PROMPTS[:2]]
        assert [answers(handle.result()) for handle in alike] == texts
        assert engine.stats()["graphs"]["replayed"] > 3
        engine.check()


def test_what_only_the_answer_shows(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that looks at pictures, too: nothing of it is to be seen where the decoder is called, and the
    first logits tell.
    """
    forward = model.forward

    @functools.wraps(forward)
    def bent(*given: Any, pixel_values: Any = None, **keywords: Any) -> Any:
        answer = forward(*given, pixel_values=pixel_values, **keywords)
        if pixel_values is not None or keywords.get("mm_encoder_outputs") is not None:
            answer.logits = answer.logits.flip(-1)
        return answer

    with small(model) as engine:
        monkeypatch.setattr(model, "forward", bent)
        assert "than for the embeddings" in str(engine.submit(**asks(1), **GREEDY).result().error)
        with pytest.raises(ValueError, match="than for the embeddings"):
            engine.submit(**asks(2), **GREEDY)


def test_a_prompt_that_is_as_long_as_the_model_is_made_for(model: Any) -> None:
    """Nothing stands where the model has no place, not even what is only tried."""
    inputs = asks(1, after=[5 + i % 60 for i in range(233)])
    assert inputs["input_ids"].shape[1] == 255
    expected = right(model, inputs, max_new_tokens=1)
    furthest: list[int] = []
    note = model.get_decoder().register_forward_pre_hook(
        lambda _, __, given: furthest.append(int(given["position_ids"].max())), with_kwargs=True
    )
    with note, small(model, num_blocks=90) as engine:
        furthest.clear()
        assert answers(engine.submit(**inputs, max_new_tokens=1).result()) == expected
        assert max(furthest) == 255 - 1


def test_what_a_picture_leaves_behind(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attributes that a forward with a picture sets on its modules are taken back: others' steps would see them."""
    language = model.model
    forward = language.get_image_features

    @functools.wraps(forward)
    def noting(*given: Any, **keywords: Any) -> Any:
        language.note = language.another = "seen"
        language.multi_modal_projector.looked = True
        return forward(*given, **keywords)

    expected = right(model, asks(1), **GREEDY), alone(model, PROMPTS[0], max_new_tokens=30, do_sample=False)
    try:
        language.note = "none"
        with small(model) as engine:
            monkeypatch.setattr(language, "get_image_features", noting)
            text = engine.submit(PROMPTS[0], max_new_tokens=30, do_sample=False)
            engine.step()
            assert answers(engine.submit(**asks(1), **GREEDY).result()) == expected[0]
            assert not text.done
            assert language.note == "none"
            assert not hasattr(language, "another")
            assert not hasattr(language.multi_modal_projector, "looked")
            assert answers(text.result()) == expected[1]
    finally:
        vars(language).pop("note", None)


def test_what_cannot_be_is_refused(model: Any) -> None:
    mark = model.config.image_token_id
    with small(model) as engine:
        embeds = torch.zeros(3, 32)
        for arguments, error in (
            ({"pixel_values": picture(1)}, "needs a prompt"),
            ({"inputs_embeds": embeds, "pixel_values": picture(1)}, "of embeddings"),
            ({**asks(1), "prompt": [5, 6]}, "give one of them"),
            ({**asks(1), "attention_mask": torch.tensor([[0] + [1] * 24])}, "without padding"),
            ({**asks(1), "input_ids": torch.tensor([[5, mark], [6, mark]])}, "one sequence"),
            ({**asks(1), "pixel_values": [object()]}, "pixel_values is or holds a object, expected tensors"),
            ({**asks(1), "pixel_values_videos": picture(1)}, r"takes no \['pixel_values_videos'\]"),
            ({**asks(1), "image_grid_thw": torch.ones(1, 3)}, r"does not take \['image_grid_thw'\]"),
            ({"prompt": [5, 6], "image_sizes": torch.ones(1, 2)}, r"does not take \['image_sizes'\]"),
            ({"prompt": "a bear", "images": [picture(1)]}, r"Engine\(model, processor\)"),
            ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, r"Engine\(model, processor\)"),
        ):
            with pytest.raises((TypeError, ValueError), match=error):
                engine.submit(**arguments)
        assert engine.stats()["waiting"] == 0
        assert answers(engine.submit(**asks(1), **GREEDY).result()) == right(model, asks(1), **GREEDY)
    with (
        small(family(BY_NAME["t5"])) as engine,
        pytest.raises(ValueError, match=r"images or audio .* for T5"),
    ):
        engine.submit([5, 6], pixel_values=picture(1))


class Processor(tf.ProcessorMixin):  # type: ignore[misc]  # transformers has no types
    """A stand-in for a processor: texts with a place for every token of a picture, numbers for pixels.
    Pictures are seeds here.
    """

    def __init__(self) -> None:
        self.tokenizer = SimpleNamespace(decode=lambda ids, **_: " ".join(map(str, ids)))

    def __call__(
        self, images: Any = None, text: Any = None, return_tensors: str | None = None, **_: Any
    ) -> Any:
        mark = kept("llava").config.image_token_id
        assert return_tensors == "pt"
        ids = [
            token
            for word in text[0].split()
            for token in ([mark] * PLACES if word == "<image>" else [int(word)])
        ]
        shown = {"pixel_values": picture(*images).double()} if images else {}
        return tf.BatchFeature(
            {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids)), **shown}
        )

    def apply_chat_template(self, messages: Any, **options: Any) -> Any:
        assert options == {
            "add_generation_prompt": True,
            "tokenize": True,
            "return_dict": True,
            "return_tensors": "pt",
        }
        parts = [part for message in messages for part in message["content"]]
        words = ["<image>" if part["type"] == "image" else part["text"] for part in parts]
        images = [part["image"] for part in parts if part["type"] == "image"]
        return self(images or None, [" ".join([*words, "4"])], "pt")


def test_a_processor_for_a_tokenizer(model: Any) -> None:
    """Texts with pictures beside them, chat messages with pictures in them, texts alone: the processor reads
    them, its tokenizer writes.
    """
    mark = model.config.image_token_id
    chat = [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "5 6"},
                {"type": "image", "image": 3},
                {"type": "text", "text": "7"},
            ],
        }
    ]
    shown = {"input_ids": torch.tensor([[5, 6, *[mark] * PLACES, 7, 4]]), "pixel_values": picture(3)}
    with Engine(model, Processor(), block_size=4, num_blocks=60) as engine:
        outputs = engine.generate([chat], **GREEDY) + engine.generate(
            ["5 6 <image> 7 4"], images=[3], **GREEDY
        )
        assert [answers(output) for output in outputs] == [right(model, shown, **GREEDY)] * 2
        assert outputs[1].cached_tokens == 19
        assert outputs[0].sequences[0].text == " ".join(map(str, answers(outputs[0])[0]))
        text = engine.generate(
            ["5 6 7", [{"role": "user", "content": [{"type": "text", "text": "5 6"}]}]], **GREEDY
        )
        assert [answers(output) for output in text] == [
            alone(model, ids, **GREEDY) for ids in ([5, 6, 7], [5, 6, 4])
        ]
        for arguments, error in (
            ({"prompt": chat, "images": [3]}, "put those of chat messages into them"),
            ({"prompt": chat, "pixel_values": picture(3)}, r"so do \['pixel_values'\]"),
        ):
            with pytest.raises(ValueError, match=error):
                engine.submit(**arguments)
