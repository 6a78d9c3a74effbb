"""Cases: adapters of requests, and of peft models."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import peft
import torch
import torch.distributed as dist
from engine_answers import KINDS, PROMPTS, alone, answers, checked_answers
from families import BY_NAME, build
from rank_support import (
    ASKED,
    FEW,
    FOLDER,
    GREEDY,
    MODES,
    NEW,
    SMALL,
    adapter_of,
    asked,
    generated,
    led,
    loaded,
    lora,
    raises,
    shown_to,
    whole,
)
from safetensors.torch import save_file

from hf_paged.engine import Engine
from hf_paged.model.adapters.loading import load_adapter
from hf_paged.model.shards import local_part

RANKS_OF = {"one": 4, "two": 3, "three": 8}
ADAPTED = ["one", None, "two", "three", ["one", "three"], "two", "one"]


def add_all(engine: Engine, name: str) -> None:
    for seed, (adapter, rank) in enumerate(RANKS_OF.items()):
        engine.add_adapter(adapter, adapter_of(name, seed, rank), lora(r=rank))


def asked_with_adapters(engine: Engine, requests: list[tuple[int, int]]) -> list[Any]:
    """The answers of requests with an adapter each, submitted together; then of the first of them again."""
    found = []
    for several in (requests, requests[:3]):
        handles = [
            engine.submit(
                PROMPTS[p], adapter=ADAPTED[i % len(ADAPTED)], max_new_tokens=NEW, seed=p, **KINDS[k]
            )
            for i, (p, k) in enumerate(several)
        ]
        found.append(checked_answers(engine, handles))
    return found


def compare_adapters(name: str, rank: int, requests: list[tuple[int, int]], **options: Any) -> dict[str, Any]:
    """Requests with adapters on all ranks, held to the same in one process: the engine's counts."""

    def act(engine: Engine) -> dict[str, Any]:
        with Engine(whole(name), **SMALL) as one:
            add_all(one, name)
            expected = asked_with_adapters(one, requests)
            plain = asked(one, requests[:3])
        assert expected[1] != plain
        add_all(engine, name)
        found = asked_with_adapters(engine, requests)
        assert found == expected, (found, expected)
        assert asked(engine, requests[:3]) == plain
        return engine.stats()

    stats: dict[str, Any] = led(rank, loaded(name), act, **options) or {}
    return stats


def adapters_in_few_places(rank: int) -> None:
    """Mixed batches, beams, samples, sets of adapters, prefixes found, and requests that begin again."""
    name, blocks = ("llama-3", 17) if dist.get_world_size() == 3 else ("llama", 21)
    requests = ASKED if dist.get_world_size() == 2 else ASKED[2:9]
    options = {"preemption": "recompute", "num_blocks": blocks, "max_batch_sequences": 10}
    stats = compare_adapters(name, rank, requests, max_adapters=2, **options)
    if rank == 0:
        assert stats["preemptions"] > 0
        assert stats["hits"] > 0
        assert stats["adapters"]["on_device"] == 2


def adapters_and_swap(rank: int) -> None:
    options = {"preemption": "swap", "num_blocks": 21, "max_batch_sequences": 10}
    stats = compare_adapters("llama", rank, ASKED, run_ahead=True, **options)
    if rank == 0:
        assert stats["swapped_in"] > 0


def adapters_of_other_families(rank: int) -> None:
    """Norms of heads, and experts. `biases_behind_the_sum` and `peft_models` have gpt-oss."""
    for name in ("mixtral", "qwen3"):
        compare_adapters(name, rank, FEW)


def adapters_and_pictures(rank: int) -> None:
    """The request's adapter is in the vision tower, too, while its pictures are encoded."""

    def answered(engine: Engine) -> Any:
        add_all(engine, "llava")
        adapters = ["one", None, ["one", "three"], "two"]
        given = shown_to("llava")
        asked = [(each, name) for name in adapters for each in given]
        return checked_answers(
            engine, [engine.submit(**each, adapter=name, **GREEDY) for each, name in asked]
        )

    def act(engine: Engine) -> None:
        with Engine(whole("llava"), **SMALL) as one:
            expected = answered(one)
        assert expected[0] != expected[2]
        assert answered(engine) == expected

    led(rank, loaded("llava"), act, max_adapters=2)


