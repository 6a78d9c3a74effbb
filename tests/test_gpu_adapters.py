"""Adapters in captured steps on a GPU, in float32: the tokens of peft alone."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from adapters import adapted, lora
from releases import prefixes_are_ignored
from transformers import LlamaConfig, LlamaForCausalLM

from hf_paged import Engine
from hf_paged.model.adapters.loading import HostAdapter
from hf_paged.model.capture.replay import captures_of

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
NAMES = ["one", "two", "three"]
NEW = 40


@pytest.fixture(autouse=True)
def full_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


@pytest.fixture
def model() -> Any:
    """Wide enough for shrinks in parts, with adapters of other ranks and targets."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=1024, intermediate_size=2048, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=512, max_position_embeddings=1024, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    made = peft.get_peft_model(
        LlamaForCausalLM(config).cuda().eval(), lora(r=16, lora_alpha=4), adapter_name="one"
    )
    made.add_adapter("two", lora(r=3, lora_alpha=4, use_rslora=True))
    made.add_adapter("three", lora(r=72, lora_alpha=8, target_modules=["q_proj", "down_proj", "lm_head"]))
    return made.cuda().eval()


def ids(rows: int, length: int = 24, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 500, (rows, length), generator=torch.Generator().manual_seed(seed)).cuda()


def generate(model: Any, given: torch.Tensor, paged: bool, **options: Any) -> list[list[int]]:
    torch.manual_seed(0)
    call = {
        "input_ids": given,
        "attention_mask": torch.ones_like(given),
        "max_new_tokens": NEW,
        "do_sample": False,
    }
    out = model.generate(**{**call, **options}, **({"cache_implementation": "paged"} if paged else {}))
    return list(out[:, given.shape[1] :].tolist())


MODES: dict[str, dict[str, Any]] = {
    "greedy": {}, "beams": {"num_beams": 3}, "sampled": {"do_sample": True, "top_k": 20},
}  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
def test_generate_by_names(model: Any, mode: str) -> None:
    """Mixed rows, another mix on the same captured steps, and none of them."""
    given = ids(5)
    for names in (
        ["one", "two", "__base__", "three", "one"],
        ["__base__"] * 5,
        ["three", "one", "two", "two", "one"],
    ):
        for _ in range(2):
            found = generate(model, given, True, adapter_names=names, **MODES[mode])
            assert found == generate(model, given, False, adapter_names=names, **MODES[mode])
    assert captures_of(model.get_base_model()).pool.counts["replayed"] > 3 * NEW


def test_one_captured_step_serves_every_adapter(model: Any) -> None:
    """Switching, disabling and training in place need no new capture, and give what peft gives."""
    given = ids(4)
    steps = captures_of(model.get_base_model()).pool
    for _ in range(3):
        generate(model, given, True)
    captured = steps.counts["captured"]
    assert captured
    for name in NAMES:
        model.set_adapter(name)
        replayed = steps.counts["replayed"]
        assert generate(model, given, True) == generate(model, given, False)
        assert steps.counts["replayed"] >= replayed + NEW - 4  # the first ones are checked
    with model.disable_adapter():
        assert generate(model, given, True) == generate(model, given, False)
    model.base_model.set_adapter(["one", "two"])
    assert generate(model, given, True) == generate(model, given, False)
    model.set_adapter("two")
    before = generate(model, given, True)
    with torch.no_grad():
        for module in model.modules():
            if hasattr(module, "lora_B") and "two" in module.lora_B:
                module.lora_B["two"].weight.data.mul_(-2.0)
    after = generate(model, given, True)
    assert after == generate(model, given, False) != before
    assert steps.counts["captured"] == captured


@pytest.mark.parametrize("peft_model", [True, False], ids=["in the model", "added"])
def test_the_engine(model: Any, peft_model: bool) -> None:
    """Captured steps of mixed adapters, more of them than places, chunks beside decoding rows."""
    wanted = [*NAMES, None] * 4
    expected = []
    for i, name in enumerate(wanted):
        expected += generate(model, ids(1, 20 + 7 * i, seed=i), False, adapter_names=[name or "__base__"])
    states = {name: peft.get_peft_model_state_dict(model, adapter_name=name) for name in NAMES}
    target = model if peft_model else model.unload()
    for places in (2, 8):
        with Engine(target, max_batch_sequences=8, max_batch_tokens=64, max_adapters=places) as engine:
            if not peft_model:
                for name in NAMES:
                    engine.add_adapter(name, states[name], lora(**OPTIONS[name]))
            for _ in range(2):
                handles = [
                    engine.submit(
                        ids(1, 20 + 7 * i, seed=i)[0].tolist(),
                        max_new_tokens=NEW,
                        do_sample=False,
                        adapter=name,
                    )
                    for i, name in enumerate(wanted)
                ]
                found = [list(handle.result().sequences[0].token_ids) for handle in handles]
                assert found == expected
            stats = engine.stats()["graphs"]
            assert stats["replayed"] > NEW, stats
            assert any("adapters" in form for form in stats["sizes"]), stats
            engine.check()


