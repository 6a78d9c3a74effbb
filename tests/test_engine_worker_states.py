"""Sequences with recurrent states in an engine: what each answers alone, under pressure, captured, forked (C7)."""

from __future__ import annotations

import random
from contextlib import nullcontext
from typing import Any

import peft
import pytest
import torch
from captures import counts, policy
from cases import pairwise
from computed_once import computed_once
from engine_parts import layer_groups
from poison import poison_free_slots
from releases import FLAT_STATES, NEEDS_SLOTS
from tape import record
from tiny import build, config_class
from transformers import CONFIG_MAPPING

from hf_paged import Engine, OutOfBlocks
from hf_paged.blocks.pool import CACHED
from hf_paged.engine.worker.states import SequenceStates
from hf_paged.kv.checksums import flip_a_byte
from hf_paged.kv.state_spans import StateSpans
from hf_paged.model.rehearsal import RECORDERS
from hf_paged.model.state_slots import StateSlots

pytestmark = NEEDS_SLOTS
FLAT = ("jamba", "zamba", "mamba", "mamba2")
"""Families whose scans begin without states in transformers; the last two are without keys and values."""
FAMILIES = [
    "falcon_h1", "jamba", "zamba", "mamba", "kimi_linear", "lfm2", "nemotron_h", "qwen3_5_text", "zamba2", "zaya",
]  # fmt: skip
LENGTHS = (3, 11, 1, 7, 20, 5)
NEW = 14


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_free_slots(monkeypatch)


def family(name: str, *values: Any) -> Any:
    """A case of tests: a family, and values of other parameters."""
    return pytest.param(name, *values, marks=FLAT_STATES if name in FLAT else ())


def prompts() -> list[list[int]]:
    chance = torch.Generator().manual_seed(0)
    return [torch.randint(5, 60, (length,), generator=chance).tolist() for length in LENGTHS]


def alone(model: Any, prompt: list[int], **options: Any) -> list[int]:
    """The tokens that stock's generate() adds to a prompt by itself."""
    given = {"max_new_tokens": NEW, "do_sample": False, **options}

    def compute() -> list[int]:
        return model.generate(input_ids=torch.tensor([prompt]), **given)[0, len(prompt) :].tolist()

    return computed_once(compute, model, prompt, given)


@pytest.fixture
def model(request: pytest.FixtureRequest) -> Any:
    made = build("causal", config_class("causal", request.param))
    made.generation_config.eos_token_id = None
    return made


