"""What of peft is served, by what code, and what is refused with which words: the table of docs/adapters.md.

    python scripts/adapter_table.py [--only DoRA IA3 ...] [--write docs/adapters.md]

A tiny random model with two adapters of every method of the installed peft, and of every option of its LoRA.
Each is tried in five ways: a paged generate() with one active (greedy, beams, and with the prefixes of both
found again), with adapter_names, the engine with one active, the engine with one for each request, and an
engine that is given a saved folder. Right are the tokens of stock transformers and peft; where these refuse,
the paged call must raise the same. A method or an option of LoRA without a case is an error. Exit code 1 if
anything differs or fails in another way than by a refusal. Then the steps of a kind are timed, on the CUDA device
where there is one.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import os
import re
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "tests" / "support")]

import peft  # noqa: E402 (it and the next ones need the lines above)
import torch  # noqa: E402
import transformers  # noqa: E402
from families import BY_NAME, build  # noqa: E402
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING  # noqa: E402

import hf_paged  # noqa: E402
from hf_paged import Engine  # noqa: E402
from hf_paged.model.snapshot import ModelSnapshot  # noqa: E402

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SQUARE = ["q_proj", "o_proj"]
IDS = torch.randint(5, 90, (3, 9), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
MASK[1, :3] = 0
GREEDY = {"max_new_tokens": 8, "do_sample": False}
BEAMS = {"max_new_tokens": 8, "do_sample": False, "num_beams": 3}
PAGED = {"cache_implementation": "paged", "cache_config": {"block_size": 4, "prefix_caching": True}}
ROWS = ["one", "__base__", "two"]
WARM_UP = 8
MEASURED = 24
"""Tokens of the requests whose steps are timed, before and meanwhile."""
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Where they are timed."""
NOISE = 0.2
"""What is added to the adapters' weights, so that each changes the tokens."""


# ---- the kinds of adapters


def wrap(config: Callable[[], Any], base: Any) -> Any:
    """The base in a peft model with two adapters."""
    model = peft.get_peft_model(base, config(), "one")
    model.add_adapter("two", config())
    return model


def wrap_one(config: Callable[[], Any], base: Any) -> Any:
    """With one, where peft allows no more."""
    return peft.get_peft_model(base, config(), "one")


def load(config: Callable[[], Any], base: Any) -> Any:
    """The base with two adapters as transformers loads them from folders."""
    with tempfile.TemporaryDirectory() as folder:
        wrap(config, base_of("llama")).save_pretrained(folder)
        for name in ("one", "two"):
            base.load_adapter(f"{folder}/{name}", name)
    base.set_adapter("one")
    return base


TWO = (wrap, load)


@dataclasses.dataclass(frozen=True)
class Case:
    """A kind of adapter, and how a model gets two of them."""

    name: str
    config: Callable[[], Any]
    covers: str
    """The method, or the option of LoRA."""
    family: str = "llama"
    make: Callable[[Callable[[], Any], Any], Any] = wrap
    then: Callable[[Any], Any] = lambda model: None
    """What is done to the model when its adapters are there."""
    noise: float = NOISE
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Further arguments of generate()."""
    names: tuple[str, str] = ("one", "two")
    """Two adapters that requests name, where there are two."""
    new_tokens: int = 0
    """Tokens that the adapters' base has beyond the model that the engine is given a folder for."""


def lora(**options: Any) -> Callable[[], Any]:
    """A LoraConfig of its own for each adapter."""
    return lambda: peft.LoraConfig(
        **{
            "r": 4,
            "lora_alpha": 8,
            "target_modules": LINEAR,
            "task_type": "CAUSAL_LM",
            **copy.deepcopy(options),
        }
    )


def other(kind: str, **options: Any) -> Callable[[], Any]:
    """A config of another method, with what all of them need."""
    found: Any = PEFT_TYPE_TO_CONFIG_MAPPING[kind]
    fields = {field.name for field in dataclasses.fields(found)}
    wanted: dict[str, Any] = {"task_type": "CAUSAL_LM"}
    wanted |= {"target_modules": LINEAR} if "target_modules" in fields else {}
    wanted |= {"num_virtual_tokens": 3} if "num_virtual_tokens" in fields else {}
    return lambda: found(**{**wanted, **copy.deepcopy(options)})


