"""Weights that change between and under requests: pause, weights_changed, load_weights, sleep and wake_up."""

from __future__ import annotations

import copy
import gc
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import adapted, lora
from captures import policy
from engine_answers import PROMPTS, alone, answers
from engine_threads import GUARD
from families import BY_NAME, build
from tape import record

from hf_paged.engine import Engine
from hf_paged.engine.weights import load_into
from hf_paged.model import weights_digest
from hf_paged.model.registry import memory_of
from hf_paged.model.rehearsal import RECORDERS

LONG = {"max_new_tokens": 30, "do_sample": False}
SHORT = {"max_new_tokens": 6, "do_sample": False}


@pytest.fixture
def engine(model: Any) -> Iterator[Engine]:
    with Engine(model, block_size=4, num_blocks=120, max_batch_tokens=24, max_batch_sequences=8) as made:
        yield made
        made.check()


def change(model: Any, seed: int = 0) -> None:
    """Other weights, of a model or a list of them, written where torch counts."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model if isinstance(model, list) else model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))


def begun(engine: Engine, count: int = 2) -> list[Any]:
    """Requests that have some of their tokens."""
    handles = [engine.submit(prompt, **LONG) for prompt in PROMPTS[1 : 1 + count]]
    for _ in range(6):
        engine.step()
    assert engine.stats()["running"] == count
    return handles


def test_wait_finishes_what_has_come(model: Any, engine: Engine) -> None:
    handles = begun(engine)
    engine.pause(mode="wait")
    assert all(handle.done for handle in handles)
    assert engine.stats()["paused"] == "wait"
    late = engine.submit(PROMPTS[0], **SHORT)
    with pytest.raises(RuntimeError, match="paused"):
        engine.step()
    change(model)
    engine.resume()
    assert engine.stats()["paused"] is None
    assert answers(late.result()) == alone(model, PROMPTS[0], **SHORT)


def test_abort_ends_what_has_come(engine: Engine) -> None:
    handles = [*begun(engine), engine.submit(PROMPTS[4], **LONG)]
    engine.pause(mode="abort")
    assert {handle.result(0).finish_reason for handle in handles} == {"abort"}
    assert all(usage["held"] == 0 for usage in engine.stats()["blocks"].values())
    engine.resume()


@pytest.mark.parametrize("mode", ["wait", "abort"])
def test_modes_where_a_thread_drives(mode: Any, model: Any, engine: Engine) -> None:
    engine.start()
    handles = [engine.submit(prompt, **LONG) for prompt in PROMPTS[1:3]]
    engine.pause(mode=mode)
    assert all(handle.done for handle in handles)
    engine.resume()
    assert answers(engine.submit(PROMPTS[0], **SHORT).result(GUARD)) == alone(model, PROMPTS[0], **SHORT)


def test_keep_continues_where_requests_are(model: Any, engine: Engine) -> None:
    """Nothing is computed again while the weights stay the same."""
    expected = [alone(model, prompt, **LONG) for prompt in PROMPTS[1:3]]
    handles = begun(engine)
    engine.pause(mode="keep")
    assert any(usage["held"] for usage in engine.stats()["blocks"].values())
    engine.resume()
    assert [answers(handle.result()) for handle in handles] == expected
    assert engine.stats()["recomputed"] == 0


def continued(model: Any, handle: Any, had: int) -> bool:
    """True if the tokens behind the first ones are those of the weights of now, given all before them."""
    tokens = handle.result().sequences[0].token_ids
    ids = torch.tensor([handle.result().prompt_token_ids + tokens])
    with torch.no_grad():
        best = model(ids).logits[0].argmax(-1)[-len(tokens) - 1 : -1].tolist()
    return best[had:] == tokens[had:]


def test_weights_that_change_under_kept_requests_are_seen(model: Any, engine: Engine) -> None:
    """C24: kept keys and values are of the old weights, so they are computed again."""
    handles = begun(engine)
    engine.pause(mode="keep")
    change(model)
    had = [sum(len(each.token_ids) for each in handle.read()) for handle in handles]
    engine.resume()
    assert all(continued(model, handle, count) for handle, count in zip(handles, had, strict=True))
    assert engine.stats()["recomputed"] > 0


def change_unmarked(model: Any) -> None:
    """Other weights, written where torch does not count."""
    for parameter in model.parameters():
        parameter.data.mul_(-0.7)


def change_buffers(model: Any) -> None:
    """Other weights of layers that keep theirs in buffers, as some quantized ones do."""
    for layer in model.model.layers:
        layer.self_attn.k_proj.levels.copy_(layer.self_attn.k_proj.levels.flip(0))


def change_adapter(model: Any) -> None:
    change([parameter for name, parameter in model.named_parameters() if "lora_" in name])


class Rounded(torch.nn.Module):
    """A layer in 8 bits, all of whose tensors are buffers."""

    def __init__(self, plain: torch.nn.Linear) -> None:
        super().__init__()
        scale = plain.weight.detach().abs().amax() / 127
        self.register_buffer("levels", (plain.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.levels * self.scale).t()


def with_rounded_keys() -> Any:
    model = build(BY_NAME["llama"])
    for layer in model.model.layers:
        layer.self_attn.k_proj = Rounded(layer.self_attn.k_proj)
    return model


@pytest.mark.parametrize(
    ("make", "act"),
    [
        (lambda: build(BY_NAME["llama"]), change_unmarked),
        (with_rounded_keys, change_buffers),
        (adapted, change_adapter),
        (adapted, change_unmarked),
    ],
    ids=["unmarked", "buffers", "adapter", "adapter, unmarked"],
)
def test_any_change_under_kept_requests_is_seen(make: Any, act: Any) -> None:
    """C24: behind pause("keep"), requests of changed weights or adapters are computed again, and none ends."""
    model = make()
    with Engine(model, block_size=4, num_blocks=120) as engine:
        handles = begun(engine)
        engine.pause(mode="keep")
        act(model)
        had = [sum(len(each.token_ids) for each in handle.read()) for handle in handles]
        engine.resume()
        assert all(continued(model, handle, count) for handle, count in zip(handles, had, strict=True))
        assert engine.stats()["recomputed"] > 0
        engine.check()


def test_an_adapter_changes_and_its_keys_and_values_are_kept() -> None:
    """weights_changed(kv="keep") is for adapters, too: their requests go on, with the adapter as it is now."""
    model = adapted()
    with Engine(model, block_size=4, num_blocks=120) as engine:
        handles = begun(engine)
        engine.pause(mode="keep")
        change_adapter(model)
        engine.weights_changed(kv="keep")
        engine.resume()
        assert [handle.result().finish_reason for handle in handles] == ["length"] * 2
        stats = engine.stats()
        assert (stats["recomputed"], stats["kv_kept"]) == (0, 1)
        expected = alone(model, PROMPTS[1], **SHORT)
        assert answers(engine.submit(PROMPTS[1], **SHORT).result()) == expected
        engine.check()


@pytest.mark.parametrize("marked", [True, False])
def test_an_adapter_of_a_request_that_waits_changes_under_kept_ones(marked: bool) -> None:
    """C24: it finds no block of the adapter as it was when it came."""
    model = adapted(lora(), lora())
    prompt = PROMPTS[3]
    with Engine(model, block_size=4, num_blocks=120, max_batch_sequences=2) as engine:
        engine.submit(prompt, adapter="one", **SHORT).result()
        ends = {"min_new_tokens": 12, "max_new_tokens": 12}
        running = [
            engine.submit(PROMPTS[1], adapter=None, **LONG),
            engine.submit(PROMPTS[2], adapter=None, **{**LONG, **ends}),
        ]
        for _ in range(4):
            engine.step()
        late = engine.submit(prompt, adapter="one", **SHORT)
        for _ in range(2):
            engine.step()
        assert (engine.stats()["running"], engine.stats()["waiting"]) == (2, 1)
        engine.pause(mode="keep")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ".one." in name:
                    (parameter if marked else parameter.data).mul_(-0.7)
        engine.resume()
        found = late.result()
        assert found.cached_tokens == 0
        for handle in running:
            handle.result()
    model.set_adapter("one")
    assert answers(found) == alone(model, prompt, **SHORT)


def test_what_preempted_requests_of_an_adapter_have_on_the_host_is_kept() -> None:
    """weights_changed(kv="keep"): they come back from the host as those without an adapter do."""
    model = adapted()
    sizes = {"block_size": 4, "num_blocks": 24, "host_blocks": 60, "max_batch_sequences": 4}
    with Engine(model, preemption="swap", **sizes) as engine:
        handles = [engine.submit(prompt, adapter="one", **LONG) for prompt in PROMPTS[1:4]]
        while not engine.stats()["swapped_out"]:
            engine.step()
        engine.pause(mode="keep")
        change_adapter(model)
        engine.weights_changed(kv="keep")
        engine.resume()
        assert [handle.result().error for handle in handles] == [None] * 3
        stats = engine.stats()
        assert (stats["recomputed"], stats["swapped_in"]) == (0, stats["swapped_out"])
        engine.check()


def test_a_part_of_a_large_weight_changes_under_kept_requests(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind pause("keep") all of the weights are read, not samples and a part in its turn."""
    for name, number in {"TURN": {"cpu": 4096}, "PIECE": 256, "SMALL": 64, "SAMPLES": 8}.items():
        monkeypatch.setattr(weights_digest, name, number)
    with Engine(model, block_size=4, num_blocks=120) as engine:
        for kept in (False, True):
            handles = begun(engine)
            before = engine.stats()["recomputed"]
            engine.pause(mode="keep")
            words = model.model.layers[0].self_attn.k_proj.weight.data.view(-1)
            words[1 + len(words) // 8 :][:3] += 40.0  # between two samples
            if kept:
                engine.weights_changed(kv="keep")
            engine.resume()
            for handle in handles:
                handle.result()
            assert (engine.stats()["recomputed"] == before) is kept


def test_keys_and_values_are_kept_by_name_only(model: Any, engine: Engine) -> None:
    """weights_changed(kv="keep"): requests continue on old keys and values, prompts begin with old blocks."""
    handles = begun(engine, 1)
    engine.pause(mode="keep")
    before = copy.deepcopy(model.state_dict())
    change(model)
    engine.weights_changed(kv="keep")
    engine.resume()
    handles[0].result()
    stats = engine.stats()
    assert (stats["recomputed"], stats["kv_kept"], stats["weights_changed"]) == (0, 1, 1)
    found = engine.submit(PROMPTS[1], **SHORT).result()
    assert found.cached_tokens > 0
    engine.weights_changed()
    assert engine.submit(PROMPTS[1], **SHORT).result().cached_tokens == 0
    model.load_state_dict(before)
    assert answers(engine.submit(PROMPTS[1], **SHORT).result()) == alone(model, PROMPTS[1], **SHORT)


def test_weights_changed_wants_a_pause(engine: Engine) -> None:
    begun(engine)
    with pytest.raises(RuntimeError, match="call pause"):
        engine.weights_changed()
    for name, call in (
        ("mode", lambda: engine.pause(mode="drain")),
        ("kv", lambda: engine.weights_changed(kv="old")),
        ("level", lambda: engine.sleep(3)),
    ):
        with pytest.raises(ValueError, match=name):
            call()


def test_unmarked_writes_are_told(model: Any, engine: Engine) -> None:
    """`.data += x` leaves no mark; weights_changed() drops what was computed before."""
    engine.generate([PROMPTS[3]], **SHORT)
    for parameter in model.parameters():
        parameter.data += 0.1
    engine.weights_changed()
    found = engine.submit(PROMPTS[3], **SHORT).result()
    assert found.cached_tokens == 0
    assert answers(found) == alone(model, PROMPTS[3], **SHORT)


def test_weights_are_loaded_in_place(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under requests and between them; captured steps stay and read the new weights."""
    monkeypatch.setitem(RECORDERS, "cpu", record)
    policy(monkeypatch, least_steps=2)
    other = copy.deepcopy(model)
    change(other, seed=7)
    with Engine(model, block_size=4, num_blocks=120) as engine:
        engine.generate(PROMPTS[1:3], **LONG)
        captured = engine.stats()["graphs"]["captured"]
        handles = begun(engine)
        had = [sum(len(each.token_ids) for each in handle.read()) for handle in handles]
        names = engine.load_weights(
            (f"base_model.model.{name}", each) for name, each in other.named_parameters()
        )
        assert names == {name for name, _ in model.named_parameters()}
        assert all(continued(other, handle, count) for handle, count in zip(handles, had, strict=True))
        found = engine.generate(PROMPTS[1:3], **LONG)
        assert [answers(each) for each in found] == [alone(other, each, **LONG) for each in PROMPTS[1:3]]
        assert engine.stats()["graphs"]["captured"] == captured


def test_weights_of_another_model_are_refused(model: Any, engine: Engine) -> None:
    name, tensor = next(iter(model.named_parameters()))
    with pytest.raises(ValueError, match="other names"):
        engine.load_weights([("model.nothing.weight", tensor)])
    with pytest.raises(ValueError, match="of shape"):
        engine.load_weights([(name, tensor[:1])])
    for dtype in (torch.int8, torch.float8_e4m3fn):
        with pytest.raises(ValueError, match=f"in {dtype}, expected torch.float32"):
            engine.load_weights([(name, tensor.to(dtype))])
    no_weights: list[Any] = ["model.safetensors", Path("model.safetensors"), None]
    for wrong in no_weights:
        with pytest.raises(TypeError, match=r"load_weights got .*; give a state dict"):
            engine.load_weights(wrong)
    with pytest.raises(TypeError, match="as ndarray, expected a tensor"):
        engine.load_weights([(name, tensor.detach().numpy())])
    assert answers(engine.submit(PROMPTS[1], **SHORT).result()) == alone(model, PROMPTS[1], **SHORT)


def test_floats_are_not_loaded_into_quantized_weights() -> None:
    """Their numbers mean nothing without scales: cut to whole ones most of them would be zero."""
    model = with_rounded_keys()
    floats = build(BY_NAME["llama"]).model.layers[0].self_attn.k_proj.weight
    with Engine(model, block_size=4, num_blocks=60) as engine:
        with pytest.raises(ValueError, match=r"in torch\.float32, expected torch\.int8"):
            engine.load_weights([("model.layers.0.self_attn.k_proj.levels", floats)])
        assert engine.load_weights(model.state_dict()) == set(model.state_dict())


def test_names_of_compiled_layers(model: Any) -> None:
    """torch.compile puts a word into their names, which a trainer's need not have, and the reverse."""
    plain = copy.deepcopy(model)
    change(plain)
    model.model.layers[0] = torch.compile(model.model.layers[0], backend="eager")
    assert load_into(model, plain.state_dict().items()) == set(model.state_dict())
    assert load_into(plain, model.state_dict().items()) == set(plain.state_dict())


def test_names_of_layers_with_adapters() -> None:
    """peft puts a word into their names, which those of the model's checkpoint do not have."""
    model = adapted()
    plain = build(BY_NAME["llama"])
    change(plain)
    loaded = load_into(model.get_base_model(), plain.state_dict())
    assert len(loaded) == len(plain.state_dict())
    assert any(".base_layer." in name for name in loaded)
    ids = torch.tensor([PROMPTS[1]])
    with model.disable_adapter():
        assert torch.equal(model(ids).logits, plain(ids).logits)
    base = {name: each for name, each in model.get_base_model().state_dict().items() if "lora_" not in name}
    assert load_into(plain, base) == set(plain.state_dict())


def test_a_model_made_in_inference_mode(model: Any) -> None:
    """Torch does not count writes to its tensors: the content says what has changed (C24)."""
    with torch.inference_mode():
        made = copy.deepcopy(model)
    with Engine(made, block_size=4, num_blocks=60) as engine:
        for _ in range(2):
            found = engine.submit(PROMPTS[1], **SHORT).result()
            assert answers(found) == alone(made, PROMPTS[1], **SHORT)
            with torch.inference_mode():
                change(made)


def test_a_peft_model_made_in_inference_mode() -> None:
    with torch.inference_mode():
        model = adapted()
    with Engine(model, block_size=4, num_blocks=60) as engine:
        found = engine.submit(PROMPTS[1], **SHORT).result()
    assert answers(found) == alone(model, PROMPTS[1], **SHORT)


@pytest.mark.parametrize("level", [1, 2])
def test_asleep_the_pools_are_gone(model: Any, engine: Engine, level: int) -> None:
    handles = begun(engine)
    assert memory_of(model).bytes
    engine.sleep(level)
    engine.sleep(1)  # no deeper one ends with it
    assert engine.stats()["asleep"] == level
    assert memory_of(model).bytes == 0
    with pytest.raises(RuntimeError, match="paused"):
        engine.step()
    engine.wake_up()
    assert engine.stats()["asleep"] == 0
    for handle, prompt in zip(handles, PROMPTS[1:3], strict=True):
        assert answers(handle.result()) == alone(model, prompt, **LONG)


class OnDevice:
    """A weight on a device. An interrupt comes at its first move, if it is told so."""

    device = torch.device("cuda")

    def __init__(self, interrupts: bool) -> None:
        self.interrupts = interrupts
        self.data = self
        self.place = "cuda"

    def cpu(self) -> OnDevice:
        if self.interrupts:
            self.interrupts = False
            raise KeyboardInterrupt
        self.place = "cpu"
        return self

    def to(self, device: torch.device) -> OnDevice:
        self.place = device.type
        return self


@pytest.mark.parametrize("again", [False, True])
def test_an_interrupt_on_the_way_to_the_host(
    engine: Engine, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C22: what has moved already comes back, also if the rest moves later."""
    weights = [OnDevice(interrupts) for interrupts in (False, True, False)]

    def found(model: Any) -> list[Any]:
        return [(each, each.device) for each in weights if each.place != "cpu"]

    monkeypatch.setattr("hf_paged.engine.lifecycle.on_devices", found)
    with pytest.raises(KeyboardInterrupt):
        engine.sleep(2)
    if again:
        engine.sleep(2)
        assert [each.place for each in weights] == ["cpu"] * 3
    engine.wake_up()
    assert [each.place for each in weights] == ["cuda"] * 3


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def storages_like(tensor: torch.Tensor) -> int:
    """How many storages of live tensors have the shape of one."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter)]
    return len({each.data_ptr() for each in tensors if each.shape == tensor.shape})


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
def test_memory_is_flat_over_rollouts_and_steps(model: Any) -> None:
    """Rollout, loss, step, 80 times: the pool, the captured steps, the books and the process stay as large as they
    are, no token is stale, and the weights are there once.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    model.train()
    seen = set()
    sizes = []
    ids = torch.tensor([PROMPTS[1]])
    way = {"max_new_tokens": 3, "do_sample": False}
    weight = model.model.layers[0].mlp.up_proj.weight
    before = storages_like(weight)
    with Engine(model, block_size=4, num_blocks=60) as engine:
        for i in range(80):
            outputs = engine.generate(PROMPTS[1:3], **way)
            if i % 8 == 0:
                assert [answers(each) for each in outputs] == [
                    alone(model, each, **way) for each in PROMPTS[1:3]
                ]
                sizes.append(resident())
            model(ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if i:
                usage = engine.stats()["blocks"]["full"]
                seen.add((usage["bytes"], usage["total"], usage["held"]))
        assert storages_like(weight) == before
    assert len(seen) == 1
    assert sizes[-1] - sizes[2] < 2**19, sizes
    assert model.training