@pytest.mark.parametrize(
    ("model", "graphs"),
    [
        *(family(name, True) for name in FAMILIES),
        *(family(name, False) for name in FAMILIES[::3]),
    ],
    indirect=["model"],
)
def test_sequences_answer_as_alone(model: Any, graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in pieces beside decoding ones, and a search by beams, whose states are forked."""
    if graphs:
        monkeypatch.setitem(RECORDERS, "cpu", record)
        policy(monkeypatch, after=1, agree=1)
    with Engine(model, max_batch_tokens=8, max_batch_sequences=4) as engine:
        handles = [engine.submit(prompt, max_new_tokens=NEW) for prompt in prompts()]
        beams = engine.submit(prompts()[1], max_new_tokens=6, num_beams=3)
        for prompt, handle in zip(prompts(), handles, strict=True):
            assert handle.result().sequences[0].token_ids == alone(model, prompt)
        found = beams.result().sequences[0].token_ids
        assert found == alone(model, prompts()[1], max_new_tokens=6, num_beams=3)
        assert bool(counts(engine)["replayed"]) is graphs
        engine.check()


@FLAT_STATES
@pytest.mark.parametrize(
    ("model", "tokens", "ahead"),
    pairwise(["qwen3_5_text", "nemotron_h", "jamba", "mamba"], [4, 64], [False, True]),
    indirect=["model"],
)
def test_chunks_of_any_length_beside_decoding_rows(model: Any, tokens: int, ahead: bool) -> None:
    with Engine(model, max_batch_tokens=tokens, max_batch_sequences=4, run_ahead=ahead) as engine:
        assert engine.stats()["form"] == "flat"
        handles = [engine.submit(prompt, max_new_tokens=NEW) for prompt in prompts()]
        for prompt, handle in zip(prompts(), handles, strict=True):
            assert handle.result().sequences[0].token_ids == alone(model, prompt)
        engine.check()


@FLAT_STATES
@pytest.mark.parametrize(
    ("model", "ahead", "calls"),
    pairwise(["qwen3_5_text", "nemotron_h", "falcon_mamba"], [False, True], [9, 10]),
    indirect=["model"],
)
def test_a_fault_in_the_middle_of_a_layer(
    model: Any, calls: int, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some layers have advanced their states: sequences begin again from their first token."""
    convolve = StateSpans.convolve
    left = [calls]

    def fails(*given: Any) -> torch.Tensor:
        answer = convolve(*given)
        left[0] -= 1
        if not left[0]:
            raise RuntimeError("broke off behind a convolution")
        return answer

    with Engine(model, max_batch_tokens=8, max_batch_sequences=4, run_ahead=ahead) as engine:
        monkeypatch.setattr(StateSpans, "convolve", fails)
        handles = [engine.submit(prompt, max_new_tokens=NEW) for prompt in prompts()]
        for prompt, handle in zip(prompts(), handles, strict=True):
            assert handle.result().sequences[0].token_ids == alone(model, prompt)
        assert left[0] < 0
        assert engine.stats()["preemptions"]
        engine.check()


@pytest.mark.parametrize(
    ("model", "preemption"),
    [
        ("qwen3_5_text", "recompute"),
        ("qwen3_5_text", "swap"),
        ("lfm2", "swap"),
        family("jamba", "recompute"),
    ],
    indirect=["model"],
)
def test_sequences_beyond_the_slots_are_preempted(model: Any, preemption: Any) -> None:
    """Samples of a prompt take slots of their own; what does not fit is computed again later, or waits on the
    host with its states.
    """
    options = {"state_slots": 4, "num_blocks": 18, "block_size": 4, "max_batch_sequences": 4}
    with Engine(model, **options, preemption=preemption) as engine:
        handles = [engine.submit(prompt, max_new_tokens=NEW) for prompt in prompts()]
        samples = engine.submit(
            prompts()[3], max_new_tokens=NEW, num_return_sequences=3, do_sample=True, top_k=1
        )
        for prompt, handle in zip(prompts(), handles, strict=True):
            assert handle.result().sequences[0].token_ids == alone(model, prompt)
        assert all(each.token_ids == alone(model, prompts()[3]) for each in samples.result().sequences)
        stats = engine.stats()
        assert stats["preemptions"]
        assert bool(stats["swapped_in"]) is (preemption == "swap")
        engine.check()


MORE_THAN_FITS: list[tuple[dict[str, Any], str]] = [
    (
        {"state_slots": 10**12},
        r"^state_slots=1000000000000 of \d+ bytes take \d+ bytes on cpu, and \d+ are free; lower it,",
    ),
    (
        {"state_slots": 4, "state_snapshots": 10**12, "num_blocks": 8},
        r"num_blocks=8 of 16 tokens and state_slots=4 of .* and state_snapshots=1000000000000 of \d+ bytes take",
    ),
]


@pytest.mark.parametrize("model", ["qwen3_5_text"], indirect=True)
def test_too_few_slots_and_too_many(model: Any) -> None:
    """Both numbers are in the error, and the engine goes on."""
    with pytest.raises(ValueError, match="state_slots=0 is too few; give 1 or more"):
        Engine(model, state_slots=0)
    for options, said in MORE_THAN_FITS:
        with pytest.raises(OutOfBlocks, match=said):
            Engine(model, **options)
    with Engine(model, state_slots=2, state_snapshots=0, num_blocks=60, block_size=4) as engine:
        error = engine.submit(prompts()[1], max_new_tokens=NEW, num_beams=3).result().error
        assert "3 sequence(s) need 3 slots for recurrent states and 2 can be had" in str(error)
        answer = engine.submit(prompts()[1], max_new_tokens=NEW, num_beams=2).result().sequences[0]
        assert answer.token_ids == alone(model, prompts()[1], num_beams=2)
        engine.check()


@pytest.mark.parametrize("model", ["qwen3_5_text", "zaya"], indirect=True)
def test_a_model_is_cast_and_runs_under_autocast(model: Any) -> None:
    """An engine that saw the cast answers as one that is made after it, and as stock in the first type."""

    def answers(engine: Engine) -> list[list[int]]:
        found = engine.generate(prompts(), max_new_tokens=NEW, progress=False, strict=True)
        engine.check()
        return [output.sequences[0].token_ids for output in found]

    options = {"block_size": 4, "num_blocks": 90, "max_batch_tokens": 16, "state_every": 8}
    model.to(torch.bfloat16).to(torch.float32)  # so that casts lose nothing
    right = [alone(model, prompt) for prompt in prompts()]
    with Engine(model, **options) as engine:
        assert answers(engine) == right
        model.to(torch.bfloat16)
        with Engine(model, **options) as fresh:
            assert answers(engine) == answers(fresh)
        model.to(torch.float32)
        assert answers(engine) == right
    with torch.autocast("cpu", torch.bfloat16), Engine(model, **options) as engine:
        found = answers(engine)
    assert sum(map(len, found)) == sum(map(len, right))


@FLAT_STATES
@pytest.mark.parametrize("model", ["mamba2"], indirect=True)
def test_sequences_without_keys_and_values_wait_for_slots(model: Any) -> None:
    """A slot is all that a sequence ever needs, so none that runs is preempted; there are no blocks."""
    with Engine(model, state_slots=3, max_batch_sequences=4, num_blocks=7) as engine:
        handles = [engine.submit(prompt, max_new_tokens=NEW) for prompt in prompts()]
        beams = engine.submit(prompts()[3], max_new_tokens=NEW, num_beams=3)
        for prompt, handle in zip(prompts(), handles, strict=True):
            assert handle.result().sequences[0].token_ids == alone(model, prompt)
        assert beams.result().sequences[0].token_ids == alone(model, prompts()[3], num_beams=3)
        stats = engine.stats()
        assert stats["preemptions"] == 0
        assert set(stats["blocks"]) == {"state"}
        engine.sleep()
        engine.wake_up()
        assert engine.generate([prompts()[1]], max_new_tokens=NEW)[0].sequences[0].token_ids == alone(
            model, prompts()[1]
        )
        engine.check()


@FLAT_STATES
@pytest.mark.parametrize("model", ["kimi_linear", "lfm2", "nemotron_h", "qwen3_5_text"], indirect=True)
def test_a_foreign_state_is_seen(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers depend on the slots that rows read: with those of a neighbour of equal length they are wrong, so
    tests of answers see it.
    """
    asked = [prompts()[1], prompts()[1][::-1]]
    right = [alone(model, prompt) for prompt in asked]
    stock = SequenceStates.slots_of

    def crossed(self: SequenceStates, rows: Any) -> StateSlots:
        slots = stock(self, rows)
        swapped = len(rows) == 2 and all(row.count == 1 for row in rows)
        return StateSlots(slots.read[::-1], slots.written[::-1]) if swapped else slots

    with Engine(model, max_batch_sequences=2, prefix_caching=False) as engine:
        monkeypatch.setattr(SequenceStates, "slots_of", crossed)
        handles = [engine.submit(prompt, max_new_tokens=NEW) for prompt in asked]
        assert all(
            handle.result().sequences[0].token_ids != answer
            for handle, answer in zip(handles, right, strict=True)
        )
        monkeypatch.undo()
        handles = [engine.submit(prompt, max_new_tokens=NEW) for prompt in asked]
        assert [handle.result().sequences[0].token_ids for handle in handles] == right


@pytest.mark.parametrize(
    "model", [each for each in ["inkling2_text"] if each in CONFIG_MAPPING], indirect=True
)
def test_rows_are_computed_beside_each_other_where_that_is_right(model: Any) -> None:
    """Its attention finds a token's distance by the columns of the row, which padding shifts."""
    with Engine(model, max_batch_tokens=16, max_batch_sequences=4) as engine:
        assert engine.stats()["form"] == "rows"
        assert "beside others its sequences get other logits" in engine.stats()["off"]["beside"]
        handles = [engine.submit(prompt, max_new_tokens=NEW) for prompt in prompts()]
        for prompt, handle in zip(prompts(), handles, strict=True):
            assert handle.result().sequences[0].token_ids == alone(model, prompt)
        engine.check()


# ---- snapshots


@pytest.mark.parametrize(
    ("model", "ahead"),
    [family(name, number % 2 == 1) for number, name in enumerate(FAMILIES)],
    indirect=["model"],
)
def test_a_turn_of_a_chat_goes_on_from_the_last_answer(model: Any, ahead: bool) -> None:
    """C18: to the token, in blocks that are not full."""
    said, known = prompts()[1], 0
    with Engine(model, block_size=4, max_batch_tokens=16, state_every=8, run_ahead=ahead) as engine:
        for _ in range(3):
            output = engine.submit(said, max_new_tokens=NEW).result()
            tokens = output.sequences[0].token_ids
            assert tokens == alone(model, said)
            assert output.cached_tokens == known
            known = len(said) + len(tokens) - 1
            said = [*said, *tokens, 7, 8]
        states = engine.stats()["states"]
        assert (states["hits"], states["used"]) == (2, 0)
        assert states["snapshots"] >= 3
        engine.check()


@pytest.mark.parametrize("model", ["qwen3_5_text"], indirect=True)
@pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])
@pytest.mark.parametrize("then", ["ask", "step", "run", "cast"])
def test_an_answer_that_ends_by_itself_is_found_by_what_was_computed(
    model: Any, ahead: bool, then: str
) -> None:
    """C22: a step in flight has computed its last token too, which the next turn repeats, whoever takes the
    next step. After a change of the model it is of no use.
    """
    said = prompts()[4]
    first = alone(model, said)
    model.generation_config.eos_token_id = end = first[5]
    answer = first[: first.index(end) + 1]
    with Engine(model, block_size=4, max_batch_tokens=16, run_ahead=ahead) as engine:
        if then == "run":
            engine.start()
        assert engine.submit(said, max_new_tokens=NEW).result().sequences[0].token_ids == answer
        if then == "step":
            engine.step()
            assert engine.stats()["states"]["used"] == 0
        if then == "cast":
            model.to(torch.float64)
            engine.generate([prompts()[1]], max_new_tokens=NEW, progress=False, strict=True)
            return
        said = [*said, *answer, 7, 8]
        output = engine.submit(said, max_new_tokens=NEW).result()
        assert output.cached_tokens == len(said) - 2 - (not ahead)
        assert output.sequences[0].token_ids == alone(model, said)
        engine.check()