def adapters_that_come_and_go(rank: int) -> None:
    """A folder, a name that is given again, and what is refused: other requests go on."""
    state = adapter_of("llama", 0, 4)
    again = adapter_of("llama", 5, 16)
    layer = "model.layers.0.self_attn.q_proj"
    if rank == 0:
        save_file(state, FOLDER / "adapter_model.safetensors")
        lora(r=4).save_pretrained(FOLDER)

    def answered(engine: Engine, adapter: str = "one") -> Any:
        return answers(
            engine.submit(PROMPTS[1], max_new_tokens=NEW, do_sample=False, adapter=adapter).result()
        )

    def act(engine: Engine) -> None:
        with Engine(whole("llama"), **SMALL) as one:
            expected = []
            for source, config in ((state, lora(r=4)), (again, lora(r=16))):
                one.add_adapter("one", source, config)
                expected.append(answered(one))
                one.remove_adapter("one")
        assert expected[0] != expected[1]
        engine.add_adapter("one", FOLDER)
        assert answered(engine) == expected[0]
        running = engine.submit(PROMPTS[1], max_new_tokens=NEW, do_sample=False, adapter="one")
        engine.step()
        raises(ValueError, "already", lambda: engine.add_adapter("one", again, lora(r=16)))
        raises(ValueError, "1 requests have", lambda: engine.remove_adapter("one"))
        few = {f"{layer}.lora_A.weight": torch.ones(2, 3), f"{layer}.lora_B.weight": torch.ones(3, 2)}
        raises(ValueError, "for another model", lambda: engine.add_adapter("few", few, lora(r=2)))
        raises(
            ValueError, "where ranks divide the model", lambda: engine.add_adapter("few", embedded, lora(r=2))
        )
        raises(ValueError, "DoRA", lambda: engine.add_adapter("few", state, lora(r=4, use_dora=True)))
        engine.remove_adapter("one", when="idle")
        assert answers(running.result()) == expected[0]
        raises(ValueError, "no adapter 'one'", lambda: answered(engine))
        engine.add_adapter("one", again, lora(r=16))
        assert answered(engine) == expected[1]
        running = engine.submit(PROMPTS[1], max_new_tokens=NEW, do_sample=False, adapter="one")
        engine.step()
        engine.pause()
        taken = {path: tensor.clone() for path, tensor in state.items()}
        engine.add_adapter("two", taken, lora(r=4))
        engine.add_adapter("three", taken, lora(r=4))
        for tensor in taken.values():
            tensor.zero_()  # it was read once
        engine.remove_adapter("three")
        engine.resume()
        assert answers(running.result()) == expected[1]
        assert answered(engine, adapter="two") == expected[0]
        engine.pause()
        engine.remove_adapter("one")
        engine.add_adapter("one", state, lora(r=4))
        engine.resume()
        assert answered(engine) == expected[0]
        assert set(engine.adapters()) == {"one", "two"}

    table = "model.embed_tokens"
    embedded = {f"{table}.lora_A.weight": torch.ones(2, 3), f"{table}.lora_B.weight": torch.ones(3, 2)}
    model = loaded("llama")
    with Engine(model, max_adapters=1, **SMALL) as engine:
        if rank == 0:
            act(engine)
        else:
            assert engine.follow()
            assert engine.follow()
            assert not engine.follow()
            assert set(engine.adapters()) == {"one", "two"}, "what rank 0 has removed is gone here, too"


