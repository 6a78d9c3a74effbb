"""TRL's fused log-probabilities in batch_invariant(): the bits of the model's logits and log_softmax (C44)."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from invariance import compiles, model_of

from hf_paged import Engine, NotInvariant, batch_invariant

pytestmark = compiles

PLACE = "trl.kernels.chunked_logprob"
needs_trl = pytest.mark.skipif(find_spec("trl") is None, reason="needs TRL, which is no dependency")
IDS = torch.randint(5, 60, (3, 17), generator=torch.Generator().manual_seed(0))
WEIGHTS = torch.randn(3 * 16, generator=torch.Generator().manual_seed(1))
CHUNK = 13
"""Of the vocabulary, as narrow as a tiny one needs it to come in pieces."""


def stand_in() -> Any:
    """A function as TRL's: log-probabilities from sums over pieces of the vocabulary."""

    class ChunkedLogProbFunction(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any,
            hidden: torch.Tensor,
            weight: torch.Tensor,
            bias: torch.Tensor | None,
            targets: torch.Tensor,
            temperature: float,
            chunk_size: int,
            final_logit_softcapping: float | None = None,
            logit_scale: float = 1.0,
            outputs: tuple[str, ...] = (),
        ) -> tuple[torch.Tensor, torch.Tensor]:
            logits = torch.nn.functional.linear(hidden, weight.to(hidden.dtype), bias).float() * logit_scale
            if final_logit_softcapping is not None:
                logits = final_logit_softcapping * torch.tanh(logits / final_logit_softcapping)
            scores = logits * (1 / temperature)
            largest = scores.amax(-1, True)
            total = sum(piece.sum(-1) for piece in (scores - largest).exp().split(chunk_size, -1))
            assert isinstance(total, torch.Tensor)
            logsum = largest[:, 0] + total.log()
            ctx.save_for_backward(hidden, weight, targets, (scores - logsum[:, None]).exp())
            ctx.temperature = temperature
            return scores.gather(1, targets[:, None])[:, 0] - logsum, logsum

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor, *_: Any) -> tuple[Any, ...]:
            hidden, weight, targets, shares = ctx.saved_tensors
            chosen = torch.nn.functional.one_hot(targets, len(weight))
            of_logits = (gradient[:, None] * (chosen - shares) / ctx.temperature).to(hidden.dtype)
            return of_logits @ weight, of_logits.t() @ hidden, *[None] * 7

    return ChunkedLogProbFunction