@pytest.mark.parametrize("model", ["qwen3_5_text", "zaya", family("mamba2")], indirect=True)
def test_prompts_part_where_nobody_expected_it(model: Any) -> None:
    """The second leaves what the third hits; of two at once the first leaves it, and the second hits."""
    common = (prompts()[4] * 5)[:85]
    with Engine(model, block_size=4, max_batch_tokens=256) as engine:
        found = []
        for own in ([1, 2], [3], [4, 5], [6]):
            output = engine.submit([*common, *own], max_new_tokens=4).result()
            assert output.sequences[0].token_ids == alone(model, [*common, *own], max_new_tokens=4)
            found.append(output.cached_tokens)
        whole = engine.stats()["states"]["slots"] == sum(each.pool.total for each in layer_groups(engine))
        assert found == ([0, 0, 80, 80] if whole else [0, 0, 85, 85])  # without blocks to 16 tokens
    with Engine(model, block_size=4, max_batch_tokens=64, state_every=32) as engine:
        handles = [engine.submit([*common, *own], max_new_tokens=4) for own in ([1, 2, 9], [3], [4, 5])]
        outputs = [handle.result() for handle in handles]
        assert [output.cached_tokens for output in outputs] == ([0, 80, 80] if whole else [0, 84, 84])
        for output, own in zip(outputs, ([1, 2, 9], [3], [4, 5]), strict=True):
            assert output.sequences[0].token_ids == alone(model, [*common, *own], max_new_tokens=4)
        engine.check()


