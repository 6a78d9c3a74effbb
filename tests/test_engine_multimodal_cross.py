"""Pictures that a decoder attends to across (Mllama) in the engine: the tokens of stock generate() on that prompt
alone, one cross-attention table a request, and prefixes shared by the pictures' content (C7, C11, C18, C23, C24,
C29, C30, C34, C36).
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from cases import pairwise
from engine_answers import PROMPTS, alone, answers, checked_answers, small_engine
from engine_answers import alone_with_media as right
from engine_parts import preempt, running
from engine_ways import GREEDY
from engine_ways import WAYS as OF_EMBEDDINGS
from tape import record
from tiny import PROMPT_IDS, build, config_class, tiny

import hf_paged
from hf_paged import demo
from hf_paged.engine import Engine
from hf_paged.model.rehearsal import RECORDERS

TILES, PICTURE = 4, 68
"""Tiles of a picture, and the tokens that the tiny model makes of all of them."""
LONG = {"max_new_tokens": 24, "min_new_tokens": 24, "do_sample": False}
WAYS: dict[str, dict[str, Any]] = {
    **OF_EMBEDDINGS,
    "samples of one choice": {"max_new_tokens": 9, "num_return_sequences": 3, "do_sample": True, "top_k": 1},
}
Inputs = dict[str, torch.Tensor]


@functools.cache
def kept() -> Any:
    return build("image", config_class("image", "mllama"))


@pytest.fixture
def model() -> Any:
    return kept()


def text(tokens: int = 13, seed: int = 2) -> list[int]:
    chance = torch.Generator().manual_seed(seed)
    return torch.randint(PROMPT_IDS.start, PROMPT_IDS.stop, (tokens,), generator=chance).tolist()


def asks(*seeds: int, ids: list[int] | None = None, first: int = 2, each: int = 4) -> Inputs:
    """A prompt with pictures, as a processor answers: picture i is seen by the tokens from first + i * each on,
    the first one without its last tiles.
    """
    ids = text() if ids is None else ids
    mask = torch.zeros(1, len(ids), len(seeds), TILES, dtype=torch.long)
    for i in range(len(seeds)):
        mask[:, first + i * each :, i, : 2 if i == 0 else TILES] = 1
    pixels = [
        torch.rand(TILES, 3, 32, 32, generator=torch.Generator().manual_seed(seed)) * 2 - 1 for seed in seeds
    ]
    ones = torch.ones(1, len(seeds), dtype=torch.long)
    return {
        "input_ids": torch.tensor([ids]),
        "pixel_values": torch.stack(pixels)[None],
        "aspect_ratio_ids": ones,
        "aspect_ratio_mask": ones[..., None].repeat(1, 1, TILES),
        "cross_attention_mask": mask,
    }


small = functools.partial(small_engine, num_blocks=90, max_batch_sequences=8)


def held(engine: Engine) -> int:
    return int(engine.stats()["blocks"]["cross"]["held"])


# ---- the tokens


@pytest.mark.parametrize("way", WAYS)
def test_the_tokens_of_generate(model: Any, way: str) -> None:
    """One picture, two and three, in chunks, beside texts in the same steps, and computed again."""
    given = [asks(1), asks(1, 2), asks(3, 4, 5, ids=text(17, seed=5)), asks(6, ids=text(3, seed=6))]
    expected = [right(model, each, **WAYS[way]) for each in given]
    expected += [alone(model, prompt, **WAYS[way]) for prompt in PROMPTS[:3]]
    with small(model, num_blocks=160) as engine:
        assert engine.stats()["form"] == "flat"
        handles = [engine.submit(**each, **WAYS[way]) for each in given]
        handles += [engine.submit(prompt, **WAYS[way]) for prompt in PROMPTS[:3]]
        for _ in range(6):
            engine.step()
            engine.check()
        engine.pause()
        engine.resume()
        assert checked_answers(engine, handles) == expected
        assert engine.stats()["preemptions"] > 0


@pytest.mark.parametrize("tokens", [1, 3, 64])
def test_chunks(model: Any, tokens: int) -> None:
    """C32: wherever a prompt is cut, each chunk comes with its own rows of the mask."""
    given = [asks(1, 2, ids=text(29, seed=3), first=6, each=9), asks(3)]
    with small(model, max_batch_tokens=tokens, max_batch_sequences=1) as engine:
        handles = [engine.submit(**each, **GREEDY) for each in given]
        assert checked_answers(engine, handles) == [right(model, each, **GREEDY) for each in given]


def test_sampling(model: Any) -> None:
    """C35: a draw does not depend on neighbours or chunks, and the logits that it is made of are stock's."""
    options = {
        "max_new_tokens": 6,
        "do_sample": True,
        "temperature": 1.3,
        "num_return_sequences": 3,
        "seed": 7,
    }
    with small(model, max_batch_tokens=64) as engine:
        single = engine.submit(**asks(1, 2), **options, logprobs=True).result()
    with small(model) as engine:
        handles = [engine.submit(**asks(1, 2), **options), engine.submit(PROMPTS[1], **LONG)]
        assert checked_answers(engine, handles)[0] == answers(single)
    assert len({tuple(each.token_ids) for each in single.sequences}) > 1
    for each in single.sequences:
        inputs = asks(1, 2)
        whole = {**inputs, "input_ids": torch.cat([inputs["input_ids"], torch.tensor([each.token_ids])], 1)}
        mask = inputs["cross_attention_mask"]
        whole["cross_attention_mask"] = torch.cat([mask, mask[:, -1:].expand(-1, 6, -1, -1)], 1)
        with torch.no_grad():
            scores = model(**whole).logits[0, 12:-1].log_softmax(-1)
        expected = scores.gather(1, torch.tensor(each.token_ids)[:, None])[:, 0]
        assert each.logprobs is not None
        assert torch.allclose(torch.tensor([note.logprob for note in each.logprobs]), expected, atol=2e-4)


