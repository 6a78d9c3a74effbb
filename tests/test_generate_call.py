"""Invalid input and failures: a clear error or the right answer, and state as before."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from compare import assert_clean
from families import BY_NAME, build
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList

import hf_paged
from hf_paged.model.registry import memory_of


def paged(model: Any, ids: torch.Tensor, **arguments: Any) -> Any:
    return model.generate(
        ids,
        **{
            "attention_mask": torch.ones_like(ids),
            "max_new_tokens": 8,
            "cache_implementation": "paged",
            **arguments,
        },
    )


def stock(model: Any, ids: torch.Tensor, **arguments: Any) -> Any:
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, **arguments)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"block_size": 3}, ValueError, "block_size=3 is not a power of two"),
        ({"block_size": "16"}, TypeError, "block_size must be an int"),
        ({"block_size": 512}, ValueError, "1 to 256"),
        ({"num_blocks": 0}, ValueError, "num_blocks=0"),
        ({"num_blocks": 4, "memory_fraction": 0.5}, ValueError, "give one of them"),
        ({"memory_fraction": 1.5}, ValueError, r"memory_fraction=1.5 is not in \(0, 1\]"),
        ({"memory_fraction": 1e-13}, hf_paged.OutOfBlocks, "less than one block"),
        ({"kernels": "cuda"}, ValueError, "kernels='cuda' is not one of"),
        ({"kernels": "triton"}, ValueError, "the kernels need a CUDA device, the keys are on cpu"),
        ({"blocksize": 16}, ValueError, "did you mean 'block_size'"),
        (
            {"num_blocks": 1},
            hf_paged.OutOfBlocks,
            r"num_blocks=1 cannot hold one sequence of 20 tokens .* need 2 blocks",
        ),
        ({"num_blocks": 4}, hf_paged.OutOfBlocks, r"\d+ more blocks .* are free \(num_blocks=4"),
    ],
)
def test_bad_options(
    llama: Any, ids: torch.Tensor, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    """The message says what was given, what was expected and what to do; the next call is right."""
    with pytest.raises(error, match=words):
        paged(llama, ids, num_beams=3, cache_config=options)
    assert_clean(llama, "sdpa")
    assert torch.equal(paged(llama, ids), stock(llama, ids))


def test_pool_that_runs_dry_in_the_middle(llama: Any, ids: torch.Tensor) -> None:
    """The prompts fit and the answers do not: OutOfBlocks with the numbers, nothing held."""
    with pytest.raises(hf_paged.OutOfBlocks, match="more blocks of 4 tokens"):
        paged(llama, ids, min_new_tokens=8, cache_config={"num_blocks": 13, "block_size": 4})
    assert_clean(llama, "sdpa")
    assert torch.equal(paged(llama, ids), stock(llama, ids))


def test_fixed_pools_that_suffice(llama: Any, ids: torch.Tensor) -> None:
    """num_blocks and memory_fraction size the pool once; it does not grow."""
    for options in ({"num_blocks": 15, "block_size": 4}, {"memory_fraction": 1e-5}):
        answer = paged(llama, ids, cache_config=options, return_dict_in_generate=True)
        assert torch.equal(answer.sequences, stock(llama, ids))
        if "num_blocks" in options:
            pool = next(iter(answer.past_key_values.sequences.rows.values())).group.pool
            assert pool.total == 15


def test_cache_of_another_model(llama: Any, ids: torch.Tensor) -> None:
    other = build(BY_NAME["qwen2"])
    with pytest.raises(ValueError, match=r"belongs to another model \(LlamaForCausalLM\)"):
        other.generate(ids, past_key_values=hf_paged.PagedCache(llama))
    assert_clean(other, "sdpa")


def test_cache_with_another_batch(llama: Any, ids: torch.Tensor) -> None:
    cache = hf_paged.PagedCache(llama)
    history = stock(llama, ids, past_key_values=cache)
    with pytest.raises(ValueError, match="holds 3 rows and was given 2"):
        stock(llama, history[:2], past_key_values=cache)
    longer = torch.cat([history, ids], 1)
    assert torch.equal(stock(llama, longer, past_key_values=cache), stock(llama, longer))


def test_foreign_cache_with_the_word(llama: Any, ids: torch.Tensor) -> None:
    """Stock's own error for a cache and the name of another."""
    with pytest.raises(ValueError, match="Passing both `cache_implementation`"):
        paged(llama, ids, past_key_values=DynamicCache())


def test_gradients_are_refused(llama: Any, ids: torch.Tensor) -> None:
    with pytest.raises(RuntimeError, match="keeps no gradients"):
        llama(ids, past_key_values=hf_paged.PagedCache(llama))