@pytest.fixture(params=["stand-in", pytest.param("trl", marks=needs_trl)])
def fused(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """TRL's function, or one like it."""
    if request.param == "stand-in":
        monkeypatch.setitem(sys.modules, PLACE, SimpleNamespace(ChunkedLogProbFunction=stand_in()))
    else:
        __import__(PLACE)
    return sys.modules[PLACE].ChunkedLogProbFunction


def by_fused(
    fused: Any, model: Any, temperature: float, ids: torch.Tensor = IDS, scale: float = 1.0
) -> torch.Tensor:
    """The log-probabilities [rows * tokens] of a model's tokens as TRL computes them."""
    hidden = model.base_model(ids).last_hidden_state[:, :-1]
    head = model.lm_head
    cap = getattr(model.config, "final_logit_softcapping", None)
    rows = hidden.reshape(-1, hidden.shape[-1])
    targets = ids[:, 1:].reshape(-1)
    logprobs: torch.Tensor = fused.apply(
        rows, head.weight, head.bias, targets, temperature, CHUNK, cap, scale, ("log_probs", "entropy")
    )[0]
    return logprobs


def by_logits(model: Any, temperature: float) -> torch.Tensor:
    """The same from logits."""
    scores = (model(IDS).logits[:, :-1].float() / temperature).log_softmax(-1)
    return scores.gather(2, IDS[:, 1:, None]).flatten()


SCALES = {"cohere": "logit_scale", "granite": "logits_scaling"}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", ["llama", "llama-bfloat16", "gpt2-bfloat16", "gemma2", "cohere", "granite"])
def test_the_models_bits(fused: Any, name: str, temperature: float) -> None:
    family, _, dtype = name.partition("-")
    model = model_of(family, torch.bfloat16 if dtype else torch.float32)
    scale = 1.0
    if family in SCALES:
        setattr(model.config, SCALES[family], 0.25)
        if family == "cohere":
            model.logit_scale = 0.25
        scale = 0.25 if family == "cohere" else 4.0
    with batch_invariant(), torch.no_grad():
        found = by_fused(fused, model, temperature, scale=scale)
        assert torch.equal(found, by_logits(model, temperature))
        alone = by_fused(fused, model, temperature, IDS[1:2], scale)
    assert torch.equal(alone, found.view(3, -1)[1])


def test_without_the_mode(fused: Any) -> None:
    """The function is TRL's own outside of it: its bits are others."""
    model = model_of("llama")
    with torch.no_grad():
        before = by_fused(fused, model, 0.7)
        with batch_invariant():
            by_fused(fused, model, 0.7)
        assert torch.equal(by_fused(fused, model, 0.7), before)
        assert not torch.equal(before, by_logits(model, 0.7))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gradients(fused: Any, temperature: float) -> None:
    """They are those of log_softmax up to rounding."""
    model = model_of("llama")
    found = []
    with batch_invariant():
        for compute in (lambda: by_fused(fused, model, temperature), lambda: by_logits(model, temperature)):
            model.zero_grad()
            (compute() * WEIGHTS).sum().backward()
            found.append([each.grad.clone() for each in model.parameters()])
    for one, two in zip(*found, strict=True):
        assert two.abs().max() > 0
        assert torch.allclose(one, two, atol=1e-5 * float(two.abs().max()))


def test_the_engines_numbers(fused: Any) -> None:
    """A sampler's draws at a temperature, in company, and TRL's numbers of them."""
    model = model_of("llama", torch.bfloat16)
    prompts = [[7, 8, 9], [11, 12, 13, 14, 15]]
    with Engine(model, batch_invariant=True) as engine:
        options: Any = {"max_new_tokens": 6, "do_sample": True, "temperature": 0.7, "top_k": 0}
        outputs = engine.generate(prompts, logprobs=True, pad_token_id=0, **options)
    for prompt, output in zip(prompts, outputs, strict=True):
        sequence = output.sequences[0]
        ids = torch.tensor([[*prompt, *sequence.token_ids]])
        with batch_invariant():
            found = by_fused(fused, model, 0.7, ids)[len(prompt) - 1 :]
        assert found.tolist() == [each.processed for each in sequence.logprobs]


def test_imported_in_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")
    with batch_invariant(), torch.no_grad():
        monkeypatch.setitem(sys.modules, PLACE, SimpleNamespace(ChunkedLogProbFunction=stand_in()))
        found = by_fused(sys.modules[PLACE].ChunkedLogProbFunction, model, 0.7)
        assert torch.equal(found, by_logits(model, 0.7))


def test_refused(fused: Any) -> None:
    """Scales and dtypes that TRL's function does not know."""
    with (
        pytest.raises(NotInvariant, match=r"a logit scale of 0\.3, .*; compute log_softmax"),
        batch_invariant(),
    ):
        by_fused(fused, model_of("llama"), 1.0, scale=0.3)
    model = model_of("gemma2", torch.bfloat16)
    with pytest.raises(NotInvariant, match=r"torch\.bfloat16 logits, unless cast_lm"), batch_invariant():
        by_fused(fused, model, 1.0)
    by_fused(fused, model, 1.0)


def test_another_function_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of a later TRL that takes other arguments."""

    class Later(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, hidden: torch.Tensor, head: torch.Tensor) -> tuple[torch.Tensor]:
            return (hidden + head,)

    monkeypatch.setitem(sys.modules, PLACE, SimpleNamespace(ChunkedLogProbFunction=Later))
    with pytest.raises(NotInvariant, match=r"with arguments \['hidden', 'head'\]"), batch_invariant():
        Later.apply(torch.zeros(2), torch.zeros(2))


@needs_trl
@pytest.mark.parametrize("name", ["llama", "gemma2", "cohere", "granite"])
@pytest.mark.parametrize("cast", [False, True])
def test_trls_forward(name: str, cast: bool) -> None:
    """`model(..., fused_lm_head=True)`, of a half-precision model with its head in float32, too."""
    from trl.trainer.utils import add_fused_lm_head

    model = model_of(name, torch.bfloat16 if cast else torch.float32)
    own = model_of(name, torch.bfloat16 if cast else torch.float32)
    own.load_state_dict(model.state_dict())
    own.config.use_cache = False
    if cast:
        own.lm_head.forward = lambda x: torch.nn.functional.linear(x.float(), own.lm_head.weight.float())
    add_fused_lm_head(model, temperature=0.7, cast_lm_head_to_fp32=cast, outputs=("log_probs", "entropy"))
    labels = IDS.clone()
    labels[:, :5] = -100
    with batch_invariant():
        answer = model(input_ids=IDS, attention_mask=torch.ones_like(IDS), labels=labels, fused_lm_head=True)
        right = by_logits(own, 0.7).view(3, -1)
        assert torch.equal(answer.log_probs[:, 4:], right[:, 4:])
        scores = (own(IDS).logits[:, :-1].float() / 0.7).log_softmax(-1)
    entropy = -(scores.exp() * scores).sum(-1)
    assert torch.allclose(answer.entropy[:, 4:], entropy[:, 4:], atol=1e-4)
    assert not answer.log_probs[:, :4].any()