def whole_parts(rank: int) -> None:
    """Saved embeddings and heads, trained tokens, LoRA of embeddings, biases, and new tokens."""
    cases: dict[str, tuple[int, dict[str, Any]]] = {
        "saved": (0, {"modules_to_save": ["embed_tokens", "lm_head"]}),
        "new": (8, {"modules_to_save": ["embed_tokens", "lm_head"]}),
        "tokens": (0, {"trainable_token_indices": [5, 7, 30]}),
        "embeddings": (0, {"target_modules": ["q_proj", "embed_tokens"]}),
        "biases": (0, {"lora_bias": True}),
    }
    states = {}
    for seed, (name, (more, options)) in enumerate(cases.items()):
        torch.manual_seed(seed)
        base = copy.deepcopy(whole("llama"))
        if more:
            rows, width = base.lm_head.weight.shape
            base.lm_head = torch.nn.Linear(width, rows + more, bias=False)
            base.model.embed_tokens = torch.nn.Embedding(rows + more, width)
        layers = {"target_modules": ["q_proj", "v_proj", "down_proj"], **options}
        config = lora(r=4, init_lora_weights=False, **layers)
        tuned = peft.get_peft_model(base, config, name)
        with torch.no_grad():
            for path, each in tuned.named_parameters():
                if any(part in path for part in ("modules_to_save", "delta", "lora_B")):
                    each.add_(torch.randn(each.shape) * 0.3 * each.std().nan_to_num(1.0))
        states[name] = peft.get_peft_model_state_dict(tuned, adapter_name=name), tuned.peft_config[name]

    def answered(engine: Engine) -> Any:
        for name, (state, config) in states.items():
            engine.add_adapter(name, state, config)
        handles = [engine.submit(PROMPTS[1], adapter=each, **GREEDY) for each in (*cases, None)]
        return checked_answers(engine, handles)

    def act(engine: Engine) -> None:
        with Engine(whole("llama"), **SMALL) as one:
            expected = answered(one)
        assert len(set(map(str, expected))) > 3
        found = answered(engine)
        assert found == expected, (found, expected)

    led(rank, loaded("llama"), act)


NORMS = {"modules_to_save": ["norm", "input_layernorm"]}


def scaled_parts(rank: int) -> None:
    compare_scaled_parts(rank, "qwen2-window", ["q_proj", "v_proj", "o_proj", "down_proj"])


def biases_behind_the_sum(rank: int) -> None:
    compare_scaled_parts(rank, "gpt-oss", ["q_proj", "v_proj", "o_proj"])


def compare_scaled_parts(rank: int, family: str, targets: list[str]) -> None:
    """DoRA on layers whose inputs or outputs are divided, biases of layers and whole norms, beside LoRA and
    the model alone, also when requests give way and when the model's weights have changed.
    """
    cases = {"dora": {"use_dora": True}, "biases": {"bias": "lora_only"}, "norms": NORMS, "lora": {}}
    states = {}
    for seed, (name, options) in enumerate(cases.items()):
        torch.manual_seed(seed)
        config = lora(r=4, init_lora_weights=False, target_modules=targets, **options)
        tuned = peft.get_peft_model(copy.deepcopy(whole(family)), config, name)
        with torch.no_grad():
            for path, each in tuned.named_parameters():
                if any(part in path for part in ("magnitude", "lora_B", ".bias", "modules_to_save")):
                    each.add_(torch.randn(each.shape) * 0.3 * each.std().nan_to_num(1.0).clamp(min=0.1))
        states[name] = peft.get_peft_model_state_dict(tuned, adapter_name=name), config

    def add(engine: Engine) -> None:
        for name, (state, config) in states.items():
            engine.add_adapter(name, state, config)

    def answered(engine: Engine) -> Any:
        handles = [
            engine.submit(PROMPTS[i], adapter=each, do_sample=False, max_new_tokens=10)
            for i in (1, 3)
            for each in (*cases, None)
        ]
        return checked_answers(engine, handles)

    def change(model: Any) -> None:
        for layer in model.model.layers:
            for each in (layer.self_attn.o_proj, layer.self_attn.q_proj):
                local_part(each.weight).data.mul_(1.5)

    model = loaded(family)
    options = {**SMALL, "num_blocks": 16, "preemption": "recompute", "watermark": 0.0}
    with Engine(model, max_adapters=3, **options) as engine:
        if rank:
            assert engine.follow()
            change(model)
            assert not engine.follow()
            return
        one = copy.deepcopy(whole(family))
        with Engine(one, **SMALL) as alone:
            for each in (engine, alone):
                add(each)
            expected = [answered(alone)]
            assert len(set(map(str, expected[0]))) > 6
            assert answered(engine) == expected[0]
            assert engine.stats()["preemptions"] > 0
            for each, own in ((engine, model), (alone, one)):
                each.pause()
                change(own)
                each.resume()
            expected.append(answered(alone))
            assert expected[1] != expected[0]
            assert answered(engine) == expected[1]