def test_mask_that_uncovers_padding(llama: Any, ids: torch.Tensor) -> None:
    """Padding was not stored, so it cannot be shown later."""
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    answer = paged(llama, ids, attention_mask=mask, return_dict_in_generate=True)
    longer = torch.cat([answer.sequences, ids], 1)
    with pytest.raises(ValueError, match=r"padding when this cache was begun|rows of different lengths"):
        stock(llama, longer, past_key_values=answer.past_key_values)


def test_content_is_not_handed_out_stale(llama: Any, ids: torch.Tensor) -> None:
    """Keys that were read before the cache changed are refused, not wrong."""
    cache = hf_paged.PagedCache(llama)
    stock(llama, ids, past_key_values=cache)
    keys = cache.layers[0].keys
    cache.reorder_cache(torch.tensor([1, 0, 2]))
    cache.crop(-1)
    with pytest.raises(RuntimeError, match="has changed since"):
        keys + 0


class _Fails(LogitsProcessor):
    def __init__(self, error: BaseException, step: int) -> None:
        self.error, self.step, self.calls = error, step, 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == self.step:
            raise self.error
        return scores


@pytest.mark.parametrize(
    "error",
    [ZeroDivisionError("no"), MemoryError("no"), KeyboardInterrupt()],
    ids=["error", "memory", "ctrl-c"],
)
@pytest.mark.parametrize("beams", [1, 3])
def test_a_processor_that_fails(llama: Any, ids: torch.Tensor, error: BaseException, beams: int) -> None:
    """Blocks are back while the exception is still being handled."""
    for step in (1, 4):
        try:
            paged(llama, ids, num_beams=beams, logits_processor=LogitsProcessorList([_Fails(error, step)]))
        except type(error):
            assert_clean(llama, "sdpa")
        else:
            pytest.fail("the error was swallowed")
    assert torch.equal(paged(llama, ids, num_beams=beams), stock(llama, ids, num_beams=beams))


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("name", ["llama", "mistral-window", "bart"])
def test_a_forward_that_fails_halfway(name: str, layer: int, ids: torch.Tensor) -> None:
    """C22: the step is undone in every layer and a kept cache goes on as if it had not been tried."""
    model = build(BY_NAME[name])
    decoder = model.get_decoder() if model.config.is_encoder_decoder else model.model
    answer = paged(model, ids, cache_config={"block_size": 4}, min_new_tokens=8, return_dict_in_generate=True)
    cache, history = answer.past_key_values, torch.cat([answer.sequences, ids[:, :3]], 1)
    key = "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"
    more: dict[str, Any] = {key: history, "max_new_tokens": 6, "past_key_values": cache}
    if model.config.is_encoder_decoder:
        # Stock slices a decoder's prompt to what is new only if its mask is given.
        more |= {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "decoder_attention_mask": torch.ones_like(history),
        }
    else:
        more["attention_mask"] = torch.ones_like(history)

    def fail(module: Any, args: Any) -> None:
        raise RuntimeError("the forward broke")

    broken = getattr(decoder.layers[layer], "mlp", None) or decoder.layers[layer].fc1
    handle = broken.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="the forward broke"):
        model.generate(**more)
    handle.remove()
    layers = (cache.self_attention_cache if model.config.is_encoder_decoder else cache).layers
    assert {layer.columns for layer in layers} == {answer.sequences.shape[1] - 1}
    del more["past_key_values"]
    assert torch.equal(model.generate(**more, past_key_values=cache), model.generate(**more))