def test_run_ahead(model: Any) -> None:
    """A step is launched before the host knows the last one's tokens; only one of them attends across."""
    given = [asks(1), asks(2, 3)]
    expected = [right(model, each, **GREEDY) for each in given]
    with small(model, run_ahead=True) as engine:
        handles = [engine.submit(**each, **GREEDY) for each in given]
        handles += [engine.submit(prompt, **GREEDY) for prompt in PROMPTS]
        found = [answers(handle.result()) for handle in handles]
        assert found == expected + [alone(model, prompt, **GREEDY) for prompt in PROMPTS]
        engine.check()


# ---- tables


@pytest.mark.parametrize("way", ["greedy", "beams", "samples of one choice"])
def test_one_table_a_request(model: Any, way: str) -> None:
    """C36: as long as the pictures, shared by beams and samples, there with the first step, gone with the end;
    a text has none.
    """
    with small(model) as engine:
        other = engine.submit(PROMPTS[1], **LONG)
        engine.step()
        assert held(engine) == 0
        handle = engine.submit(**asks(1, 2), **WAYS[way])
        while not handle.done:
            engine.step()
            engine.check()
            assert held(engine) == (0 if handle.done else 2 * PICTURE // 4)
        other.result()


@pytest.mark.parametrize(
    ("preemption", "admission", "way"),
    pairwise(["swap", "recompute"], ["watermark", "future"], ["greedy", "beams"]),
)
def test_preemption(model: Any, preemption: str, admission: str, way: str) -> None:
    """C29, C30: a group that must go takes its cross-attention table along, or makes it again."""
    options = {**WAYS[way], "max_new_tokens": 24, "min_new_tokens": 24}
    given = [asks(1), asks(2, ids=text(13, seed=8))]
    expected = [alone(model, prompt, **LONG) for prompt in PROMPTS[:3]]
    expected += [right(model, each, **options) for each in given]
    with small(
        model,
        num_blocks=38,
        preemption=preemption,
        admission=admission,
        max_batch_tokens=16,
        max_batch_sequences=9,
    ) as engine:
        handles = [engine.submit(prompt, **LONG) for prompt in PROMPTS[:3]]
        handles += [engine.submit(**each, **options) for each in given]
        for _ in range(7):
            engine.step()
        for group in running(engine)[-1:]:  # under "future" nobody else would have to go
            preempt(engine, group)
        assert checked_answers(engine, handles) == expected
        stats = engine.stats()
        assert stats["preemptions"] > 0
        assert (stats["swapped_in"] > 0) == (preemption == "swap")


def test_room_for_pictures(model: Any) -> None:
    """C11, C12: pictures count; a request waits for their blocks, texts need none of them, and what can never
    fit is refused with both numbers.
    """
    with small(model, num_blocks=24) as engine:
        refused = engine.submit(**asks(1, 2), **GREEDY).result()
        assert refused.finish_reason == "refused"
        assert "cross attention to 136 tokens needs 34 blocks of 4 tokens and 24 can be had" in str(
            refused.error
        )
        handles = [engine.submit(**asks(seed), **GREEDY) for seed in (1, 2)]
        engine.step()
        assert [engine.stats()[state] for state in ("running", "waiting")] == [1, 1]
        assert checked_answers(engine, handles) == [right(model, asks(seed), **GREEDY) for seed in (1, 2)]
        handles = [engine.submit(**asks(1), **GREEDY), engine.submit(PROMPTS[0], **GREEDY)]
        engine.step()
        engine.step()
        assert engine.stats()["running"] == 2
        assert held(engine) == 17
        checked_answers(engine, handles)


def test_texts_wait_for_no_picture(model: Any) -> None:
    """A pool that is full of pictures keeps no text out."""
    with small(model, num_blocks=17, admission="future") as engine:
        handles = [engine.submit(**asks(1, ids=text(3)), **GREEDY), engine.submit(PROMPTS[0], **GREEDY)]
        engine.step()
        engine.step()
        assert held(engine) == 17
        assert engine.stats()["running"] == 2
        checked_answers(engine, handles)


# ---- prefixes


def test_prefixes(model: Any) -> None:
    """C18, C24: equal texts with equal pictures share their blocks, with other pictures, none, or another mask
    they do not.
    """
    ids = text(21)
    longer = [*ids, *text(6, seed=9)]
    other_mask = asks(1, 2, ids=ids, each=9)
    other_tiles = asks(1, 2, ids=ids)
    other_tiles["aspect_ratio_mask"][0, 0, 3] = 0
    cases = [
        (asks(1, 2, ids=ids), 0),
        (asks(1, 2, ids=ids), 20),
        (asks(1, 2, ids=longer), 20),
        (asks(1, 3, ids=ids), 0),
        (asks(2, 1, ids=ids), 0),
        (asks(1, ids=ids), 0),
        (other_tiles, 0),
        (other_mask, 6),
        ({"input_ids": torch.tensor([ids])}, 0),
        ({"input_ids": torch.tensor([ids])}, 20),
        (asks(1, 2, ids=ids), 20),
    ]
    with small(model, num_blocks=300, check_hits=True) as engine:
        for inputs, cached in cases:
            output = engine.submit(**inputs, **GREEDY).result()
            assert answers(output) == right(model, inputs, **GREEDY)
            assert output.cached_tokens == cached
            engine.check()
        assert engine.submit(**asks(1, 2, ids=ids), **GREEDY, salt="own").result().cached_tokens == 0


@pytest.mark.parametrize("size", [1, 4, 16])
def test_a_second_turn(model: Any, size: int) -> None:
    """An answer's tokens see what the prompt's last token sees, so the next turn finds them too."""
    with small(model, block_size=size, num_blocks=300) as engine:
        first = engine.submit(**asks(1), **GREEDY).result()
        ids = [*text(), *answers(first)[0], *text(5, seed=11)]
        second = engine.submit(**asks(1, ids=ids), **GREEDY).result()
        assert second.cached_tokens == 13 + 9 - 1
        assert answers(second) == right(model, asks(1, ids=ids), **GREEDY)
        engine.check()


def test_twins_wait_for_each_other(model: Any) -> None:
    """C18: equal prompts at once are computed once; each has a cross-attention table of its own."""
    given = [asks(1, ids=text(29)), asks(1, ids=text(29)), asks(2, ids=text(29))]
    with small(model) as engine:
        handles = [engine.submit(**each, **GREEDY) for each in given]
        assert checked_answers(engine, handles) == [right(model, each, **GREEDY) for each in given]
        assert [handle.result().cached_tokens for handle in handles] == [0, 28, 0]


def test_texts_are_served_as_ever(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside pictures texts share prefixes, decode together and replay captured steps."""
    monkeypatch.setitem(RECORDERS, "cpu", record)
    expected = [alone(model, prompt, **LONG) for prompt in PROMPTS[:3]]
    shown = asks(1, 2)
    with small(model) as engine:
        handles = [engine.submit(**shown, **LONG)] + [engine.submit(prompt, **LONG) for prompt in PROMPTS[:3]]
        assert checked_answers(engine, handles) == [right(model, shown, **LONG), *expected]
        assert engine.stats()["graphs"]["replayed"] > 5
        assert engine.submit(PROMPTS[1], **GREEDY).result().cached_tokens == 16


# ---- changes and trouble


def test_other_weights(model: Any) -> None:
    """C24: after pause() everything is made again, tables, states and masks, by the weights of then."""
    model = build("image", config_class("image", "mllama"))
    with small(model) as engine:
        done = engine.submit(**asks(1), **GREEDY).result()
        assert answers(done) == right(model, asks(1), **GREEDY)
        handle = engine.submit(**asks(1, 2), **LONG)
        for _ in range(3):
            engine.step()
        engine.pause()
        with torch.no_grad():
            for parameter in model.model.multi_modal_projector.parameters():
                parameter.normal_(0, 0.3)
        engine.resume()
        assert checked_answers(engine, [handle]) == [right(model, asks(1, 2), **LONG)]
        again = engine.submit(**asks(1), **GREEDY).result()
        assert again.cached_tokens == 0
        assert answers(again) == right(model, asks(1), **GREEDY)
        engine.check()


def test_a_picture_that_cannot_be_served(model: Any) -> None:
    """C34: it ends its own request with what was wrong; others, texts and pictures, get their tokens."""
    good = asks(1)
    small_pixels = {**asks(2), "pixel_values": asks(2)["pixel_values"][..., :16]}
    no_ratio = {name: value for name, value in asks(3).items() if name != "aspect_ratio_ids"}
    with small(model) as engine:
        handles = [engine.submit(PROMPTS[1], **GREEDY), engine.submit(**good, **GREEDY)]
        bad = [engine.submit(**each, **GREEDY) for each in (small_pixels, no_ratio)]
        for each in bad:
            assert each.result().finish_reason == "error"
        assert "aspect_ratio_ids" in str(bad[1].result().error)
        expected = [alone(model, PROMPTS[1], **GREEDY), right(model, good, **GREEDY)]
        assert checked_answers(engine, handles) == expected
        for change, error in (
            ({"cross_attention_mask": None}, "without cross_attention_mask"),
            ({"pixel_values": good["pixel_values"][0]}, r"expected \[1, images, tiles"),
            ({"pixel_values": good["pixel_values"].repeat(2, 1, 1, 1, 1, 1)}, "of one prompt"),
        ):
            with pytest.raises(ValueError, match=error):
                engine.submit(**{**good, **change}, **GREEDY)
        handle = engine.submit(**good, **LONG)
        engine.step()
        engine.step()
        handle.cancel()
        assert handle.result().finish_reason == "abort"
        assert held(engine) == 0
        engine.check()


def test_a_config_that_says_another_length(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The vision model's number of states is compared with the announced one, and the error has both."""
    with small(model) as engine:
        monkeypatch.setattr(model.config.vision_config, "patch_size", 16)
        output = engine.submit(**asks(1), **GREEDY).result()
        assert output.finish_reason == "error"
        assert "expected cross-attention states of 20 tokens" in str(output.error)
        with pytest.raises(ValueError, match="expected cross-attention states of 20 tokens"):
            engine.submit(**asks(2), **GREEDY)
        assert answers(engine.submit(PROMPTS[1], **GREEDY).result()) == alone(model, PROMPTS[1], **GREEDY)
        engine.check()


def test_layers_that_take_nothing_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoder whose layers forget what they attended to is served with texts; pictures are refused by name."""
    model = build("image", config_class("image", "mllama"))
    cross = model.model.language_model.layers[1].cross_attn
    forward = cross.forward

    def forgets(hidden_states: torch.Tensor, cross_attention_states: Any = None, **arguments: Any) -> Any:
        answer, weights = forward(hidden_states, cross_attention_states, **arguments)
        return (answer * 0 if cross_attention_states is None else answer), weights

    monkeypatch.setattr(cross, "forward", forgets)
    with small(model) as engine:
        assert "cross" not in engine.stats()["blocks"]
        with pytest.raises(ValueError, match="answers cross_attention_states differently in pieces"):
            engine.submit(**asks(1), **GREEDY)
        assert answers(engine.submit(PROMPTS[1], **GREEDY).result()) == alone(model, PROMPTS[1], **GREEDY)
        engine.check()


def test_a_decoder_that_is_shown_nothing() -> None:
    """The text model alone takes no pictures: no memory is kept for them."""
    model = build("causal", config_class("image", "mllama"))
    with small(model) as engine:
        assert "cross" not in engine.stats()["blocks"]
        assert answers(engine.submit(PROMPTS[1], **GREEDY).result()) == alone(model, PROMPTS[1], **GREEDY)


def test_a_trace(model: Any, tmp_path: Path) -> None:
    """A trace holds the tables of both kinds."""
    with small(model) as engine, engine.trace(tmp_path / "steps.jsonl"):
        engine.generate([PROMPTS[0]], **GREEDY)
        engine.submit(**asks(1), **GREEDY).result()
    trace = hf_paged.trace.read(tmp_path / "steps.jsonl")
    assert [kind.name for kind in trace.kinds] == ["full", "cross"]
    assert max(step.blocks[1].held for step in trace.steps) == PICTURE // 4


# ---- prompts


@pytest.fixture(scope="module")
def talker() -> tuple[Any, Any]:
    """A tiny model over the demo's words, and its processor."""
    pytest.importorskip("PIL", reason="the processor takes pictures of pillow's")
    tokenizer = demo.tokenizer()
    tokenizer.add_tokens(["<|image|>"], special_tokens=True)
    template = (
        "{% for message in messages %}{% for part in message['content'] %}{% if part['type'] == 'image' "
        "%}<|image|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
    )
    images = tf.MllamaImageProcessorPil(size={"height": 32, "width": 32}, max_image_tiles=TILES)
    processor = tf.MllamaProcessor(images, tokenizer, chat_template=template)
    config_type = config_class("image", "mllama")
    config = config_type(**tiny(config_type))
    config.text_config.vocab_size = len(tokenizer)
    config.vision_config.supported_aspect_ratios = [
        [wide, high] for wide in range(1, TILES + 1) for high in range(1, TILES // wide + 1)
    ]
    config.image_token_index = tokenizer.convert_tokens_to_ids("<|image|>")
    torch.manual_seed(0)
    model = tf.MllamaForConditionalGeneration(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2)
    end = tokenizer.eos_token_id
    model.generation_config = tf.GenerationConfig(pad_token_id=end, eos_token_id=end)
    return model, processor


def photo(seed: int, high: int = 40) -> Any:
    from PIL import Image

    chance = torch.Generator().manual_seed(seed)
    return Image.fromarray(torch.randint(0, 256, (high, 40, 3), generator=chance, dtype=torch.uint8).numpy())


def test_a_processor_and_chat_messages(talker: tuple[Any, Any]) -> None:
    """Texts beside pictures, and messages with several, each of its own number of tiles; what the processor makes
    can be handed over as for generate().
    """
    model, processor = talker
    prompt = "Once upon <|image|> a time <|image|> the fox"
    pictures = [photo(1), photo(2, high=90)]
    made = dict(processor(images=pictures, text=prompt, return_tensors="pt"))
    talk = [
        {"type": "image", "image": pictures[0]},
        {"type": "text", "text": "One day"},
        {"type": "image", "image": pictures[1]},
        {"type": "text", "text": " a little bear"},
    ]
    chat = [{"role": "user", "content": talk}]
    of_chat = processor.apply_chat_template(
        chat, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    plain = processor(text="The owl")["input_ids"][0]
    expected = [right(model, made, **GREEDY)] * 2
    expected += [right(model, dict(of_chat), **GREEDY), alone(model, plain, **GREEDY)]
    with Engine(
        model, processor, block_size=4, num_blocks=200, max_batch_tokens=16, max_batch_sequences=8
    ) as e:
        handles = [e.submit(prompt, images=pictures, **GREEDY), e.submit(**made, **GREEDY)]
        handles += [e.submit(chat, **GREEDY), e.submit("The owl", **GREEDY)]
        assert checked_answers(e, handles) == expected
        assert handles[0].result().sequences[0].text == processor.tokenizer.decode(
            expected[0][0], skip_special_tokens=True
        )
        assert handles[1].result().cached_tokens > 4
