"""Batch-invariant arithmetic on a CUDA device: the bits of a row depend on that row alone.

PYTHONPATH=.:kernels:tests:tests/support python -m pytest tests/test_gpu_invariant.py
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from captures import counts, policy
from invariance import (
    ADAPTERS,
    Sampled,
    adapted,
    adapters_numbers,
    engine_numbers,
    model_of,
    prompts,
    trainer_numbers,
)
from torch.nn import functional as F  # its usual name
from transformers import LlamaConfig, LlamaForCausalLM

from hf_paged import Engine, NotInvariant, batch_invariant
from hf_paged.kv.ops import invariant_kernels

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

DTYPES = [torch.float32, torch.bfloat16]
FAMILIES = ["llama", "qwen3", "gemma3_text", "mistral", "mixtral", "qwen3_moe", "olmo2", "phi3", "gpt2"]


def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    random = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float32, device="cuda", generator=random).to(dtype)


@pytest.fixture
def kernels() -> Any:
    return invariant_kernels("cuda")


# ---- the functions


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("columns", "depth"),
    [
        (96, 80),
        (512, 2048),
        (1024, 4096),
        (4096, 14336),
        (1, 4096),
        (12, 4096),
        (64, 4096),
        (2048, 1),
        (2048, 12),
    ],
)
def test_a_products_rows_do_not_know_each_other(
    kernels: Any, dtype: torch.dtype, columns: int, depth: int
) -> None:
    """C44: through our kernel, through torch's where it is used, and in a captured graph."""
    most = 300 if dtype == torch.float32 else 2000
    x, w, bias = (
        numbers(most, depth, dtype=dtype),
        numbers(columns, depth, dtype=dtype),
        numbers(columns, dtype=dtype),
    )
    whole = kernels.mm(x, w.t(), bias)
    assert torch.allclose(whole.float(), F.linear(x, w, bias).float(), atol=depth**0.5 / 20, rtol=2e-2)
    for count in (1, 2, 3, 7, 16, 17, 33, 64, 65, 100, 128, 200, 257, most):
        rows = kernels.mm(x[:count], w.t(), bias)
        assert torch.equal(rows, whole[:count]), count
        rows = kernels.mm(x[most - count :], w.t(), bias)
        assert torch.equal(rows, whole[most - count :]), count


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 12, 1024])
def test_sums_of_rounding_errors_do_not_know_each_other(
    kernels: Any, dtype: torch.dtype, columns: int
) -> None:
    """C44: where the numbers of a sum cancel each other every digit shows its order, in all tiles of our kernel."""
    x, w = numbers(300, 2048, dtype=dtype), numbers(columns, 2048, dtype=dtype)
    order = torch.randperm(2048, device="cuda")
    x, w = torch.cat([x, x[:, order]], 1), torch.cat([w, -w[:, order]], 1)
    whole = kernels.mm(x, w.t())
    assert whole.any()
    for count in (1, 2, 7, 16, 17, 33, 64, 65, 128, 200):
        assert torch.equal(kernels.mm(x[:count], w.t()), whole[:count]), count


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
def test_a_layer_keeps_its_bits_when_its_shape_is_known(
    kernels: Any, dtype: torch.dtype, biased: bool
) -> None:
    """C44: from the second call on torch may compute it unseen, for rows of a batch or of several, with gradients,
    and with weights that lie otherwise.
    """
    weight = numbers(512, 1024, dtype=dtype).requires_grad_()
    bias = numbers(512, dtype=dtype, seed=1) if biased else None
    for shape in ((60, 1024), (4, 15, 1024), (1, 1024), (2, 3, 10, 1024)):
        x = numbers(*shape, dtype=dtype, seed=2)
        for w in (weight, weight.detach().t().contiguous().t()):
            right = kernels.mm(x.view(-1, 1024), w.t(), bias).view(*shape[:-1], 512)
            with batch_invariant():
                for _ in range(3):
                    if x.dim() < 4 or bias is None:
                        assert torch.equal(F.linear(x, w, bias), right)
                    assert torch.equal(F.linear(x[..., :1, :], w, bias), F.linear(x, w, bias)[..., :1, :])
                    assert torch.equal(x[..., :1, :] @ w.t(), (x @ w.t())[..., :1, :])
                    assert torch.equal(w @ x.mT[..., :1], (w @ x.mT)[..., :1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_compute_what_layers_do(kernels: Any, dtype: torch.dtype) -> None:
    x, w = numbers(70, 96, dtype=dtype), numbers(5, 64, 96, dtype=dtype)
    ends = torch.tensor([3, 3, 40, 41, 66], dtype=torch.int32, device="cuda")
    found = kernels.grouped(x, w.mT, ends)
    for expert, (begin, end) in enumerate([(0, 3), (3, 3), (3, 40), (40, 41), (41, 66)]):
        assert torch.equal(found[begin:end], kernels.mm(x[begin:end], w[expert].t()))
    assert not found[66:].any()


@pytest.mark.parametrize("kind", ["sum", "softmax", "log_softmax", "logsumexp"])
@pytest.mark.parametrize("width", [1, 80, 4096, 5000, 128256])
def test_rows_in_all_company(kernels: Any, kind: str, width: int) -> None:
    """C44: also with zeros, or what weighs nothing, put between the numbers."""
    x = numbers(9, width, dtype=torch.float32) * 3
    found = kernels.rows(kind, x)
    right = getattr(torch, kind)(x.double(), -1)
    assert torch.allclose(found.double(), right, rtol=1e-5, atol=1e-4)
    assert torch.equal(kernels.rows(kind, x[4:5])[0], found[4])
    apart = torch.full((9, 2 * width), 0.0 if kind == "sum" else -torch.inf, device="cuda")
    apart[:, 1::2] = x
    spread = kernels.rows(kind, apart)
    assert torch.equal(spread if spread.dim() == 1 else spread[:, 1::2], found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "dim"), [(None, 64), (40, 64), (None, 512)])
def test_attention_of_prompts_and_of_single_tokens(
    kernels: Any, dtype: torch.dtype, window: int | None, dim: int
) -> None:
    """C44: dense and from blocks, in chunks, padded on either side, and token by token."""
    heads, key_heads, tokens = 8, 2, 300
    q = numbers(1, heads, tokens, dim, dtype=dtype)
    k, v = (numbers(1, key_heads, tokens, dim, dtype=dtype, seed=i) for i in (1, 2))
    place = torch.arange(tokens, device="cuda")
    causal = place[None] <= place[:, None]
    if window is not None:
        causal &= place[:, None] - place[None] < window
    whole = kernels.attend(q, k, v, None if window is None else causal[None, None], causal=window is None)
    right = F.scaled_dot_product_attention(q, k, v, attn_mask=causal, enable_gqa=True)
    assert torch.allclose(whole.float(), right.float(), atol=2e-2, rtol=2e-2)
    for left, right_side in ((13, 0), (0, 29)):
        pads = (0, 0, left, right_side)
        wide = tokens + left + right_side
        mask = torch.zeros(1, 1, wide, wide, dtype=torch.bool, device="cuda")
        mask[0, 0, left : left + tokens, left : left + tokens] = causal
        found = kernels.attend(*(F.pad(each, pads) for each in (q, k, v)), mask)
        assert torch.equal(found[:, :, left : left + tokens], whole)
    # From blocks: decoding, and a chunk behind what is known.
    size = 16
    count = -(-tokens // size)
    order = torch.randperm(count, device="cuda")
    blocks = [torch.zeros(count, size, key_heads, dim, dtype=dtype, device="cuda") for _ in range(2)]
    for pool, data in zip(blocks, (k, v), strict=True):
        pool[order] = F.pad(data[0].transpose(0, 1), (0, 0, 0, 0, 0, count * size - tokens)).view(
            count, size, key_heads, dim
        )
    table = order.int()[None]
    for length in (1, 17, 64, 65, 130, tokens):
        query = q[0, :, length - 1][None]
        lengths = torch.tensor([length], dtype=torch.int32, device="cuda")
        for rows in (1, 3, 200):
            many = lengths.expand(rows).contiguous()
            plan = kernels.Plan(query.expand(rows, -1, -1), *blocks, mean_length=length, window=window)
            plan.update(many)
            found = kernels.decode(
                query.expand(rows, -1, -1).contiguous(), *blocks, table.expand(rows, -1).contiguous(), plan
            )
            assert torch.equal(found, whole[:, :, length - 1].expand(rows, -1, -1)), (length, rows)
        begin = max(0, length - 20)
        borders = torch.tensor([0, length - begin], dtype=torch.int32, device="cuda")
        chunk = q[0, :, begin:length].transpose(0, 1).contiguous()
        found = kernels.prefill(chunk, *blocks, table, borders, lengths, length - begin, window=window)
        assert torch.equal(found.transpose(0, 1), whole[0, :, begin:length])


@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_kernels_round_as_the_operations_do(kernels: Any, dtype: torch.dtype) -> None:
    """C44: captured steps launch them, trainers' forwards compute one operation after the other."""
    for width in (64, 96, 4096):
        x, residual, weight = (
            numbers(7, width, dtype=dtype),
            numbers(7, width, dtype=dtype, seed=1),
            numbers(width, dtype=dtype),
        )
        with batch_invariant():
            total = residual + x
            wide = total.float()
            scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
            plain, centered = weight * scaled.to(dtype), (scaled * (1.0 + weight.float())).to(dtype)
            gated = F.silu(x) * residual, F.gelu(x, approximate="tanh") * residual
        found = kernels.add_rms_norm(x, residual, weight, 1e-6)
        assert torch.equal(found[0], total)
        assert torch.equal(found[1], plain)
        assert torch.equal(kernels.rms_norm(total, weight, 1e-6), plain)
        assert torch.equal(kernels.rms_norm(total, weight, 1e-6, centered=True), centered)
        assert torch.equal(kernels.swiglu(x, residual), gated[0])
        assert torch.equal(kernels.swiglu(x, residual, activation="gelu_tanh"), gated[1])


def test_quotients_sums_and_added_rows() -> None:
    x = numbers(64, 1000, dtype=torch.float32)
    with batch_invariant():
        assert torch.equal(x / 0.7, x / torch.full((64, 1), 0.7, device="cuda"))
        running = x.softmax(-1).cumsum(-1)
        assert torch.equal(x[3:4].softmax(-1).cumsum(-1)[0], running[3])
        index = torch.arange(64, device="cuda") % 5
        added = torch.zeros(5, 1000, device="cuda").index_add_(0, index, x)
        assert torch.equal(torch.zeros(5, 1000, device="cuda").index_add(0, index, x), added)
    assert torch.allclose(running, x.softmax(-1).cumsum(-1), atol=1e-5)


@pytest.mark.parametrize("mask", ["both ways", "holes"])
def test_other_attention_is_refused(mask: str) -> None:
    q = numbers(1, 2, 8, 16)
    seen = None if mask == "both ways" else torch.rand(1, 1, 8, 8, device="cuda") > 0.5
    what = r"no fixed order on cuda:0 for (attention that|a mask that) is not causal"
    with pytest.raises(NotInvariant, match=what), batch_invariant():
        F.scaled_dot_product_attention(q, q, q, attn_mask=seen)


# ---- models


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are captured in calls as short as these."""
    policy(monkeypatch, least_steps=4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FAMILIES)
def test_the_trainers_bits(name: str, dtype: torch.dtype) -> None:
    """C44: sampled together in chunks with shared prefixes, sampled alone, and trained in a padded batch."""
    model = model_of(name, dtype).cuda()
    sequences, together, alone = engine_numbers(model)
    assert together == alone
    for side in ("left", "right"):
        assert trainer_numbers(model, sequences, side) == together


def test_long_rows_in_captured_steps() -> None:
    """C44: 64 requests together, through graphs, and each alone; rows of hundreds of tokens."""
    model = model_of("llama", torch.bfloat16).cuda()
    rows = [[5 + (row * 7 + i * i) % 50 for i in range(20 + 9 * row)] for row in range(40)]
    wanted: dict[str, Any] = {"max_new_tokens": 12, "logprobs": True, "pad_token_id": 0, "eos_token_id": 99}
    model.config.max_position_embeddings = 1024
    with Engine(model, batch_invariant=True, max_batch_tokens=256) as engine:
        for _ in range(3):  # the third finds its steps captured
            handles = [engine.submit(row, do_sample=True, seed=i, **wanted) for i, row in enumerate(rows)]
            outputs = [handle.result().sequences[0] for handle in handles]
        assert counts(engine)["replayed"] > 0
        for i in (0, 7, 39):
            again = engine.submit(rows[i], do_sample=True, seed=i, **wanted).result().sequences[0]
            assert again.token_ids == outputs[i].token_ids
            assert again.logprobs == outputs[i].logprobs
    sampled = [Sampled(len(row), [*row, *each.token_ids]) for row, each in zip(rows, outputs, strict=True)]
    numbers_of = [[token.logprob for token in each.logprobs] for each in outputs]
    assert trainer_numbers(model, sampled, "left") == numbers_of
    assert trainer_numbers(model, sampled, "right") == numbers_of


@pytest.mark.parametrize("word", ["paged", None])
def test_generate_has_the_same_bits(word: str | None) -> None:
    """C44: paged, captured or not, and stock."""
    model = model_of("llama", torch.bfloat16).cuda()
    rows = prompts(60)
    width = max(map(len, rows))
    ids = torch.zeros(len(rows), width, dtype=torch.long, device="cuda")
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, width - len(row) :] = torch.tensor(row, device="cuda")
        mask[i, width - len(row) :] = 1
    options: dict[str, Any] = {
        "do_sample": False,
        "max_new_tokens": 10,
        "pad_token_id": 0,
        "eos_token_id": 99,
    }
    options |= {"return_dict_in_generate": True, "output_logits": True}
    if word is not None:
        options["cache_implementation"] = word
    with batch_invariant():
        for _ in range(3):
            found = model.generate(input_ids=ids, attention_mask=mask, **options)
    logits = torch.stack(found.logits, 1).float()
    with batch_invariant():
        logprobs = logits.log_softmax(-1)
    sampled = [Sampled(len(row), [*row, *found.sequences[i, width:].tolist()]) for i, row in enumerate(rows)]
    mine = [
        [logprobs[i, step, token].item() for step, token in enumerate(each.tokens[each.prompt :])]
        for i, each in enumerate(sampled)
    ]
    assert trainer_numbers(model, sampled, "left") == mine


def test_a_stock_cache_that_forgets_is_refused() -> None:
    """Pages keep count of a window's tokens; stock's cache does not."""
    model = model_of("gemma3_text").cuda()
    ids = torch.tensor(prompts(60)[1:2], device="cuda")
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 3, "pad_token_id": 0}
    with batch_invariant():
        with pytest.raises(
            NotInvariant, match="Gemma3ForCausalLM; give generate\\(\\) cache_implementation='paged'"
        ):
            model.generate(ids, **options)
        assert model.generate(ids, cache_implementation="paged", **options).shape == (1, 20)


def test_gradients_flow() -> None:
    model = model_of("llama", torch.bfloat16).cuda().train()
    ids = torch.tensor(prompts(60)[1:2], device="cuda")
    with batch_invariant():
        model(ids).logits.float().log_softmax(-1).gather(-1, ids[..., None]).sum().backward()
    assert all(each.grad is not None and each.grad.isfinite().all() for each in model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen3", "phi3", "gpt2"])
def test_adapters(name: str, dtype: torch.dtype) -> None:
    """C44: one LoRA adapter, several and none in one batch, in float32 and in the model's type, beside captured steps
    of the base: the bits of each alone and of peft's own forward.
    """
    model = adapted(model_of(name, dtype).cuda())
    sequences, together, alone = engine_numbers(model, adapters=ADAPTERS)
    assert together == alone
    for side in ("left", "right"):
        assert adapters_numbers(model, sequences, ADAPTERS, side) == together


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_adapters_of_a_wide_model(dtype: torch.dtype) -> None:
    """C44: products of which torch computes some, of 1 to 64 ranks, by the peft model's adapters and by given ones."""
    config = LlamaConfig(
        hidden_size=1024, intermediate_size=2816, num_hidden_layers=3, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=512, max_position_embeddings=1024, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    plain = LlamaForCausalLM(config).to("cuda", dtype).eval()
    model = adapted(copy.deepcopy(plain))
    right = None
    for served, given in ((model, None), (plain, model)):
        sequences, together, alone = engine_numbers(
            served, adapters=ADAPTERS, given=given, max_batch_tokens=64
        )
        right = right or adapters_numbers(model, sequences, ADAPTERS, "left")
        assert together == alone == right


@pytest.mark.parametrize(
    "names", [["thin"] * 32, ["thin", "wide", "native", "__base__"] * 8], ids=["one", "many"]
)
def test_rows_with_adapters_among_64(names: list[str]) -> None:
    """C44: many rows decode together, in captured steps or not, and each alone in one of two batch sizes."""
    model = adapted(model_of("llama", torch.bfloat16).cuda())
    rows = [[5 + (row * 7 + i * i) % 50 for i in range(3 + row)] for row in range(len(names))]
    wanted: dict[str, Any] = {"max_new_tokens": 10, "logprobs": True, "pad_token_id": 0, "eos_token_id": 99}
    with Engine(model, batch_invariant=True, max_batch_tokens=256) as engine:

        def submit(row: int, adapter: str) -> Any:
            return engine.submit(rows[row], do_sample=True, seed=row, adapter=adapter, **wanted)

        for _ in range(3):
            handles = [submit(row, name) for row, name in enumerate(names)]
            handles += [submit(row, "__base__") for row in range(len(names))]
            outputs = [handle.result().sequences[0] for handle in handles]
        for row in (0, 9, 18, 27):
            again = submit(row, names[row]).result().sequences[0]
            assert again.token_ids == outputs[row].token_ids
            assert again.logprobs == outputs[row].logprobs
        engine.check()
    sampled = [Sampled(len(row), [*row, *each.token_ids]) for row, each in zip(rows, outputs, strict=False)]
    right = [[token.logprob for token in each.logprobs] for each in outputs[: len(names)]]
    adapters = [None if name == "__base__" else name for name in names]
    assert adapters_numbers(model, sampled, adapters, "right") == right