def layers_divided_in_another_way(rank: int) -> None:
    """An adapter of a layer whose part the engine does not know is refused by the layer's name."""

    def act(engine: Engine) -> None:
        state = adapter_of("llama", 0, 4)
        words = "layers.0.mlp.gate_proj is divided over 2 ranks as 'packed_colwise'"
        raises(ValueError, words, lambda: engine.add_adapter("one", state, lora(r=4)))
        found = answers(engine.submit(PROMPTS[1], max_new_tokens=NEW, do_sample=False).result())
        assert found == alone(whole("llama"), PROMPTS[1], max_new_tokens=NEW, do_sample=False)

    model = loaded("llama")
    model._tp_plan = {**model.tp_plan, "model.layers.*.mlp.gate_proj": "packed_colwise"}
    led(rank, model, act)


ADAPTED_LAYERS = r".*layers.*proj"


def fine_tuned(model: Any, name: str) -> Any:
    """A model with adapters that peft has put into it; on several ranks each has its part."""
    model.to(whole(name).device)
    wrapped: Any = None
    for seed, (adapter, rank) in enumerate(RANKS_OF.items()):
        config = lora(r=rank, target_modules=ADAPTED_LAYERS)
        if wrapped is None:
            wrapped = peft.get_peft_model(model, config, adapter)
        else:
            wrapped.add_adapter(adapter, config)
        fill(wrapped, name, seed, adapter)
    return wrapped.eval()


def fill(wrapped: Any, name: str, seed: int, adapter: str) -> None:
    """Give an adapter its weights."""
    state = adapter_of(name, seed, RANKS_OF[adapter])
    own = {f"base_model.model.{path}": each for path, each in state.items() if "lm_head" not in path}
    assert not peft.set_peft_model_state_dict(wrapped, own, adapter).unexpected_keys


def peft_models(rank: int) -> None:
    """Fine-tuned models in generate() and in the engine: what is active, and an adapter for each request."""
    name = {2: "gpt-oss", 3: "llama-3"}[dist.get_world_size()]
    model, one = (fine_tuned(each, name) for each in (loaded(name), build(BY_NAME[name])))

    def act(engine: Engine) -> None:
        with Engine(one, **SMALL) as alone:
            expected = [asked_with_adapters(alone, FEW), asked(alone, FEW)]
        found = [asked_with_adapters(engine, FEW), asked(engine, FEW)]
        assert found == expected, (name, found, expected)
        owners = {adapter: info.owner for adapter, info in engine.adapters().items()}
        assert owners == dict.fromkeys(RANKS_OF, "model")

    led(rank, model, act, max_adapters=2)
    if dist.get_world_size() == 3:
        return  # generate() with adapters asks ranks for nothing that depends on how many they are
    plain = generated(one, MODES[0])
    for mode in (MODES[2], {**MODES[0], "adapter_names": ["two", "__base__"]}):
        assert generated(model, mode, cache_implementation="paged") == generated(one, mode), mode
    for each in (model, one):
        each.base_model.set_adapter(["two", "three"])
    active = generated(one, MODES[1])
    assert generated(model, MODES[1], cache_implementation="paged") == active
    with model.disable_adapter(), one.disable_adapter():
        found = generated(model, MODES[0], cache_implementation="paged")
        assert found == generated(one, MODES[0]) != plain