def _several_active(model: Any) -> None:
    model.base_model.set_adapter(["one", "two"])


def _one_active_of_two_sizes(base: Any) -> Any:
    model = peft.get_peft_model(base, lora(r=3)(), "one")
    model.add_adapter("two", lora(r=24, target_modules=["q_proj"])())
    return model


def _mixed(config: Callable[[], Any], base: Any) -> Any:
    model = peft.get_peft_model(base, config(), "one", mixed=True)
    model.add_adapter("two", other("LOHA")())
    model.set_adapter(["one", "two"])
    return model


def _xlora(base: Any) -> Any:
    folder = tempfile.mkdtemp()
    wrap(lora(), build(BY_NAME["llama"])).save_pretrained(folder)
    base.config.use_cache = False
    adapters = {name: f"{folder}/{name}" for name in ("one", "two")}
    config = peft.XLoraConfig(task_type="CAUSAL_LM", hidden_size=32, xlora_depth=1, adapters=adapters)
    return peft.get_peft_model(base, config, "default")


def _arrow(base: Any) -> Any:
    """A router over two adapters, which computes with both of them."""
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(1)
        wrap(lora(init_lora_weights=False), base_of("llama")).save_pretrained(folder)
        config = peft.ArrowConfig(top_k=1, router_temperature=1.0, rng_seed=1)
        return peft.tuners.lora.create_arrow_model(base, [f"{folder}/one", f"{folder}/two"], config)


LORA = [
    Case("linear layers", lora(), "target_modules"),
    Case("`q_proj` only", lora(target_modules=["q_proj"]), "target_modules"),
    Case(
        "all but the query (`exclude_modules`)",
        lora(target_modules="all-linear", exclude_modules=["q_proj"]),
        "exclude_modules",
    ),
    Case(
        "Conv1D (GPT-2)",
        lora(target_modules=["c_attn", "c_proj"], fan_in_fan_out=True),
        "fan_in_fan_out",
        "gpt2",
    ),
    Case("embeddings", lora(target_modules=["embed_tokens", "q_proj"]), "target_modules"),
    Case("the head", lora(target_modules=["lm_head", "q_proj"]), "target_modules"),
    Case(
        "a tied head (`ensure_weight_tying`)",
        lora(target_modules=["embed_tokens", "lm_head"], ensure_weight_tying=True),
        "ensure_weight_tying",
        "tied",
    ),
    Case(
        "attention beside experts (Mixtral)",
        lora(target_modules=["q_proj", "v_proj"]),
        "target_modules",
        "mixtral",
    ),
    Case(
        "experts (`target_parameters`)",
        lora(target_modules=[], target_parameters=["experts.gate_up_proj", "experts.down_proj"]),
        "target_parameters",
        "mixtral",
        make=wrap_one,
    ),
    Case(
        "an encoder-decoder (T5)",
        lora(target_modules=["q", "v", "wi"], task_type="SEQ_2_SEQ_LM"),
        "target_modules",
        "t5",
    ),
    Case("two of other ranks and layers", lora(), "r", make=lambda _, base: _one_active_of_two_sizes(base)),
    Case(
        "rank and alpha patterns",
        lora(rank_pattern={"q_proj": 2, "v_proj": 16}, alpha_pattern={"k_proj": 3}),
        "rank_pattern alpha_pattern lora_alpha",
    ),
    Case(
        "some layers (`layers_to_transform`)",
        lora(layers_to_transform=[1], layers_pattern="layers"),
        "layers_to_transform layers_pattern",
    ),
    Case("rsLoRA", lora(use_rslora=True), "use_rslora"),
    Case("dropout, in eval mode", lora(lora_dropout=0.5), "lora_dropout"),
    Case("DoRA", lora(use_dora=True), "use_dora"),
    Case('`bias="lora_only"`', lora(bias="lora_only"), "bias", "qwen2", make=wrap_one),
    Case("`lora_bias`", lora(lora_bias=True), "lora_bias"),
    Case("`modules_to_save` (the head)", lora(modules_to_save=["lm_head"]), "modules_to_save"),
    Case(
        "new tokens (`resize_token_embeddings`)",
        lora(modules_to_save=["embed_tokens", "lm_head"]),
        "modules_to_save",
        new_tokens=8,
    ),
    Case(
        "trained tokens (`trainable_token_indices`)",
        lora(trainable_token_indices={"embed_tokens": IDS[:, 2].tolist()}),
        "trainable_token_indices",
    ),
    Case("aLoRA", lora(alora_invocation_tokens=[int(IDS[0, 6]), int(IDS[0, 7])]), "alora_invocation_tokens"),
    Case("replicated layers", lora(layer_replication=[(0, 2), (1, 2)]), "layer_replication", make=wrap_one),
    *[
        Case(f'`init_lora_weights="{begin}"`', lora(init_lora_weights=begin), "init_lora_weights", noise=0.1)
        for begin in ("gaussian", "orthogonal", "pissa", "olora", "mica")
    ],
    Case(
        "block-diagonal (BD-LoRA)",
        lora(
            use_bdlora=peft.tuners.lora.config.BdLoraConfig(
                target_modules_bd_a=["o_proj", "down_proj"],
                target_modules_bd_b=["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"],
                nblocks=2,
            )
        ),
        "use_bdlora",
    ),
    Case("KaSA", lora(kasa_config=peft.tuners.lora.config.KasaConfig()), "kasa_config"),
    Case("VeLoRA", lora(velora_config={"num_groups": 4}), "velora_config"),
    Case(
        "MonteCLoRA", lora(monteclora_config=peft.tuners.lora.config.MontecloraConfig()), "monteclora_config"
    ),
    Case(
        "Arrow (a router over adapters)",
        lambda: None,
        "arrow_config",
        make=lambda _, base: _arrow(base),
        noise=0.0,
        names=("arrow_router", "task_0"),
    ),
    Case("several active at once", lora(), "target_modules", then=_several_active),
    Case(
        "merged (`merge_adapter`)", lora(), "target_modules", then=lambda model: model.merge_adapter(["one"])
    ),
    Case(
        "beside LoHa, in a mixed model",
        lora(),
        "target_modules",
        make=lambda config, base: _mixed(config, base),
    ),
    Case("by transformers' `load_adapter`", lora(), "target_modules", make=load),
]