def test_threads_on_one_model(llama: Any, ids: torch.Tensor) -> None:
    """Paged and stock calls of several threads at once: every answer is right."""
    jobs = [
        {"num_beams": beams, "block_size": size, "word": word}
        for beams in (1, 3)
        for size, word in ((4, True), (4, True), (8, True), (0, False))
    ]
    expected = {beams: stock(llama, ids, num_beams=beams) for beams in (1, 3)}
    wrong: list[object] = []

    def work(job: dict[str, Any]) -> None:
        for _ in range(4):
            try:
                if job["word"]:
                    answer = paged(
                        llama, ids, num_beams=job["num_beams"], cache_config={"block_size": job["block_size"]}
                    )
                else:
                    answer = stock(llama, ids, num_beams=job["num_beams"])
                if not torch.equal(answer, expected[job["num_beams"]]):
                    wrong.append((job, answer))
            except Exception as error:  # a thread's error must reach the test
                wrong.append((job, error))

    threads = [threading.Thread(target=work, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert_clean(llama, "sdpa")


def test_a_call_inside_a_call(llama: Any, ids: torch.Tensor) -> None:
    """A processor that generates on the same model."""

    class Nested(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            inner = paged(llama, input_ids, max_new_tokens=2, num_beams=2)
            return scores.scatter(1, inner[:, -1:], 100.0)

    processors = LogitsProcessorList([Nested()])
    answer = paged(llama, ids, logits_processor=processors)
    assert torch.equal(answer, stock(llama, ids, logits_processor=processors))
    assert_clean(llama, "sdpa")


def test_release_and_training_give_memory_back(llama: Any, ids: torch.Tensor) -> None:
    """C5: the pool stays between calls, and goes on release, and with the first forward that trains if that is
    asked for.
    """
    paged(llama, ids)
    memory = memory_of(llama)
    assert memory.bytes > 0
    assert hf_paged.release(llama) > 0
    assert memory.bytes == 0
    paged(llama, ids, cache_config={"keep_pools": False})
    assert memory.bytes > 0
    llama.train()
    llama(ids, labels=ids).loss.backward()
    assert memory.bytes == 0
    llama.eval()
    assert torch.equal(paged(llama, ids), stock(llama, ids))


def test_release_spares_caches_in_use(llama: Any, ids: torch.Tensor) -> None:
    cache = hf_paged.PagedCache(llama)
    history = stock(llama, ids, past_key_values=cache)
    assert hf_paged.release(llama) == 0
    longer = torch.cat([history, ids], 1)
    assert torch.equal(stock(llama, longer, past_key_values=cache), stock(llama, longer))


def test_pool_grows_around_a_kept_cache(llama: Any, ids: torch.Tensor) -> None:
    """A pool that must grow while somebody holds blocks moves them with their content."""
    cache = hf_paged.PagedCache(llama)
    history = stock(llama, ids, past_key_values=cache)
    before = memory_of(llama).bytes
    wide = ids.repeat(8, 3)
    assert torch.equal(paged(llama, wide), stock(llama, wide))
    assert memory_of(llama).bytes > before
    longer = torch.cat([history, ids], 1)
    assert torch.equal(stock(llama, longer, past_key_values=cache), stock(llama, longer))


PLACES = [
    "hf_paged.kv.rows.append",
    "hf_paged.kv.rows.reorder",
    "hf_paged.kv.store.Store.copy",
    "hf_paged.kv.reference.write",
    "hf_paged.kv.reference.scaled_dot_product_attention",
    "hf_paged.blocks.pool.BlockPool.take",
    "hf_paged.blocks.pool.BlockPool.share",
    "hf_paged.blocks.pool.BlockPool.drop",
]


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.rpartition(".")[2])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_an_interrupt_anywhere(
    place: str, after: bool, llama: Any, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C at the n-th use of every part of the machine, before or after it did its work: nothing is lost,
    the next call is right.
    """
    import pkgutil

    name = place.rpartition(".")
    owner, expected = pkgutil.resolve_name(name[0]), stock(llama, ids, num_beams=3)
    original = getattr(owner, name[2])
    options = {"num_beams": 3, "cache_config": {"block_size": 4}}
    for turn in (1, 2, 5, 13, 40):
        uses = []

        def break_off(*args: Any, uses: list[int] = uses, turn: int = turn, **kwargs: Any) -> Any:
            uses.append(1)
            if len(uses) != turn:
                return original(*args, **kwargs)
            if after:
                original(*args, **kwargs)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(owner, name[2], break_off)
            try:
                paged(llama, ids, **options)
            except KeyboardInterrupt:
                patch.undo()
                assert_clean(llama, "sdpa")
        assert torch.equal(paged(llama, ids, **options), expected)
        assert_clean(llama, "sdpa")


def test_a_torn_cache_is_not_read(llama: Any, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kept cache whose copy on write broke off says so, instead of answering from a block that was never
    filled.
    """
    from hf_paged.kv.store import Store

    cache = hf_paged.PagedCache(llama)
    history = stock(llama, ids, past_key_values=cache)
    cache.reorder_cache(torch.tensor([0, 0, 1]))
    with monkeypatch.context() as patch:
        patch.setattr(Store, "copy", lambda self, copies: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            stock(llama, torch.cat([history, ids[:, :1]], 1), past_key_values=cache)
    with pytest.raises(RuntimeError, match="broke off in the middle"):
        stock(llama, torch.cat([history, ids[:, :1]], 1), past_key_values=cache)
    cache.reset()
    assert torch.equal(stock(llama, ids, past_key_values=cache), stock(llama, ids))


def test_cross_attention_of_a_forward_that_is_taken_back() -> None:
    """C22, C36: a prompt that draws random numbers is computed again for every row, its cross attention too."""
    model = build(BY_NAME["bart"])
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    head = model.lm_head.forward
    model.lm_head.forward = lambda hidden: head(hidden) + torch.rand(())
    answers = []
    for ask in (stock, paged):
        torch.manual_seed(3)
        answers.append(ask(model, ids, do_sample=True, num_return_sequences=2))
    assert torch.equal(*answers)