@pytest.mark.parametrize(
    ("model", "ahead"),
    [("qwen3_5_text", True), ("lfm2", False), family("mamba2", True)],
    indirect=["model"],
)
def test_snapshots_give_way_to_sequences(model: Any, ahead: bool) -> None:
    """C9: with hardly a slot to spare, beams and samples among what runs, no answer changes and none waits."""
    chance = random.Random(4)
    base = prompts()[4] * 2
    options = {"state_slots": 4, "state_snapshots": 1, "state_every": 8, "max_batch_sequences": 4}
    with Engine(
        model, block_size=4, num_blocks=60, max_batch_tokens=16, run_ahead=ahead, verify="bytes", **options
    ) as engine:
        asked = []
        for number in range(14):
            prompt = [
                *base[: chance.choice([5, 17, 33, 40])],
                *range(6, 6 + chance.randrange(1, 4)),
                number + 5,
            ]
            ways = {1: {}, 2: {"num_beams": 2}, 3: {"num_return_sequences": 3, "do_sample": True, "top_k": 1}}
            way = ways[chance.choice([1, 1, 2, 3])]
            asked.append((prompt, way, engine.submit(prompt, max_new_tokens=6, **way)))
        for prompt, way, handle in asked:
            beams = {"num_beams": 2} if "num_beams" in way else {}
            for each in handle.result().sequences[: 1 if beams else None]:
                assert each.token_ids == alone(model, prompt, max_new_tokens=6, **beams)
        stats = engine.stats()
        assert min(stats["states"]["hits"], stats["states"]["evictions"]) > 0
        assert stats["verify"]["checked"] > stats["verify"]["mismatched"] == 0
        engine.check()