def test_memory_that_another_stream_cannot_have(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that the stream of steps has freed may be kept for it, which then brings adapters."""
    given = ids(1)
    expected = generate(model, given, False, adapter_names=["one"])
    state = peft.get_peft_model_state_dict(model, adapter_name="one")
    with Engine(model.unload(), max_adapters=2) as engine:
        engine.add_adapter("one", state, lora(**OPTIONS["one"]))
        engine.add_adapter("two", state, lora(**OPTIONS["one"]))
        steps, copies = torch.cuda.current_stream(), HostAdapter.copy_to
        streams = []

        def copy_to(self: HostAdapter, device: torch.device) -> Any:
            streams.append(torch.cuda.current_stream())
            if streams[-1] != steps:
                raise torch.OutOfMemoryError("none for this stream")
            return copies(self, device)

        monkeypatch.setattr(HostAdapter, "copy_to", copy_to)
        for name in ("one", "two"):
            options = {"max_new_tokens": NEW, "do_sample": False, "adapter": name}
            handle = engine.submit(given[0].tolist(), **options)
            assert [list(handle.result().sequences[0].token_ids)] == expected
        assert len(streams) == 4
        assert streams[1] == streams[3] == steps


OPTIONS: dict[str, dict[str, Any]] = {
    "one": {"r": 16, "lora_alpha": 4},
    "two": {"r": 3, "lora_alpha": 4, "use_rslora": True},
    "three": {"r": 72, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj", "lm_head"]},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bf16_follows_peft_within_rounding(dtype: torch.dtype) -> None:
    """Logits in half precision, by kernels and by peft, lie as close as rounding explains; with adapters in
    float32, as peft makes them, and in the model's type.
    """
    model = adapted(lora(r=16), lora(r=8)).to(torch.bfloat16).cuda()
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(dtype)
    base = model.get_base_model()
    from hf_paged.kv.ops import triton_package
    from hf_paged.model.adapters import AdapterBatch, AdapterTable, applied
    from hf_paged.model.snapshot import ModelSnapshot

    lora_layers = ModelSnapshot(base).lora
    table = AdapterTable(
        2, torch.device("cuda"), triton_package("auto", torch.device("cuda"), torch.bfloat16)
    )
    for slot, name in enumerate(("one", "two")):
        table.put(slot, lora_layers.read(name))
    given = torch.randint(3, 90, (3, 16), device="cuda")
    with torch.no_grad():
        with applied(lora_layers.layers, AdapterBatch(table, [0, 1, -1])):
            found = base(input_ids=given).logits
        expected = model(input_ids=given, adapter_names=["one", "two", "__base__"]).logits
        whole = model.float()(input_ids=given, adapter_names=["one", "two", "__base__"]).logits
    far = (expected - whole).abs().max()
    assert (found - whole).abs().max() <= 2 * far + 1e-2


def test_steps_of_one_adapter_round_alike_with_and_without_a_graph() -> None:
    """No captured step is refused because its kernels round in another way than the forward outside of it."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=4096, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    base = LlamaForCausalLM(config).to(torch.bfloat16).cuda().eval()
    model = peft.get_peft_model(base, lora(r=16, lora_alpha=16)).eval()
    with Engine(model, max_batch_sequences=8, prefix_caching=False) as engine:
        for length in (16, 32, 64, 128):
            for seed in range(5):
                engine.generate([ids(1, length, seed=seed)[0].tolist()], max_new_tokens=2, do_sample=False)
        stats = engine.stats()["graphs"]
        assert stats["replayed"] > 8, stats
        assert not stats.get("refused"), stats
    for seed in range(3):
        generate(model, ids(4, seed=seed), True)
    pool = captures_of(base).pool
    assert pool.counts["replayed"] > NEW
    assert not pool.reasons


LATE = {"task_type": "CAUSAL_LM", "alora_invocation_tokens": [501, 502]}
IN_FRONT: dict[str, Any] = {
    "aLoRA": lambda: lora(r=16, lora_alpha=4, **LATE),
    "prompt tuning": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=21),
    "prefix tuning": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=21),
}


@pytest.mark.parametrize("kind", IN_FRONT)
def test_adapters_of_a_part_of_the_sequence(kind: str) -> None:
    """Chunks that end where an aLoRA begins, virtual tokens in blocks, keys and values that are written; the
    second round replays captured steps and begins with cached blocks. In generate() the prefix lies in pages.
    """
    if kind != "aLoRA" and prefixes_are_ignored():
        pytest.skip("peft hands virtual tokens over under an older name than this release reads")
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=512, max_position_embeddings=1024, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = peft.get_peft_model(LlamaForCausalLM(config).cuda().eval(), IN_FRONT[kind](), "one").cuda().eval()
    given = ids(6)
    given[:, 10:12] = torch.tensor([501, 502])
    paged = kind == "prefix tuning"
    expected = [generate(model, row[None], False)[0] for row in given]
    assert [generate(model, row[None], paged)[0] for row in given] == expected
    with Engine(model, num_blocks=200, max_batch_tokens=64) as engine:
        for _ in range(2):
            handles = [engine.submit(row.tolist(), max_new_tokens=NEW, do_sample=False) for row in given]
            found = [list(handle.result().sequences[0].token_ids) for handle in handles]
            assert found == expected
        engine.check()