NOT_TRIED = {
    "runtime_config": "moves weights to a CPU while they are made",
    "megatron_config": "needs Megatron",
    "megatron_core": "needs Megatron",
    "loftq_config": "quantizes the model",
    "eva_config": "needs data before training",
    "corda_config": "needs data before training",
    "lora_ga_config": "needs gradients before training",
    "use_qalora": "needs GPTQ layers",
    "qalora_group_size": "needs GPTQ layers",
}
"""Options of LoRA that this script cannot make, and why."""

OTHERS = [
    Case("AdaLoRA", other("ADALORA", total_step=10), "ADALORA", make=wrap_one),
    Case("AdaMSS", other("ADAMSS", r=4), "ADAMSS"),
    Case(
        "Adaption Prompt",
        other("ADAPTION_PROMPT", target_modules="self_attn", adapter_len=4, adapter_layers=2),
        "ADAPTION_PROMPT",
    ),
    Case("BEFT", other("BEFT", target_modules=["v_proj"]), "BEFT"),
    Case("BOFT", other("BOFT", boft_block_size=4), "BOFT"),
    Case("C3A", other("C3A", block_size=4), "C3A"),
    Case("Cartridge", other("CARTRIDGE"), "CARTRIDGE"),
    Case(
        "CPT",
        other("CPT", cpt_token_ids=[5, 6, 7], cpt_mask=[1, 1, 1], cpt_tokens_type_mask=[1, 2, 3]),
        "CPT",
    ),
    Case("DEFT", other("DEFT"), "DEFT"),
    Case("DeLoRA", other("DELORA"), "DELORA"),
    Case("FourierFT", other("FOURIERFT", n_frequency=100), "FOURIERFT", noise=30.0),
    Case("FRoD", other("FROD", target_modules=SQUARE, progressbar=False), "FROD"),
    Case("GLoRA", other("GLORA"), "GLORA"),
    Case("GraLoRA", other("GRALORA", r=4), "GRALORA"),
    Case("HiRA", other("HIRA", r=4), "HIRA"),
    Case("HRA", other("HRA"), "HRA"),
    Case(
        "IA3",
        other("IA3", target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
        "IA3",
        noise=0.6,
    ),
    Case("Lily", other("LILY", r=4), "LILY"),
    Case("LN tuning", other("LN_TUNING", target_modules=["input_layernorm", "norm"]), "LN_TUNING", noise=0.6),
    Case("LoHa", other("LOHA", r=4), "LOHA"),
    Case("LoKr", other("LOKR", r=4), "LOKR"),
    Case("MiSS", other("MISS", r=4), "MISS"),
    Case(
        "Multitask prompt tuning",
        other("MULTITASK_PROMPT_TUNING", num_tasks=2),
        "MULTITASK_PROMPT_TUNING",
        extra={"task_ids": torch.tensor([0, 1, 0])},
    ),
    Case("OFT", other("OFT", oft_block_size=8), "OFT"),
    Case("OSF", other("OSF", target_modules=SQUARE), "OSF", make=wrap_one),
    Case("P-tuning", other("P_TUNING", encoder_hidden_size=16), "P_TUNING"),
    Case("PEANuT", other("PEANUT", r=4), "PEANUT"),
    Case("Poly", other("POLY", r=4, n_tasks=2), "POLY", extra={"task_ids": torch.tensor([0, 1, 0])}),
    Case("Prefix tuning", other("PREFIX_TUNING"), "PREFIX_TUNING", noise=1.0),
    Case("Prompt tuning", other("PROMPT_TUNING"), "PROMPT_TUNING"),
    Case("PSOFT", other("PSOFT", r=4), "PSOFT"),
    Case("PVeRA", other("PVERA"), "PVERA"),
    Case("RandLoRA", other("RANDLORA", r=4), "RANDLORA"),
    Case("RoAd", other("ROAD", group_size=8), "ROAD"),
    Case("Shadow", other("SHADOW", r=4), "SHADOW"),
    Case("SHiRA", other("SHIRA", r=2), "SHIRA"),
    Case("SuperTuning", other("SUPERTUNING"), "SUPERTUNING"),
    Case("TinyLoRA", other("TINYLORA"), "TINYLORA"),
    Case(
        "Trainable tokens",
        other("TRAINABLE_TOKENS", target_modules=["embed_tokens"], token_indices=IDS[:, 2].tolist()),
        "TRAINABLE_TOKENS",
    ),
    Case("Uni-LoRA", other("UNILORA"), "UNILORA"),
    Case("VB-LoRA", other("VBLORA", vector_length=16, num_vectors=8), "VBLORA"),
    Case("VeRA", other("VERA"), "VERA"),
    Case("WaveFT", other("WAVEFT", n_frequency=100), "WAVEFT", noise=2.0),
    Case("X-LoRA", lambda: None, "XLORA", make=lambda _, base: _xlora(base)),
]


# ---- trying one


@dataclasses.dataclass
class Cell:
    """What came of one way of using an adapter."""

    mark: str
    words: str = ""
    """Of a refusal, a warning or a failure."""
    trouble: str = ""


def base_of(family: str) -> Any:
    """A tiny model, the same one every time."""
    if family != "tied":
        return build(BY_NAME[family])
    model = build(BY_NAME["llama"])
    model.config.tie_word_embeddings = True
    model.tie_weights()
    return model


def tuned_base(case: Case) -> Any:
    """The model that a case's adapters are trained on."""
    base = base_of(case.family)
    if case.new_tokens:
        torch.manual_seed(2)
        base.resize_token_embeddings(base.config.vocab_size + case.new_tokens)
    return base


def made(case: Case) -> Any:
    """A model with the case's adapters, whose weights are random."""
    base = tuned_base(case)
    before = {id(each) for each in base.parameters()}
    torch.manual_seed(1)
    model = case.make(case.config, base).eval()
    with torch.no_grad():
        for each in model.parameters():
            if id(each) not in before and each.is_floating_point():
                each.add_(torch.randn_like(each) * case.noise)
    case.then(model)
    return model


def unwrapped(model: Any) -> Any:
    """The transformers model."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def stock(model: Any, ids: torch.Tensor, mask: torch.Tensor | None = None, **options: Any) -> Any:
    """The tokens of generate() on an ordinary or a paged cache."""
    mask = torch.ones_like(ids) if mask is None else mask
    return model.generate(input_ids=ids, attention_mask=mask, **options)


@contextlib.contextmanager
def active(model: Any, name: str | None) -> Iterator[None]:
    """An adapter, or none, active for a moment."""
    if name is None and hasattr(model, "disable_adapter"):
        with model.disable_adapter():
            yield
    elif name is None:
        model.disable_adapters()
        yield
        model.enable_adapters()
    else:
        before = _active(model)
        model.set_adapter(name)
        yield
        (model.base_model if len(before) > 1 else model).set_adapter(before if len(before) > 1 else before[0])


def _active(model: Any) -> list[str]:
    found = model.active_adapters
    return list(found() if callable(found) else found)


def answers(call: Callable[..., Any], caught: list[str]) -> Cell:
    """What comes of a call in several modes, on stock's cache and twice on pages: the second finds prefixes."""
    done = False
    for options in (GREEDY, BEAMS):
        try:
            expected = call(**options)
        except Exception:
            if done:
                continue  # stock cannot do that mode
            raise
        for _ in range(2):
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always", hf_paged.FallbackWarning)
                paged = call(**options, **PAGED)
            caught += [str(each.message) for each in found if each.category is hf_paged.FallbackWarning]
            if not torch.equal(paged, expected):
                return Cell("other", trouble=f"{options}: {paged.tolist()} for {expected.tolist()}")
        done = True
    return Cell("same")


def in_generate(model: Any, case: Case) -> Cell:
    """One active, then the other, then the first again, on one prefix cache; a row is padded."""
    caught: list[str] = []
    for name in ("one", "two", "one") if case.make in TWO and len(_active(model)) == 1 else (None,):
        with contextlib.nullcontext() if name is None else active(model, name):
            cell = answers(partial(stock, model, IDS, MASK, **case.extra), caught)
        if cell.mark != "same":
            return cell
    return Cell("stock's cache", caught[0]) if caught else Cell("same")


def by_names(model: Any, case: Case) -> Cell:
    """A row for each adapter and one for the base."""
    first, _, second = names_of(case)
    rows = [first, "__base__", second]
    call = partial(stock, model, IDS, MASK, adapter_names=rows, **case.extra)
    try:
        cell = answers(call, [])
    except Exception as refusal:
        try:
            call(**GREEDY, **PAGED)
        except Exception as error:
            if (type(error), str(error)) == (type(refusal), str(refusal)):
                return Cell("peft raises", f"{type(error).__name__}: {error}")
            return Cell("other", trouble=f"{error!r} instead of {refusal!r}")
        return Cell("other", trouble=f"answered where stock raises {refusal!r}")
    if cell.mark != "same":
        return cell
    unnamed = stock(model, IDS, MASK, **case.extra, **GREEDY)
    with active(model, None):
        plain = stock(model, IDS, MASK, **case.extra, **GREEDY)
    call = partial(stock, model, IDS, MASK, adapter_names=["__base__"] * len(IDS), **case.extra)
    if not torch.equal(unnamed, plain) and torch.equal(call(**GREEDY), unnamed):
        return Cell("ignored by peft")
    return cell


@contextlib.contextmanager
def without_leftovers(model: Any) -> Iterator[None]:
    """Take away the hooks that a call of peft's leaves in a model when it fails."""
    before = [(module._forward_pre_hooks, dict(module._forward_pre_hooks)) for module in model.modules()]
    try:
        yield
    except Exception:
        for hooks, known in before:
            hooks.clear()
            hooks.update(known)
        raise


def alone(model: Any, row: int, case: Case, options: dict[str, Any] = GREEDY) -> list[int]:
    """The new tokens of one prompt by stock generate()."""
    disabled = getattr(model, "_adapters_disabled", False)  # the base knows no task
    beams = options.get("num_beams", 1)
    extra = {} if disabled else {name: value[[row] * beams] for name, value in case.extra.items()}
    with without_leftovers(model):
        found = stock(model, IDS[row : row + 1], **options, **extra)
    begin = 1 if unwrapped(model).config.is_encoder_decoder else IDS.shape[1]
    tokens: list[int] = found[0, begin:].tolist()
    return tokens


def asked(engine: Engine, adapters: list[Any], case: Case, options: dict[str, Any]) -> list[list[int]]:
    """The new tokens of a prompt for each adapter, all in one batch."""
    handles = []
    for row, each in enumerate(adapters):
        named = {} if each == "active" else {"adapter": each}
        named |= {} if each is None else {name: value[row] for name, value in case.extra.items()}
        handles.append(engine.submit(IDS[row].tolist(), **options, **named))
    outputs = [handle.result() for handle in handles]
    engine.check()
    for output in outputs:
        if output.error is not None:
            raise output.error
    return [list(output.sequences[0].token_ids) for output in outputs]


def compared(found: list[list[int]], expected: list[list[int]]) -> Cell:
    return Cell("same") if found == expected else Cell("other", trouble=f"{found} for {expected}")


Expected = list[tuple[dict[str, Any], list[list[int]]]]
"""Options of requests, and the tokens of their answers."""


def expect(answers: Callable[[dict[str, Any]], list[list[int]]]) -> Expected:
    """The answers of stock, greedy and with beams, where it can."""
    found = [(GREEDY, answers(GREEDY))]
    with contextlib.suppress(Exception):
        found.append((BEAMS, answers(BEAMS)))
    return found


def in_modes(engine: Engine, names: list[Any], case: Case, expected: Expected) -> Cell:
    """Requests in each mode, twice: the second ones find the prefixes of the first ones."""
    for options, tokens in expected:
        for _ in range(2):
            try:
                found = asked(engine, names, case, options)
            except ValueError as error:
                if options is GREEDY:
                    raise
                return Cell("same", f"without beams: {error}")
            if found != tokens:
                return Cell("other", trouble=f"{options}: {found} for {tokens}")
    return Cell("same")


def names_of(case: Case) -> list[Any]:
    """An adapter, none, and another one if the case has two."""
    first, second = case.names
    return [first, None, second if case.make in TWO or case.names != Case.names else first]


def in_engine(model: Any, case: Case) -> Cell:
    """The engine, with what is active."""
    expected = expect(lambda options: [alone(model, row, case, options) for row in range(3)])
    with Engine(model, block_size=4, num_blocks=100) as engine:
        return in_modes(engine, ["active"] * 3, case, expected)


def by_request(model: Any, case: Case) -> Cell:
    """An adapter for each request, and the base."""

    def answer(row: int, name: str | None, options: dict[str, Any]) -> list[int]:
        with active(model, name):
            return alone(model, row, case, options)

    names = names_of(case)
    expected: Expected = []
    with contextlib.suppress(Exception):  # the engine says why requests cannot choose
        expected = expect(lambda options: [answer(row, name, options) for row, name in enumerate(names)])
    with Engine(model, block_size=4, num_blocks=100) as engine:
        if not expected:
            asked(engine, names, case, GREEDY)
            raise RuntimeError("requests choose what stock does not compute")
        return in_modes(engine, names, case, expected)


def from_folder(model: Any, case: Case) -> Cell:
    """An engine on the plain model, which is given one of them as peft has saved it."""
    name = _active(model)[0]
    with (
        tempfile.TemporaryDirectory() as folder,
        Engine(base_of(case.family), block_size=4, num_blocks=100) as engine,
    ):
        model.save_pretrained(folder)
        path = Path(folder, name) if Path(folder, name).exists() else folder
        loaded = peft.PeftModel.from_pretrained(tuned_base(case), str(path), name).eval()
        plain, base = dataclasses.replace(case, extra={}), base_of(case.family)
        expected = expect(
            lambda options: [
                *(alone(loaded, row, case, options) for row in (0, 1)),
                alone(base, 2, plain, options),
            ]
        )
        engine.add_adapter(name, path)
        return in_modes(engine, [name, name, None], case, expected)


WAYS = {
    "generate()": in_generate,
    "`adapter_names=`": by_names,
    "engine": in_engine,
    "engine, `adapter=`": by_request,
    "`add_adapter(folder)`": from_folder,
}


def milliseconds(case: Case) -> str:
    """The median of decode steps of three requests, of each adapter and the model alone; of what is active
    where requests cannot choose; nothing where the engine serves neither.
    """
    for wanted in (names_of(case), ["active"] * 3):
        try:
            with Engine(made(case).to(DEVICE), block_size=4, num_blocks=100) as engine:
                # First twins are tried out, kernels compiled and steps captured.
                for tokens in (WARM_UP, MEASURED):
                    handles = submit_all(engine, wanted, case, tokens)
                    took = []
                    while not all(handle.done for handle in handles):
                        begin = time.perf_counter()
                        engine.step()
                        took.append(time.perf_counter() - begin)
                if all(handle.result().error is None for handle in handles):
                    return f"{1000 * statistics.median(took):.1f}"
        except Exception:
            continue
    return ""


def submit_all(engine: Engine, adapters: list[Any], case: Case, tokens: int) -> list[Any]:
    """A request of so many tokens for each adapter."""
    handles = []
    options = {"do_sample": False, "max_new_tokens": tokens, "eos_token_id": -1}
    for row, each in enumerate(adapters):
        named = {} if each == "active" else {"adapter": each}
        named |= {} if each is None else {name: value[row] for name, value in case.extra.items()}
        handles.append(engine.submit(IDS[row].tolist(), **options, **named))
    return handles


def tried(way: Callable[[Any, Case], Cell], case: Case) -> Cell:
    """One way, on a model of its own."""
    model = made(case)
    try:
        return way(model, case)
    except Exception as error:
        files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        ours = [str(ROOT / "hf_paged") in file and "peft_changes" not in file for file in files]
        words = str(error)
        if ours[-1] and isinstance(error, (ValueError, TypeError, RuntimeError)):
            return Cell("refused", words)
        if not any(ours):
            return Cell("peft raises", f"{type(error).__name__}: {words}")
        return Cell("fails", words, "".join(traceback.format_exception(error)))


def why_untried(case: Case) -> str:
    """What is wrong with a case itself: peft cannot make or compute it, or it changes no token."""
    try:
        model = made(case)
        found = [alone(model, row, case) for row in range(3)]
    except Exception as error:
        return f"peft raises {type(error).__name__}: {error}"
    plain = dataclasses.replace(case, extra={})
    base = base_of(case.family)
    same = found == [alone(base, row, plain) for row in range(3)]
    return "its weights change no token" if same else ""


# ---- the page

LEGEND = """## The table

Made by `python scripts/adapter_table.py --write docs/adapters.md` on {date} with peft {peft}, transformers {transformers} and torch
{torch}, on a CPU in float32. A tiny random model with two adapters of each kind; every cell is the result of a run.

| word | meaning |
|---|---|
| kernels | parts of adapters are computed apart from the model, on a CUDA device by kernels ([parts](#parts-of-an-adapter)) |
| both | kernels compute in the engine, peft's own modules in `generate()` |
| peft | peft's own modules compute, as part of the model |
| same | the tokens of stock transformers and peft, greedy and with beams where stock has them, both once more with prefix hits |
| stock's cache | the same tokens on stock's cache, with the `FallbackWarning` of the note |
| ignored by peft | peft accepts `adapter_names` and computes the active adapter; the paged call does the same |
| raises | peft or transformers raises the error of the note; the paged call raises the same |
| refused | the engine refuses at once, with the message of the note; `...` is the name of the method or option |

The columns `generate()` and `engine` use the active adapter. `adapter=` gives each request its own or the base. `add_adapter` adds a saved
folder to an engine on the plain model. `ms a step` is the median of {steps} decode steps of three requests, of each adapter and the model
alone, on {device}: a model this small shows what a kind costs beside the others, not what it costs in a large one.
"""
SHORT = {"peft raises": "raises", "other": "DIFFERENT", "fails": "FAILS"}


@dataclasses.dataclass
class Row:
    """What came of a case."""

    case: Case
    by: str
    cells: list[Cell]
    untried: str = ""
    milliseconds: str = ""


def row_of(case: Case) -> Row:
    """Try a case in all ways."""
    untried = why_untried(case)
    if untried:
        return Row(case, "", [], untried)
    lora = ModelSnapshot(unwrapped(made(case))).lora
    by = ("both" if lora.invoked else "kernels") if lora.apart else "peft"
    return Row(case, by, [tried(way, case) for way in WAYS.values()], milliseconds=milliseconds(case))


VARYING = (
    (r"adapter='one'", "adapter=..."),
    (r"'base_model\S+ and \d+ more are", "'base_model...' and others are"),
    (r"\(by [\d.e+-]+ of", "(by a part of"),
    (r"of the kind \S+?;", "of the kind ...;"),
    (r"product \(\w+\)", "product (...)"),
    (r"got one of \w+;", "got one of ...;"),
    (r"this adapter has [^;]+;", "this adapter has ...;"),
)
"""What of a message differs from case to case, and what the page has there."""


def _words(text: str) -> str:
    """A message on one line, without what differs from case to case."""
    text = " ".join(text.split()).replace("|", "/")
    for pattern, instead in VARYING:
        text = re.sub(pattern, instead, text)
    return text


def device_name() -> str:
    """The place where steps are timed."""
    if DEVICE == "cuda":
        return f"one {torch.cuda.get_device_name()}"
    threads = torch.get_num_threads()
    return "one thread of a CPU" if threads == 1 else f"{threads} threads of a CPU"


def page(rows: list[Row]) -> str:
    """The section of docs/adapters.md."""
    notes: dict[str, int] = {}
    versions = {name: sys.modules[name].__version__ for name in ("peft", "transformers", "torch")}
    lines = [LEGEND.format(date=date.today(), steps=MEASURED, device=device_name(), **versions)]
    for title, cases in (("LoRA and its options", LORA), ("Other methods", OTHERS)):
        lines += [
            f"### {title}",
            "",
            "| adapter | by | " + " | ".join(WAYS) + " | ms a step |",
            "|---" * (len(WAYS) + 3) + "|",
        ]
        for row in rows:
            if row.case not in cases or row.untried:
                continue
            found = []
            for cell in row.cells:
                note = f" [{notes.setdefault(_words(cell.words), len(notes) + 1)}]" if cell.words else ""
                found.append(SHORT.get(cell.mark, cell.mark) + note)
            lines.append(f"| {row.case.name} | {row.by} | " + " | ".join([*found, row.milliseconds]) + " |")
        lines.append("")
    lines += ["### The notes", "", "| note | message |", "|---|---|"]
    lines += [f"| {number} | {text} |" for text, number in notes.items()]
    lines += ["", "### Not tried", "", "| what | why |", "|---|---|"]
    lines += [f"| {row.case.name} | {_words(row.untried)} |" for row in rows if row.untried]
    lines += [f"| `{option}` | {why} |" for option, why in NOT_TRIED.items()]
    return "\n".join(lines) + "\n"


def require_all() -> None:
    """Exit if a method of the installed peft, or an option of its LoRA, has no case."""
    options = {field.name for field in dataclasses.fields(peft.LoraConfig)}
    options -= {field.name for field in dataclasses.fields(peft.PeftConfig)}
    missing = options - {name for case in LORA for name in case.covers.split()} - NOT_TRIED.keys()
    missing |= (
        {str(kind.value) for kind in PEFT_TYPE_TO_CONFIG_MAPPING}
        - {case.covers for case in OTHERS}
        - {"LORA"}
    )
    if missing:
        sys.exit(f"no case covers {sorted(missing)}")


def main() -> int:
    """Go through the cases and print or write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[], help="words in the names of cases")
    parser.add_argument("--write", type=Path, help="the page whose section 'The table' is replaced")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    require_all()
    rows = []
    for case in [*LORA, *OTHERS]:
        if options.only and not any(word.lower() in case.name.lower() for word in options.only):
            continue
        rows.append(row_of(case))
        marks = ", ".join(cell.mark for cell in rows[-1].cells)
        print(f"{case.name:50}{rows[-1].by:8} {rows[-1].untried or marks}", flush=True)
        for cell in rows[-1].cells:
            for text in (cell.words if options.only else "", cell.trouble):
                print(text, end="\n" * bool(text))
    if options.write:
        text = options.write.read_text().split("\n## The table\n")[0]
        options.write.write_text(f"{text.rstrip()}\n\n{page(rows)}")
    return 1 if any(cell.mark in ("other", "fails") for row in rows for cell in row.cells) else 0


if __name__ == "__main__":
    sys.exit(main())