@pytest.mark.parametrize(
    ("model", "graphs"), [("qwen3_5_text", True), ("nemotron_h", False)], indirect=["model"]
)
def test_states_in_bfloat16(model: Any, graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nearly the same answers in less memory, in chunks, from snapshots, behind a swap."""
    if graphs:
        monkeypatch.setitem(RECORDERS, "cpu", record)
        policy(monkeypatch, after=1, agree=1)
    options = {"state_slots": 4, "state_snapshots": 2, "num_blocks": 18, "block_size": 4, "state_every": 8}
    found, bytes_of = [], []
    for dtype in (None, "bfloat16"):
        with Engine(
            model, state_dtype=dtype, max_batch_tokens=8, max_batch_sequences=4, preemption="swap", **options
        ) as engine:
            asked = [*prompts(), prompts()[4] * 2, [*prompts()[4], 7, 8]]
            handles = [engine.submit(prompt, max_new_tokens=NEW, logprobs=True) for prompt in asked]
            samples = engine.submit(
                asked[3], max_new_tokens=NEW, num_return_sequences=3, do_sample=True, top_k=1
            )
            assert len(samples.result().sequences) == 3
            found.append([handle.result().sequences[0] for handle in handles])
            stats = engine.stats()
            assert stats["states"]["hits"] > 0
            assert stats["swapped_in"] > 0
            assert bool(counts(engine)["replayed"]) is graphs
            bytes_of.append(stats["memory"]["most_bytes"])
            engine.check()
    pairs = [
        (one, other)
        for each, half in zip(*found, strict=True)
        for one, other in zip(each.logprobs, half.logprobs, strict=True)
    ]
    assert sum(one.token_id == other.token_id for one, other in pairs) > 0.9 * len(pairs)
    first = [
        abs(each.logprobs[0].logprob - half.logprobs[0].logprob) for each, half in zip(*found, strict=True)
    ]
    assert 0 < max(first) < 0.05
    assert bytes_of[1] < bytes_of[0]


@pytest.mark.parametrize("model", ["qwen3_5_text"], indirect=True)
def test_a_snapshot_of_other_bytes_is_not_continued(model: Any) -> None:
    """verify="bytes" checks slots as it checks blocks: the request ends, and the next one begins anew."""
    with Engine(model, block_size=4, max_batch_tokens=16, state_every=8, verify="bytes") as engine:
        said = prompts()[4]
        assert engine.submit(said, max_new_tokens=NEW).result().error is None
        group = layer_groups(engine)[1]
        store = next(iter(group.stores.values()))
        for slot, state in enumerate(group.pool.states()):
            if state == CACHED:
                flip_a_byte(store, slot)
        bad = engine.submit(said, max_new_tokens=NEW).result()
        assert "of the state layers have changed" in str(bad.error)
        assert engine.submit(said, max_new_tokens=NEW).result().sequences[0].token_ids == alone(model, said)
        engine.check()


@pytest.mark.filterwarnings("default::UserWarning")  # peft's, of adapters on top of a model
@pytest.mark.parametrize("model", ["qwen3_5_text"], indirect=True)
def test_adapters_mix_and_states_are_theirs(model: Any) -> None:
    """C24: products of mixers are adapted, so a state belongs to its adapter: a turn begins with no other's."""
    names = ["in_proj_qkv", "in_proj_b", "out_proj", "q_proj", "down_proj"]
    lora = {"r": 4, "lora_alpha": 16, "target_modules": names, "init_lora_weights": False}
    torch.manual_seed(0)
    adapted = peft.get_peft_model(model, peft.LoraConfig(**lora), "one")
    adapted.add_adapter("two", peft.LoraConfig(**lora))
    adapted.eval()
    said = {name: prompts()[1] for name in ("one", "two", None)}
    with Engine(adapted, block_size=4, max_batch_tokens=16, state_every=8) as engine:
        for turn in range(2):
            handles = {
                name: engine.submit(told, adapter=name, max_new_tokens=6) for name, told in said.items()
            }
            for name, handle in handles.items():
                output = handle.result()
                with adapted.disable_adapter() if name is None else nullcontext():
                    if name is not None:
                        adapted.set_adapter(name)
                    expected = alone(adapted, said[name], max_new_tokens=6)
                assert output.sequences[0].token_ids == expected
                assert output.cached_tokens == turn * (len(prompts()[1]) + 5)
                said[name] = [*said[name], *expected, 7]
        assert said["one"] != said["two"] != said[None]
        engine.check()


@pytest.mark.parametrize("model", ["qwen3_5_text"], indirect=True)
def test_without_snapshots_no_prefixes_are_kept_and_the_stats_say_why(model: Any) -> None:
    with Engine(model, max_batch_sequences=2, state_snapshots=0) as engine:
        for _ in range(2):
            assert engine.submit(prompts()[4] * 2, max_new_tokens=2).result().cached_tokens == 0
        assert (
            engine.stats()["off"]["prefix_caching"] == "layers keep recurrent states, and state_snapshots=0"
        )
        assert engine.stats()["states"]["snapshots"] == 0
        engine.check()