def peft_models_that_change(rank: int) -> None:
    """While the engine is paused adapters are trained, deleted, added and made active, on all ranks alike."""
    model, one = (fine_tuned(each, "llama") for each in (loaded("llama"), build(BY_NAME["llama"])))

    def train(wrapped: Any) -> None:
        for path, weight in wrapped.named_parameters():
            if "lora_B.one" in path:
                weight.data.mul_(-1)

    def train_the_last_ranks_part(wrapped: Any) -> None:
        for path, weight in wrapped.named_parameters():
            if "lora_B.one" in path and ("k_proj" in path or "v_proj" in path):
                if not hasattr(weight, "_local_tensor"):
                    weight.data[len(weight) // 2 :] *= -2
                elif rank == 1:
                    weight._local_tensor.data.mul_(-2)

    def delete(wrapped: Any) -> None:
        wrapped.set_adapter("three")
        wrapped.delete_adapter("one")

    def add_again(wrapped: Any) -> None:
        wrapped.add_adapter("one", lora(r=4, target_modules=ADAPTED_LAYERS))
        fill(wrapped, "llama", 7, "one")

    def answered(engine: Engine) -> list[Any]:
        names = list(engine.adapters())
        handles = [
            engine.submit(PROMPTS[1], adapter=each, max_new_tokens=NEW, do_sample=False)
            for each in ("active", *names, names[:2])
        ]
        return checked_answers(engine, handles)

    changes = [train, train_the_last_ranks_part, delete, add_again]
    with Engine(model, **SMALL) as engine:
        if rank:
            for change in changes:
                assert engine.follow()
                change(model)
            assert not engine.follow()
            return
        with Engine(one, **SMALL) as alone:
            both = (engine, alone)
            found, expected = map(answered, both)
            assert found == expected
            for change in changes:
                options = {"adapter": "two", "max_new_tokens": NEW, "do_sample": False}
                running = [each.submit(PROMPTS[3], **options) for each in both]
                for each in both:
                    each.step()
                    each.pause()
                change(model)
                change(one)
                for each in both:
                    each.resume()
                found, expected = (answers(each.result()) for each in running)
                assert found == expected, change
                found, expected = map(answered, both)
                assert found == expected, (change, found, expected)


def adapters_that_differ_among_ranks(rank: int) -> None:
    """One rank alone was given another adapter, or peft cannot divide it: an error says so."""
    model = fine_tuned(loaded("llama"), "llama")
    with Engine(model, **SMALL) as engine:
        if rank == 0:
            engine.pause()
        else:
            assert engine.follow()
            model.delete_adapter("two")
        if rank == 0:
            engine.resume()

            def wait() -> Any:
                return engine.submit(PROMPTS[1], max_new_tokens=2, adapter="one").result()

            raises(RuntimeError, "different adapters in their models .*rank 0.*'two'", wait)
            engine.pause()
            model.delete_adapter("two")
            engine.resume()
            wait()
        else:
            assert engine.follow()
            assert not engine.follow()
    model = peft.get_peft_model(loaded("llama"), peft.LoHaConfig(target_modules=["q_proj"]))
    words = r"q_proj \(loha.Linear\) among ranks"
    raises(ValueError, words, lambda: Engine(model, **SMALL))
    ids = torch.tensor([PROMPTS[1]], device=model.device)
    raises(
        ValueError,
        words,
        lambda: model.generate(input_ids=ids, max_new_tokens=2, cache_implementation="paged"),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # peft's, of a head that it does not divide
        model = peft.get_peft_model(loaded("llama"), lora(target_modules=["lm_head"]))
    raises(ValueError, "peft cannot divide the adapter of lm_head", lambda: Engine(model, **SMALL))
    model, one = (fine_tuned(each, "llama") for each in (loaded("llama"), build(BY_NAME["llama"])))
    base = model.base_model.model
    raises(ValueError, "each rank has a part of 'one'", lambda: load_adapter(base, model, None, "one"))
    path = "model.layers.0.mlp.up_proj.weight"
    state = {**adapter_of("llama", 0, 4), path: whole("llama").get_parameter(path)}
    words = f"saved with {path}, of which each rank has a part"
    raises(ValueError, words, lambda: load_adapter(base, state, lora(r=4), "four"))
    last = base.model.layers[0].mlp.down_proj
    last.base_layer.register_forward_hook(lambda *_: None)

    def act(engine: Engine) -> None:
        raises(ValueError, "or it has hooks", lambda: engine.submit(PROMPTS[1], adapter="two"))
        expected = answers(Engine(one, **SMALL).submit(PROMPTS[1], max_new_tokens=NEW).result())
        assert answers(engine.submit(PROMPTS[1], max_new_tokens=NEW).result()) == expected

    led(rank, model, act)
