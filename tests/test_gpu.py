"""Stock against pages on a CUDA device, in float32 and bfloat16: the same tokens up to ties that rounding
explains.

PYTHONPATH=.:tests python -m pytest tests/test_gpu.py
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from captures import counts, forms, policy, reasons, why_not_compiled
from compare import assert_clean
from engine_logprobs import assert_own_logprobs
from families import BY_NAME, FAMILIES, VOCABULARY, build
from paged_layer import Paged
from router_ties import first_ties, judge_beams, router_margins, routers
from transformers import Gemma4ForCausalLM, Gemma4TextConfig

from hf_paged.checking.ties import NOISE, judge
from hf_paged.engine import Engine
from hf_paged.model.capture.branches import at_once, beside
from hf_paged.model.capture.products import fused_parameters
from hf_paged.model.registry import memory_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

LOGITS = {"return_dict_in_generate": True, "output_logits": True}
CALLS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False, **LOGITS},
    "sample": {"do_sample": True, "num_return_sequences": 2, **LOGITS},
    "beams": {
        "do_sample": False,
        "num_beams": 4,
        "num_return_sequences": 2,
        "return_dict_in_generate": True,
        "output_scores": True,
    },
    "lookup": {"do_sample": False, "prompt_lookup_num_tokens": 3, **LOGITS},
    "chunks": {"do_sample": False, "prefill_chunk_size": 5, **LOGITS},
}
BOTH = ("greedy", "beams")
NEW = 14
"""Tokens of a call: enough for replays behind the first steps."""
CAPTURED = dict.fromkeys(
    ("llama", "qwen2", "qwen3", "mistral-window", "gemma2", "gemma3", "phi3", "gpt-neox", "gpt2"), BOTH
)
CAPTURED["gpt-oss"] = ("greedy",)  # more rows than its experts take one by one make it wait for their counts
"""Calls whose steps must come from a graph."""


@pytest.fixture(scope="module", autouse=True)
def _full_float32() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are captured in calls as short as these."""
    policy(monkeypatch, least_steps=4)


