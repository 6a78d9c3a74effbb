"""A block is found only by what would compute it again: weights, adapters, settings, positions, tenants
(contract C18, C24, C25).

Every case changes the model between two calls with one prompt. The second answer must be stock's on the
changed model, and a cache that is keyed by tokens alone must get it wrong: otherwise the case would prove
nothing.
"""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from changed_models import PROMPT, Change, Steer, blind, noticed, scored, tuned_ask, two_adapters
from model_checks import prefix_key
from prefix_reuse import ask, continued, words
from releases import require_own_adapters, takes_as

import hf_paged
from hf_paged.model import hooks
from hf_paged.model.identity import identity_of
from hf_paged.model.weights_digest import DeviceParts

# ---- weights


def optimizer_step(model: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def load(model: Any) -> None:
    model.load_state_dict({name: value * 1.5 for name, value in model.state_dict().items()})


def edit_in_place(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight[3, 5] += 9


def assign_data(model: Any) -> None:
    weight = model.model.layers[0].self_attn.v_proj.weight
    weight.data = weight.data * 2


def add_to_data(model: Any) -> None:
    """The effect of peft's merge: neither a version nor an address moves."""
    weight = model.model.layers[1].self_attn.v_proj.weight
    before = weight._version, weight.data_ptr()
    weight.data += 0.5
    assert (weight._version, weight.data_ptr()) == before


def write_to_memory(model: Any) -> None:
    """The effect of an optimizer's own kernels, or a broadcast: torch knows nothing of it."""
    weight = model.model.layers[0].self_attn.v_proj.weight
    before = weight._version
    weight.detach().numpy()[:] *= 3
    assert weight._version == before


def write_one_row(model: Any) -> None:
    model.model.embed_tokens.weight.data[PROMPT[0, 7]] += 1


def exchange_two_rows(model: Any) -> None:
    """A sum over all words would not see it."""
    first, second = PROMPT[0, 7], PROMPT[0, 8]
    data = model.model.embed_tokens.weight.data
    data[[first, second]] = data[[second, first]].clone()


def replace_parameter(model: Any) -> None:
    layer = model.model.layers[0].self_attn.v_proj
    layer.weight = torch.nn.Parameter(layer.weight.detach() * 2)


def replace_module(model: Any) -> None:
    torch.manual_seed(7)
    model.model.layers[0].mlp.down_proj = torch.nn.Linear(48, 32, bias=False)


def turn_buffer(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(2)


WEIGHTS = [
    optimizer_step, load, edit_in_place, assign_data, add_to_data, write_to_memory, write_one_row, exchange_two_rows,
    replace_parameter, replace_module, turn_buffer,
]  # fmt: skip


@pytest.mark.parametrize("change", WEIGHTS, ids=lambda change: change.__name__)
def test_c24_changed_weights_are_noticed(llama: Any, change: Change) -> None:
    noticed(llama, change)


# ---- settings


def scale_attention(model: Any) -> None:
    model.model.layers[0].self_attn.scaling *= 3


def patch_instance(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    original = mlp.forward
    mlp.forward = lambda x: original(x) * 2


def change_config(model: Any) -> None:
    model.config.rms_norm_eps = 0.5
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 0.5


def set_tensor_attribute(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    if not hasattr(mlp, "factor"):
        mlp.factor = torch.ones(())
        original = mlp.forward
        mlp.forward = lambda x: original(x) * mlp.factor
    mlp.factor.data += 1


SETTINGS = [scale_attention, patch_instance, change_config, set_tensor_attribute]


@pytest.mark.parametrize("change", SETTINGS, ids=lambda change: change.__name__)
def test_c24_changed_settings_are_noticed(llama: Any, change: Change) -> None:
    noticed(llama, change)


def test_c24_an_edit_of_a_tensor_attribute_is_noticed(llama: Any) -> None:
    """A steering vector that hangs on a module is no parameter and no buffer."""
    set_tensor_attribute(llama)
    scored(llama)
    llama.model.layers[0].mlp.factor.data += 1
    assert scored(llama)[0] == 45


def test_c24_a_patched_class_is_noticed(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    scored(llama)
    kind = type(llama.model.layers[0].mlp)
    original = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: original(self, x) * 2)
    assert scored(llama)[0] == 45


def test_c24_dtype_and_attention(llama: Any) -> None:
    """Other numbers under equal weights: another number format, another attention function."""
    scored(llama)
    llama.set_attn_implementation("eager")
    assert scored(llama)[0] == 45
    llama.set_attn_implementation("sdpa")
    assert scored(llama)[0] == 1
    llama.double()
    assert scored(llama)[0] == 45
    with torch.autocast("cpu", torch.bfloat16):
        _, seen = ask(llama.float(), PROMPT, 4)
    assert seen[0] == 45
    assert scored(llama)[0] == 45


def test_what_comes_back_is_found_again(llama: Any) -> None:
    """Settings that return have their blocks again; weights that return do not, since nobody compares all of
    them.
    """
    scored(llama)
    llama.model.layers[0].self_attn.scaling *= 3
    assert scored(llama)[0] == 45
    llama.model.layers[0].self_attn.scaling /= 3
    assert scored(llama)[0] == 1
    state = copy.deepcopy(llama.state_dict())
    llama.load_state_dict(state)
    assert scored(llama)[0] == 45


def test_what_changes_nothing_is_not_noticed(llama: Any) -> None:
    """Gradients, modes that come back, another call's settings: nothing that a key should know."""
    scored(llama)
    llama.requires_grad_(False)
    llama.train()
    llama.eval()
    llama.generation_config.temperature = 0.3
    for parameter in llama.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert scored(llama)[0] == 1


# ---- hooks


@pytest.mark.parametrize("how", ["answers", "writes in place"])
def test_c24_a_hook_that_changes_something_is_noticed(llama: Any, how: str) -> None:
    """Blocks cached without it are not used with it, nor the other way round."""

    def change(model: Any) -> None:
        model.model.layers[0].mlp.register_forward_hook(Steer(how))

    twin = copy.deepcopy(llama)
    with pytest.MonkeyPatch.context() as patch:
        blind(patch)
        scored(twin)
        change(twin)
        with pytest.raises(AssertionError, match="answer"):
            scored(twin)
    scored(llama)
    handle = llama.model.layers[0].mlp.register_forward_hook(Steer(how))
    assert scored(llama)[:2] == [1, 45]  # begun with the cached part, seen, and computed anew
    assert scored(llama)[:2] == [1, 45]
    handle.remove()
    assert scored(llama)[0] == 1
    assert not any(
        isinstance(hook, hooks.MonitoredHook)
        for module in llama.modules()
        for hook in module._forward_hooks.values()
    )


def test_hooks_that_look_on_do_no_harm(llama: Any) -> None:
    """Another hook at every call, and the prompt is reused all the same."""
    scored(llama)
    for _ in range(2):
        shapes: list[Any] = []
        handle = llama.model.layers[1].mlp.register_forward_hook(
            lambda module, args, output, shapes=shapes: shapes.append(output.shape)
        )
        assert scored(llama)[0] == 1
        assert shapes[0] == (1, 1, 32)
        handle.remove()


def test_c24_hooks_of_all_modules_keep_everything_private(llama: Any) -> None:
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, args, output: None)
    try:
        scored(llama)
        assert scored(llama)[0] == 45
    finally:
        handle.remove()


# ---- adapters


@pytest.fixture
def tuned() -> Any:
    return two_adapters()


def switch(model: Any) -> None:
    model.set_adapter("two")


def scale(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "set_scale") and hasattr(module, "lora_A"):
            module.set_scale("one", 3.0)


def disable(model: Any) -> None:
    model.base_model.disable_adapter_layers()


def reload(model: Any) -> None:
    """Another adapter under the same name."""
    config = model.peft_config["one"]
    model.delete_adapter("one")
    torch.manual_seed(11)
    model.add_adapter("one", config)
    model.set_adapter("one")


def overwrite(model: Any) -> None:
    """Another adapter's weights under the same name, in the same tensors."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    state = {name: value * 2 for name, value in get_peft_model_state_dict(model, adapter_name="one").items()}
    set_peft_model_state_dict(model, state, adapter_name="one")


def load_from_disk(model: Any) -> None:
    """Another adapter under the same name, from a folder, as after a training run somewhere else."""
    import tempfile

    from safetensors.torch import load_file, save_file

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, selected_adapters=["one"])
        file = f"{folder}/one/adapter_model.safetensors"
        save_file({name: value * 2 for name, value in load_file(file).items()}, file)
        model.load_adapter(f"{folder}/one", adapter_name="one")


def merge_other(model: Any) -> None:
    model.merge_adapter(["two"])


def unmerge(model: Any) -> None:
    model.unmerge_adapter()


def both(model: Any) -> None:
    model.base_model.set_adapter(["one", "two"])


def noticed_by_peft(model: Any, change: Change) -> None:
    """The change of an adapter is noticed, and it would be wrong not to notice it."""
    twin = copy.deepcopy(model)
    with pytest.MonkeyPatch.context() as patch:
        blind(patch)
        tuned_ask(twin)
        change(twin)
        with pytest.raises(AssertionError):
            tuned_ask(twin)
    assert [tuned_ask(model), tuned_ask(model)] == [45, 1]
    change(model)
    assert [tuned_ask(model), tuned_ask(model)] == [45, 1]


ADAPTERS = [switch, scale, disable, reload, overwrite, load_from_disk, merge_other, both]


@pytest.mark.parametrize("change", ADAPTERS, ids=lambda change: change.__name__)
def test_c24_changed_adapters_are_noticed(tuned: Any, change: Change) -> None:
    noticed_by_peft(tuned, change)


def test_c24_an_adapter_that_is_unmerged_is_noticed(tuned: Any) -> None:
    merge_other(tuned)
    noticed_by_peft(tuned, unmerge)


@pytest.mark.parametrize(
    "change",
    [lambda model: model.set_adapter("two"), lambda model: model.disable_adapters()],
    ids=["switch", "disable"],
)
def test_c24_adapters_without_a_wrapper_are_noticed(llama: Any, change: Change) -> None:
    """transformers' own methods put peft's layers into the model itself."""
    require_own_adapters()
    peft = pytest.importorskip("peft", reason="peft is an extra")
    torch.manual_seed(0)
    for name in ("one", "two"):
        config = peft.LoraConfig(
            r=4, lora_alpha=16, target_modules=["q_proj", "k_proj", "v_proj"], init_lora_weights=False
        )
        llama.add_adapter(config, adapter_name=name)
    llama.set_adapter("one")
    noticed(llama.eval(), change)


def test_c24_merge_and_unmerge_are_noticed(tuned: Any) -> None:
    """Merged weights say the same up to rounding, and are other weights."""
    assert [tuned_ask(tuned), tuned_ask(tuned)] == [45, 1]
    tuned.merge_adapter()
    assert [tuned_ask(tuned), tuned_ask(tuned)] == [45, 1]
    tuned.unmerge_adapter()
    assert [tuned_ask(tuned), tuned_ask(tuned)] == [45, 1]


def test_adapters_that_take_turns_keep_their_prefixes(tuned: Any) -> None:
    for expected in (45, 1, 1):
        for name in ("one", "two"):
            tuned.set_adapter(name)
            assert tuned_ask(tuned) == expected
    with tuned.disable_adapter():
        assert tuned_ask(tuned) == 45
    tuned.set_adapter("one")
    assert tuned_ask(tuned) == 1


@pytest.mark.parametrize("mode", [{}, {"num_beams": 2}], ids=["greedy", "beams"])
def test_c24_each_row_has_the_key_of_its_adapter(tuned: Any, mode: dict[str, Any]) -> None:
    """Rows of a mixed batch find what their own adapter computed, and nothing else."""
    ids = PROMPT.repeat(3, 1)
    twin = copy.deepcopy(tuned)
    with pytest.MonkeyPatch.context() as patch:
        blind(patch)
        with pytest.raises(AssertionError):  # rows of equal tokens even exchange their blocks
            tuned_ask(twin, ids, adapter_names=["one", "__base__", "two"], **mode)
    assert tuned_ask(tuned, ids, adapter_names=["one", "__base__", "two"], **mode) == 45
    assert tuned_ask(tuned, ids, adapter_names=["one", "__base__", "two"], **mode) == 1
    assert tuned_ask(tuned, ids, adapter_names=["two", "one", "__base__"], **mode) == 1
    assert tuned_ask(tuned, ids[:1], **mode) == 1  # the active adapter is the same one


# ---- tenants, names and tokens


def test_c24_a_salt_separates_tenants(llama: Any) -> None:
    """One pool, and nobody sees by a call's time what another tenant has asked."""
    for expected in (45, 1):
        for salt in ("one tenant", "another", ""):
            assert ask(llama, PROMPT, 4, {"salt": salt})[1][0] == expected
    assert len(hf_paged.stats(llama).pools) == 1


def test_c24_positions_are_part_of_the_key(llama: Any) -> None:
    """Tokens at other places than their own count are nobody else's."""
    scored(llama)
    moved = torch.arange(100, 145)[None]
    assert scored(llama, position_ids=moved)[0] == 45
    assert "the positions do not count a row's tokens" in hf_paged.stats(llama).reasons
    assert scored(llama)[0] == 1


def test_c24_embeddings_are_known_by_their_content(llama: Any) -> None:
    """Equal embeddings are one prompt; one number in one of them makes another."""
    embeddings = llama.get_input_embeddings()(PROMPT).detach()
    call = {"input_ids": None, "inputs_embeds": embeddings, "attention_mask": torch.ones_like(PROMPT)}
    assert scored(llama, **call)[0] == 45
    assert scored(llama, **{**call, "inputs_embeds": embeddings.clone()})[0] == 1
    other = embeddings.clone()
    other[0, 22, 3] += 1e-3
    assert scored(llama, **{**call, "inputs_embeds": other})[0] == 45 - 22
    assert scored(llama)[0] == 45


def test_c24_other_arguments_keep_a_prompt_private(llama: Any) -> None:
    """A tensor that nobody knows may change what is computed."""
    original = type(llama).forward

    class Odd(type(llama)):  # type: ignore[misc]
        @takes_as(original, "shift")
        def forward(self, input_ids: Any = None, shift: Any = None, **kwargs: Any) -> Any:
            return original(self, input_ids, **kwargs)

    llama.__class__ = Odd
    for _ in range(2):
        assert ask(llama, PROMPT, 4, shift=torch.ones(1, 1))[1][0] == 45
    assert hf_paged.stats(llama).reasons["shift is given"] == 2


def test_c25_verify_compares_tokens(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that collide hand out nothing: here every block of a depth has the same name."""
    from hf_paged.blocks import prefix
    from hf_paged.blocks import prefix_lookup as lookup

    def weak(parent: bytes, tokens: Any, extra: bytes = b"") -> bytes:
        return bytes([parent[0] + 1, *parent[1:]]) if len(tokens) == 4 else original(parent, tokens, extra)

    original = prefix.chain
    monkeypatch.setattr(prefix, "chain", weak)
    monkeypatch.setattr(lookup, "chain", weak)
    other = words(1, 45, seed=77)
    ask(llama, PROMPT, 4)
    with pytest.raises(AssertionError, match="answer"):
        ask(llama, other, 4)
    hf_paged.invalidate(llama)
    assert ask(llama, PROMPT, 4, {"verify": "tokens"})[1][0] == 45
    assert ask(llama, other, 4, {"verify": "tokens"})[1][0] == 45


def test_names_cannot_be_worked_out_beforehand(llama: Any) -> None:
    """Every process has a secret of its own, and every model: nobody can prepare tokens whose names
    collide.
    """
    other = copy.deepcopy(llama)
    assert identity_of(llama).secret != identity_of(other).secret
    assert len(identity_of(llama).secret) == 32
    ask(llama, PROMPT, 4)
    ask(other, PROMPT, 4)
    names = [set(memory_pool(model).names.digests().values()) for model in (llama, other)]
    assert names[0]
    assert not names[0] & names[1]


def memory_pool(model: Any) -> Any:
    from hf_paged.model.registry import memory_of

    return next(iter(memory_of(model).groups.values())).pool


# ---- how much is looked at


def test_weights_that_cannot_be_read_keep_everything_private(llama: Any) -> None:
    """A parameter without memory: offloaded, or not there yet."""
    llama.register_buffer("elsewhere", torch.empty(3, device="meta"))
    ask(llama, PROMPT, 4)
    assert ask(llama, PROMPT, 4)[1][0] == 45
    assert "has no memory to read" in next(iter(hf_paged.stats(llama).reasons))


def test_looking_keeps_no_weights_alive(llama: Any) -> None:
    """A model whose weights are replaced gives the old ones back."""
    import gc
    import weakref

    ask(llama, PROMPT, 4)
    old = weakref.ref(llama.model.layers[0].mlp.up_proj.weight.untyped_storage())
    parameter = weakref.ref(llama.model.layers[0].mlp.up_proj.weight)
    replace = llama.model.layers[0].mlp.up_proj
    replace.weight = torch.nn.Parameter(replace.weight.detach().clone())
    gc.collect()
    assert parameter() is None
    assert old() is None


def test_a_change_in_the_middle_of_a_call_poisons_nothing(llama: Any) -> None:
    """A logits processor that writes to the weights: what comes behind it is not what the key says."""
    from transformers import LogitsProcessor, LogitsProcessorList

    class Meddle(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if input_ids.shape[1] == 48:
                with torch.no_grad():
                    llama.model.layers[0].self_attn.v_proj.weight.mul_(2)
            return scores

    call = {"attention_mask": torch.ones_like(PROMPT), "max_new_tokens": 8, "cache_implementation": "paged"}
    options = {"block_size": 4, "prefix_caching": True}
    answer = llama.generate(
        PROMPT, **call, cache_config=options, logits_processor=LogitsProcessorList([Meddle()])
    )
    assert hf_paged.stats(llama).reasons["the model changed while it was used"] == 1
    with torch.no_grad():
        llama.model.layers[0].self_attn.v_proj.weight.mul_(0.5)
    scored(llama, answer)


def test_a_kept_cache_that_outlives_a_change_is_private(llama: Any) -> None:
    """Later tokens rest on old keys and values: found by nobody."""
    cache = hf_paged.PagedCache(llama, block_size=4, prefix_caching=True)
    call = {"max_new_tokens": 6, "do_sample": False, "past_key_values": cache}
    first = llama.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), **call)
    load(llama)
    longer = torch.cat([first, words(1, 5, seed=3)], 1)
    second = llama.generate(longer, attention_mask=torch.ones_like(longer), **call)
    assert hf_paged.stats(llama).reasons["the model has changed since the cache was begun"] == 1
    assert scored(llama, continued(second, second.shape[1], 3))[0] == second.shape[1] + 3


# ---- several checks at once


def test_a_state_has_one_number_until_the_weights_change(llama: Any) -> None:
    state = prefix_key(llama)
    assert prefix_key(llama) == state
    with torch.no_grad():
        llama.lm_head.weight.mul_(2)
    changed = prefix_key(llama)
    assert changed != state
    assert prefix_key(llama) == changed


def test_one_thread_looks_at_a_time(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two engines on one model look whenever they are idle, each in its own thread."""
    state = prefix_key(llama)
    read, inside, most, found = DeviceParts.read, [0], [0], []
    others: list[threading.Thread] = []
    came = threading.Event()

    def look() -> None:
        found.append(prefix_key(llama))

    def watched(kv_group: DeviceParts, ranges: list[tuple[int, int]]) -> Any:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        if others:
            came.set()
        else:
            others.append(threading.Thread(target=look))
            others[0].start()
            came.wait(0.2)  # whoever does not wait outside comes in here
        answer = read(kv_group, ranges)
        inside[0] -= 1
        return answer

    monkeypatch.setattr(DeviceParts, "read", watched)
    look()
    others[0].join()
    assert found == [state, state]
    assert most[0] == 1


@pytest.mark.parametrize("bound", [{0: 1.0}, [1.0], [torch.ones(1)], torch.ones(1)], ids=repr)
def test_c24_what_a_replaced_forward_has_from_where_it_was_made(llama: Any, bound: Any) -> None:
    """A layer is steered by something outside the model, which changes between two calls."""
    projection = llama.model.layers[0].mlp.down_proj
    stock = projection.forward
    projection.forward = lambda x: stock(x) * bound[0]
    for _ in range(3):
        assert [scored(llama)[0] for _ in range(2)] == [PROMPT.shape[1], 1]
        bound[0] *= 2.0