CELLS = [
    (family.name, call)
    for family in FAMILIES
    for call in CALLS
    if not (family.seq2seq and call in ("lookup", "chunks"))
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize(("name", "call"), CELLS, ids=[f"{name}-{call}" for name, call in CELLS])
def test_same_up_to_ties(name: str, call: str, kernels: str, padded: bool, dtype: torch.dtype) -> None:
    family = BY_NAME[name]
    model = build(family).to("cuda", dtype)
    setting = model.config._attn_implementation
    rows = 1 if call == "lookup" else 3
    if padded and rows == 1:
        padded = False
    ids = torch.randint(5, VOCABULARY, (rows, 13), generator=torch.Generator().manual_seed(2)).cuda()
    mask = torch.ones_like(ids)
    if padded:
        mask[(0, slice(9, None)) if family.seq2seq else (0, slice(4))] = 0
    arguments = {
        "input_ids": ids,
        "attention_mask": mask,
        "max_new_tokens": NEW,
        "min_new_tokens": NEW,
        **CALLS[call],
    }
    answers = []
    with router_margins(model) as margins:
        torch.manual_seed(0)
        answers.append(model.generate(**arguments))
    comparable = None
    if margins and call in ("greedy", "sample", "chunks"):
        repeated = mask.repeat_interleave(answers[0].sequences.shape[0] // rows, 0)
        comparable = first_ties(margins, NOISE[dtype], repeated, len(routers(model)), NEW)
    torch.manual_seed(0)
    answers.append(
        model.generate(
            **arguments, cache_implementation="paged", cache_config={"block_size": 4, "kernels": kernels}
        )
    )
    prompt = 1 if family.seq2seq else ids.shape[1]
    if call == "beams":
        verdict = judge_beams(*answers, NOISE[dtype])
    else:
        verdict = judge(*answers, prompt, NOISE[dtype], comparable, drawn=call == "sample")
    assert verdict.mark != "X", verdict.why
    if call in CAPTURED.get(name, ()):
        assert counts(model)["replayed"] > 5, reasons(model)
    answers.clear()
    assert_clean(model, setting)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype)[6:]
)
@pytest.mark.parametrize(
    "dims", [(64, 64), (128, 128), (96, 64), (80, 80), (256, 256), (512, 512), (8, 8)], ids=str
)
def test_kernels_over_any_history(dims: tuple[int, int], dtype: torch.dtype) -> None:
    """C3, C10, C14: appends, forks, reorders and crops, read by the kernels in place, against the formula in
    float64.
    """
    # Every other constant is another kernel to compile, so a walk keeps its own and changes what the kernels
    # read from memory.
    for seed, (size, window, heads, softcap, sinks) in enumerate(
        [(16, None, 8, None, False), (4, 17, 4, 3.0, True), (1, None, 2, None, False)]
    ):
        rng = random.Random(seed)
        torch.manual_seed(seed)
        count = rng.randint(1, 5)
        starts = rng.choice([None, [rng.randint(0, 9) for _ in range(count)]])
        layer = Paged(count, size, window, starts, dims=dims, kernels="triton", device="cuda", dtype=dtype)
        layer.rows.keep_past = window is not None
        for _ in range(16):
            pages = layer.step(rng.choice([1, 1, 1, 2, 6, 40]))
            tolerance = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
            layer.assert_attends(pages, heads, softcap, sinks, tolerance)
            move = rng.choice(["on", "reorder", "fork", "crop"])
            if move == "reorder":
                layer.reorder([rng.randrange(layer.count) for _ in range(layer.count)])
            elif move == "fork" and layer.count < 9:
                layer.reorder([row for row in range(layer.count) for _ in range(2)])
            elif move == "crop":
                layer.crop(rng.randint(0, min(pages.batch.new, layer.rows.columns - 1)))
            layer.group.pool.check()
        layer.rows.free()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_layers_with_wider_heads(dtype: torch.dtype) -> None:
    """Gemma 4's full layers have heads of 512, those with windows heads of 256: all steps are captured."""
    size: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6}
    config = Gemma4TextConfig(
        **size, num_attention_heads=4, num_key_value_heads=2, hidden_size_per_layer_input=0,
        vocab_size=96, vocab_size_per_layer_input=96, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Gemma4ForCausalLM(config).to("cuda", dtype).eval()
    for layer in (
        model.model.layers
    ):  # scores of this size come from trained weights: the code divides them by nothing
        norm = layer.self_attn.q_norm
        norm.weight.data.fill_(norm.weight.numel() ** -0.5)
    ids = torch.randint(5, 90, (3, 70), device="cuda")
    for call, judged in (("greedy", judge), ("beams", judge_beams)):
        arguments = {"inputs": ids, "max_new_tokens": 24, "min_new_tokens": 24, **CALLS[call]}
        answers = [model.generate(**arguments, **word) for word in ({}, {"cache_implementation": "paged"})]
        prompt = [ids.shape[1]] if call == "greedy" else []
        verdict = judged(*answers, *prompt, NOISE[dtype])
        assert verdict.mark != "X", verdict.why
    assert counts(model)["replayed"] > 5, reasons(model)


def test_kernels_are_chosen() -> None:
    """The attention that the user asked for is the one that runs."""
    model = build(BY_NAME["llama"]).cuda()
    ids = torch.randint(5, VOCABULARY, (2, 9)).cuda()
    for kernels, expected in (("auto", "Ops"), ("triton", "TritonOps"), ("torch", "Ops")):
        options = {
            "cache_implementation": "paged",
            "cache_config": {"kernels": kernels},
            "return_dict_in_generate": True,
        }
        cache = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, **options
        ).past_key_values
        assert type(cache.layers[0]._pages().ops).__name__ == expected


def test_float32_beams_are_identical() -> None:
    """In float32 the beams themselves agree on the device, not only their scores."""
    for name in ("llama", "gemma3", "gpt-oss", "bart"):
        model = build(BY_NAME[name]).cuda()
        ids = torch.randint(5, VOCABULARY, (4, 17), generator=torch.Generator().manual_seed(4)).cuda()
        arguments = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "num_beams": 4,
            "max_new_tokens": 24,
            "do_sample": False,
        }
        assert torch.equal(
            model.generate(**arguments), model.generate(**arguments, cache_implementation="paged")
        )


ENGINE_WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "processed": {"do_sample": False, "repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
    "beams": {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
    "samples": {"do_sample": True, "num_return_sequences": 2, "top_k": 30, "temperature": 1.2, "seed": 3},
}
ENGINE_NEW = 32


def engine_answers(
    engine: Engine, prompts: list[list[int]], ways: list[str]
) -> dict[tuple[str, int], list[list[int]]]:
    """The answers of all prompts in all ways, computed at once."""
    handles = {
        (way, i): engine.submit(
            prompt, max_new_tokens=ENGINE_NEW, min_new_tokens=ENGINE_NEW, **ENGINE_WAYS[way]
        )
        for way in ways
        for i, prompt in enumerate(prompts)
    }
    outputs = {place: handle.result() for place, handle in handles.items()}
    assert [output.error for output in outputs.values()] == [None] * len(outputs)
    return {place: [sequence.token_ids for sequence in output.sequences] for place, output in outputs.items()}


@pytest.mark.parametrize("form", ["rows", "spans"])
@pytest.mark.parametrize("name", ["llama", "qwen2-window", "gemma3", "gpt-oss", "mistral-window", "gpt2"])
def test_the_engine_answers_as_generate(name: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy, processed, beams and samples in one engine, its decoding steps from graphs: in float32 the
    tokens of generate().
    """
    if form == "spans":
        policy(monkeypatch, pairs=0)
    model = build(BY_NAME[name]).cuda()
    draw = torch.Generator().manual_seed(6)
    prompts = [torch.randint(5, VOCABULARY, (length,), generator=draw).tolist() for length in (5, 23, 40)]
    options = {"max_batch_tokens": 64, "max_batch_sequences": 32, "prefix_caching": form == "rows"}
    with Engine(model, block_size=4, num_blocks=400, **options) as engine:
        found = engine_answers(engine, prompts, list(ENGINE_WAYS))
        for _ in range(4 if form == "spans" else 0):  # until graphs for the same chunks are there and trusted
            assert engine_answers(engine, prompts, list(ENGINE_WAYS)) == found
        if name != "gpt-oss":  # more rows than its experts take one by one make it wait for their counts
            assert engine.stats()["graphs"].get("replayed", 0) > 5, reasons(engine)
            assert form == "rows" or "spans" in forms(engine), reasons(engine)
        engine.check()
    for (way, i), rows in found.items():
        if way != "samples":
            ids = torch.tensor([prompts[i]], device="cuda")
            right = model.generate(
                ids, max_new_tokens=ENGINE_NEW, min_new_tokens=ENGINE_NEW, **ENGINE_WAYS[way]
            )
            assert rows == right[:, ids.shape[1] :].tolist(), (way, i)
    with Engine(model, num_blocks=400, graphs=False, prefix_caching=False) as engine:
        for i, prompt in enumerate(prompts):
            assert engine_answers(engine, [prompt], ["samples"])["samples", 0] == found["samples", i]


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "qwen2-window", "gemma3", "mistral-window", "gpt-neox", "gpt2"])
def test_compiled_layers_answer_as_generate(name: str, dtype: torch.dtype, kernels: str) -> None:
    """Every captured step is compiled: in float32 the tokens of generate(), else what one forward thinks of
    them.
    """
    model = build(BY_NAME[name]).to("cuda", dtype)
    draw = torch.Generator().manual_seed(6)
    prompts = [torch.randint(5, VOCABULARY, (length,), generator=draw).tolist() for length in (5, 23, 40)]
    options = {"max_new_tokens": ENGINE_NEW, "min_new_tokens": ENGINE_NEW, "do_sample": False}
    with Engine(
        model, block_size=4, num_blocks=400, max_batch_tokens=64, kernels=kernels, compile=True
    ) as engine:
        outputs = [engine.submit(prompts[0], logprobs=1, **options).result()]
        outputs += [
            handle.result() for handle in [engine.submit(prompt, logprobs=1, **options) for prompt in prompts]
        ]
        found = counts(engine)
        assert why_not_compiled(engine) is None
        assert found["compiled"] == found["captured"] > 1, reasons(engine)
        assert found["replayed"] > 5, reasons(engine)
    for prompt, output in zip([prompts[0], *prompts], outputs, strict=True):
        assert_own_logprobs(model, output)
        if dtype == torch.float32:
            ids = torch.tensor([prompt], device="cuda")
            assert output.sequences[0].token_ids == model.generate(ids, **options)[0, len(prompt) :].tolist()


ENDING = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from hf_paged import Engine

sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 512}
config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
model = LlamaForCausalLM(config).to("cuda", torch.bfloat16).eval()
engine = Engine(model)
engine.submit(list(range(5, 40)), max_new_tokens=12, min_new_tokens=12).result()
if CLOSES:
    engine.close()
print("answered", flush=True)
"""


@pytest.mark.parametrize("closes", [True, False], ids=["closed", "left open"])
def test_a_process_ends_in_order_while_kernels_compile(closes: bool, tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    program = ENDING.replace("CLOSES", str(closes))
    ran = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120
    )
    assert "answered" in ran.stdout, ran.stderr[-2000:]
    assert ran.returncode == 0, ran.stderr[-2000:]


def test_fused_projections_lie_side_by_side_after_sleep() -> None:
    """Moved at the start and on waking: replays multiply with them at once, and answers stay."""
    model = build(BY_NAME["qwen2"]).cuda()
    prompt = list(range(5, 30))
    options = {"max_new_tokens": ENGINE_NEW, "min_new_tokens": ENGINE_NEW, "do_sample": False}
    ids = torch.tensor([prompt], device="cuda")
    right = model.generate(ids, **options)[0, len(prompt) :].tolist()
    attention = model.model.layers[1].self_attn
    layers = [attention.q_proj, attention.k_proj, attention.v_proj]
    assert fused_parameters(layers) is None
    with Engine(model, block_size=4, num_blocks=400, fuse_projections=True) as engine:
        for level in (1, 2):
            end, replayed = time.monotonic() + 60, counts(engine).get("replayed", 0)
            while counts(engine).get("replayed", 0) <= replayed + 5:  # kernels of such steps compile beside
                found = [handle.result() for handle in [engine.submit(prompt, **options) for _ in range(3)]]
                assert [output.sequences[0].token_ids for output in found] == [right] * 3
                assert time.monotonic() < end, reasons(engine)
            assert fused_parameters(layers) is not None
            engine.sleep(level)
            engine.wake_up()
        assert fused_parameters(layers) is not None
        assert engine.submit(prompt, **options).result().sequences[0].token_ids == right
    assert model.generate(ids, **options)[0, len(prompt) :].tolist() == right


def test_products_of_one_input_are_branches_of_a_graph() -> None:
    """The device computes them at once, and what is behind them waits for all."""
    x = torch.randn(8, 1, 512, device="cuda", dtype=torch.bfloat16)
    layers = [torch.nn.Linear(512, 128 * (i + 1), dtype=x.dtype, device="cuda") for i in range(3)]
    products = [partial(torch.nn.Linear.forward, layer) for layer in layers]

    def step() -> list[torch.Tensor]:
        y = x
        for _ in range(20):
            assert at_once(y)
            found = beside(y, products)
            y = y + sum(each.sum(-1, keepdim=True) for each in found).tanh()
        return [y, *beside(y, products)]

    with torch.no_grad():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            answer = step()
        assert not at_once(x)
        for turn in range(3):
            x.normal_(generator=torch.Generator("cuda").manual_seed(turn))
            graph.replay()
            y = x
            for _ in range(20):
                y = y + sum(product(y).sum(-1, keepdim=True) for product in products).tanh()
            for found, expected in zip(answer, [y, *(product(y) for product in products)], strict=True):
                torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_the_engine_on_few_blocks(kernels: str) -> None:
    """Preemption, a thread of its own and embeddings among ids, on the device: everybody has the tokens of
    generate().
    """
    model = build(BY_NAME["llama"]).cuda()
    draw = torch.Generator().manual_seed(7)
    prompts = [torch.randint(5, VOCABULARY, (length,), generator=draw).tolist() for length in (9, 30, 17, 12)]
    options = {"max_new_tokens": ENGINE_NEW, "min_new_tokens": ENGINE_NEW, "do_sample": False}
    embeds = model.get_input_embeddings()(torch.tensor(prompts[2], device="cuda"))
    with Engine(
        model, block_size=4, num_blocks=30, max_batch_tokens=32, max_batch_sequences=8, kernels=kernels
    ) as engine:
        engine.start()
        handles = [engine.submit(prompt, **options) for prompt in prompts] + [
            engine.submit(inputs_embeds=embeds, **options)
        ]
        found = [handle.result(300).sequences[0].token_ids for handle in handles]
        assert engine.stats()["preemptions"] > 0
    for prompt, tokens in zip([*prompts, prompts[2]], found, strict=True):
        ids = torch.tensor([prompt], device="cuda")
        assert tokens == model.generate(ids, **options)[0, len(prompt) :].tolist()


def _spread(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """A model of two layers, one a device."""
    from accelerate import dispatch_model

    model = build(BY_NAME[name]).to(dtype)
    places = {
        "model.embed_tokens": 0,
        "model.rotary_emb": 0,
        "model.layers.0": 0,
        "model.layers.1": 1,
        "model.norm": 1,
        "lm_head": 1,
    }
    names = {name for name, _ in model.named_modules()}
    if model.config.tie_word_embeddings:
        places["lm_head"] = 0
    dispatch_model(model, device_map={place: device for place, device in places.items() if place in names})
    return model


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt-oss"])
def test_layers_on_several_devices(name: str, kernels: str) -> None:
    """A device map: every layer's pages lie where its keys are, under one table."""
    model = _spread(name)
    hooked = model.__dict__["forward"]  # accelerate's own
    ids = torch.randint(5, VOCABULARY, (3, 13), generator=torch.Generator().manual_seed(2)).to(0)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    for beams in (1, 4):
        call = {
            "input_ids": ids,
            "attention_mask": mask,
            "num_beams": beams,
            "max_new_tokens": NEW,
            "do_sample": False,
        }
        options = {
            "cache_implementation": "paged",
            "cache_config": {"block_size": 4, "kernels": kernels},
            "return_dict_in_generate": True,
        }
        paged = model.generate(**call, **options)
        assert torch.equal(model.generate(**call), paged.sequences)
        assert {layer.keys.device.index for layer in paged.past_key_values.layers} == {0, 1}
        del paged
    memory_of(model).check()
    assert memory_of(model).held == 0
    assert model.__dict__["forward"] is hooked


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt-oss"])
def test_engine_with_layers_on_several_devices(name: str) -> None:
    """The engine's requests are those of generate() there, alone and together."""
    model = _spread(name)
    chance = torch.Generator().manual_seed(2)
    prompts = [torch.randint(5, VOCABULARY, (count,), generator=chance).tolist() for count in (13, 5, 30)]
    options = {"max_new_tokens": NEW, "do_sample": False}
    with Engine(model, block_size=4, num_blocks=100, max_batch_tokens=16) as engine:
        outputs = engine.generate([*prompts, prompts[2]], **options)
        engine.check()
    for prompt, output in zip([*prompts, prompts[2]], outputs, strict=True):
        if output.error is not None:
            raise output.error
        ids = torch.tensor([prompt], device=0)
        expected = model.generate(ids, **options)[0, len(prompt) :].tolist()
        assert output.sequences[0].token_ids == expected


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "mistral-window"])
def test_captured_steps_on_several_devices(name: str, dtype: torch.dtype, kernels: str) -> None:
    """One graph holds what both devices do; its answers are those of steps that nothing captures."""
    model = _spread(name, dtype)
    chance = torch.Generator().manual_seed(2)
    prompts = [torch.randint(5, VOCABULARY, (count,), generator=chance).tolist() for count in (13, 5, 30, 7)]
    options = {"max_new_tokens": 40, "min_new_tokens": 40, "do_sample": False}
    settings = {"block_size": 4, "kernels": kernels}
    with Engine(model, num_blocks=200, graphs=False, **settings) as engine:
        plain = engine.generate(prompts, **options, logprobs=2)
    with Engine(model, num_blocks=200, **settings) as engine:
        for _ in range(3):  # steps without a graph between those from graphs, on the same pages
            outputs = engine.generate(prompts, **options, logprobs=2)
        engine.check()
        assert counts(engine)["replayed"] > 40, reasons(engine)
    for output, other in zip(outputs, plain, strict=True):
        found, wanted = output.sequences[0].token_ids, other.sequences[0].token_ids
        assert found == wanted or dtype != torch.float32
        same = next((i for i, pair in enumerate(zip(found, wanted, strict=True)) if len(set(pair)) > 1), 40)
        assert same > 8
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor([prompt], device=0)
        paged = [
            model.generate(ids, **options, cache_implementation="paged", cache_config=settings)
            for _ in range(3)
        ][-1]
        if dtype == torch.float32:
            assert torch.equal(paged, model.generate(ids, **options))
            assert output.sequences[0].token_ids == paged[0, len(prompt) :].tolist()
    assert counts(model)["replayed"] > 40, reasons(model)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_adapters_on_several_devices() -> None:
    """Rows with an adapter and without one, on layers of two devices, are those of generate() alone."""
    peft = pytest.importorskip("peft")
    model = _spread("llama")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config).eval()
    chance = torch.Generator().manual_seed(2)
    prompts = [torch.randint(5, VOCABULARY, (count,), generator=chance).tolist() for count in (13, 5, 30)]
    options = {"max_new_tokens": 24, "min_new_tokens": 24, "do_sample": False}

    def alone(prompt: list[int], **word: Any) -> list[int]:
        found = adapted.generate(input_ids=torch.tensor([prompt], device=0), **options, **word)
        return found[0, len(prompt) :].tolist()

    expected = [alone(prompt) for prompt in prompts]
    assert [alone(prompt, cache_implementation="paged") for prompt in prompts] == expected
    with adapted.disable_adapter():
        base = alone(prompts[0])
    assert base != expected[0]
    with Engine(adapted, block_size=4, num_blocks=200) as engine:
        handles = [engine.submit(prompt, **options, adapter="default") for prompt in prompts]
        handles.append(engine.submit(prompts[0], **options, adapter=None))
        found = [handle.result().sequences[0].token_ids for handle in handles]
        engine.check()
    assert found == [*expected, base]
