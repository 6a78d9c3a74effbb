"""Rollouts of TRL's trainers from an engine on the trainer's model, with the sampler's log-probabilities."""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import cycle
from typing import Any

import torch
from accelerate.utils import AutocastKwargs  # type: ignore[import-untyped]  # it ships no types
from transformers import GenerationConfig

from .continuous.engines import engine_for
from .continuous.options import WorkloadNeed
from .engine.handle import Handle
from .model.cache_name import cache_in
from .model.replayed_routing import replay_routing as replaying
from .model.training import evaluating

logger = logging.getLogger(__name__)

OURS = ("cache_implementation", "cache_config", "disable_compile", "use_cache")
"""Fields of a trainer's generation config that say how stock generate() runs; the engine has its own ways."""
WITHOUT_PICTURES = (
    "hf_paged.trl.rollout_func takes texts; for prompts with pictures leave it out and set "
    'cache_implementation="paged"'
)
LOGPROBS = "_get_per_token_logps_and_entropies"
"""The method of TRL's trainers that computes log-probabilities of completions."""


class RolloutRouting:
    """The experts of the tokens of a trainer's last rollout, which its forwards over these rows take again.

    It stands for the trainer's method that computes log-probabilities, and has each forward of the trained
    model in there replay what was recorded for its rows.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._compute = getattr(trainer, LOGPROBS, None)
        kind = type(trainer).__name__
        if self._compute is None:
            raise ValueError(
                f"replay_routing=True: {kind} has no {LOGPROBS}, as TRL's GRPOTrainer has; leave it out"
            )
        if getattr(trainer.args, "use_liger_kernel", False):
            raise ValueError(
                f"replay_routing=True and use_liger_kernel=True, with which {kind} has its loss elsewhere; "
                "leave one of them out"
            )
        setattr(trainer, LOGPROBS, self)
        self._rows: dict[tuple[int, ...], torch.Tensor] = {}
        """The routing of each row by its tokens."""
        self._warned = False

    @classmethod
    def of(cls, trainer: Any) -> RolloutRouting:
        """The one of a trainer, made once."""
        found: RolloutRouting | None = getattr(trainer, "_rollout_routing", None)
        if found is None:
            found = trainer._rollout_routing = cls(trainer)
        return found

    def clear(self) -> None:
        """Forget the rollout before."""
        self._rows.clear()

    def add(self, prompt: list[int], answer: Any) -> None:
        """Keep the routing of a sequence that the engine has sampled."""
        self._rows[tuple(prompt + answer.token_ids)] = answer.routing

    def __call__(self, model: Any, *arguments: Any, **keywords: Any) -> Any:
        """The trainer's log-probabilities."""
        compute: Any = self._compute
        own = self._trainer.accelerator.unwrap_model(model)
        if own is not self._trainer.accelerator.unwrap_model(self._trainer.model) or not own.training:
            return compute(model, *arguments, **keywords)
        with self._in_forwards(own):
            return compute(model, *arguments, **keywords)

    @contextmanager
    def _in_forwards(self, model: Any) -> Iterator[None]:
        own, before = model.forward, model.__dict__.get("forward")

        def forward(*arguments: Any, **keywords: Any) -> Any:
            with self._replay(keywords["input_ids"], keywords["attention_mask"]):
                return own(*arguments, **keywords)

        model.forward = forward
        try:
            yield
        finally:
            if before is None:
                del model.forward
            else:
                model.forward = before

    def _replay(self, ids: torch.Tensor, mask: torch.Tensor) -> AbstractContextManager[None]:
        """Replay what is known of a padded batch."""
        seen = mask.bool().cpu()
        found = [self._rows.get(tuple(row[real].tolist())) for row, real in zip(ids.cpu(), seen, strict=True)]
        known = [each for each in found if each is not None]
        if len(known) < len(found) and not self._warned:
            self._warned = True
            logger.warning(
                "%d of %d rows in the trainer's forward are not those of its last rollout (cut, or changed "
                "since): their routers choose experts anew",
                len(found) - len(known), len(found),
            )  # fmt: skip
        if not known:
            return nullcontext()
        routing = known[0].new_full((*ids.shape, *known[0].shape[1:]), -1)
        for into, real, row in zip(routing, seen, found, strict=True):
            if row is not None:
                into[real.nonzero()[: len(row), 0]] = row
        return replaying(routing)


def rollout_func(
    prompts: list[Any], trainer: Any, *, replay_routing: bool = False, **engine_options: Any
) -> dict[str, Any]:
    """TRL's `rollout_func`: one completion for each prompt, sampled from the model that is trained.

    `GRPOTrainer(..., rollout_func=hf_paged.trl.rollout_func)`; options of the engine by functools.partial.
    The engine stays with the model from call to call and sees every new weight. It samples in eval mode,
    without dropout; the model's mode is as before afterwards.

    Where the trainer has tools, the turns behind their answers are sampled in the same way.

    The answer has prompt_ids, completion_ids and logprobs, a list of each row. A logprob is that of the
    processed logits that a token was drawn from: `log_softmax(logits / temperature)`, where top_k, top_p and
    min_p cut nothing. With batch_invariant=True the trainer's forwards count positions as the engine does.

    replay_routing: of a mixture of experts, have the trainer's forwards over these rows send each token to
    the experts that the engine chose for it.
    """
    model = _whole_model(trainer)
    recorded = RolloutRouting.of(trainer) if replay_routing and model.training else None
    if recorded is not None:
        recorded.clear()
    if engine_options.get("batch_invariant"):
        for each in filter(None, (model, getattr(trainer, "ref_model", None))):
            _count_positions(trainer.accelerator.unwrap_model(each))
    head = model.get_output_embeddings()  # TRL's loss computes one that is cast to float32 without autocast
    if getattr(trainer.args, "cast_lm_head_to_fp32", False) and not hasattr(head.forward, "__wrapped__"):
        head.forward = torch.autocast(model.device.type, enabled=False)(head.forward)
    prompt_ids: list[list[int]] = _prompt_ids(prompts, trainer)
    if getattr(trainer, "tools", None):  # the trainer's own code samples what follows a tool's answer
        trainer._generate_single_turn = partial(_next_turn, trainer, engine_options, recorded)
    completion_ids, logprobs = _sample(model, prompt_ids, trainer, engine_options, recorded)
    return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": logprobs}


def _next_turn(
    trainer: Any, engine_options: dict[str, Any], recorded: RolloutRouting | None,
    prompt_ids: list[list[int]], images: Any, *_: Any, **__: Any,
) -> tuple[list[list[int]], list[list[float]]]:  # fmt: skip
    """Next turns of conversations for TRL's loop of tool calls, with log-probabilities."""
    if images is not None:
        raise ValueError(f"a tool has answered with pictures; {WITHOUT_PICTURES}")
    return _sample(_whole_model(trainer), prompt_ids, trainer, engine_options, recorded, shorten=True)


def _sample(
    model: Any,
    prompt_ids: list[list[int]],
    trainer: Any,
    engine_options: dict[str, Any],
    recorded: RolloutRouting | None,
    shorten: bool = False,
) -> tuple[list[list[int]], list[list[float]]]:
    """A completion of every row and its log-probabilities. recorded: gets the experts of all tokens. shorten:
    let a long prompt have fewer new tokens than the trainer wants, if the engine has no room for all of them.
    """
    config = _generation_config(trainer)
    counts = Counter(map(tuple, prompt_ids))  # trainers repeat a prompt for each of its completions
    own = GenerationConfig(**config)
    beams = own.num_beams or 1
    alike = not own.do_sample and beams == 1
    need = WorkloadNeed(len(prompt_ids) * beams, max(map(len, prompt_ids)) + config["max_new_tokens"])
    handles: dict[tuple[int, ...], Handle] = {}
    # accelerate puts the outermost module under autocast, and an engine calls what peft wraps. Captured steps
    # would read casts that are cached after these are freed.
    precision = trainer.accelerator.autocast if hasattr(model, "get_base_model") else nullcontext
    with evaluating(model), precision(AutocastKwargs(cache_enabled=False)):
        engine = engine_for(model, engine_options, need)
        try:
            for prompt, count in counts.items():
                wanted = {**config, "num_return_sequences": 1 if alike else count}
                if shorten:
                    room = max(1, engine.longest - len(prompt))
                    wanted["max_new_tokens"] = min(room, config["max_new_tokens"])
                handles[prompt] = engine.submit(
                    list(prompt),
                    GenerationConfig(**wanted),
                    logprobs=True,
                    return_routing=recorded is not None,
                    seed=int(torch.randint(2**31, (), device="cpu")),  # of the trainer's random state
                )
            answers = {prompt: _sequences(handle.result()) for prompt, handle in handles.items()}
        finally:  # where one failed, the engine that stays has no use for the others
            for handle in handles.values():
                handle.cancel()
    rows = [next(answers[tuple(ids)]) for ids in prompt_ids]
    if recorded is not None:
        for ids, row in zip(prompt_ids, rows, strict=True):
            recorded.add(ids, row)
    # Lists of each row's own: greedy rows are one answer, and TRL adds to the lists what tools say.
    return [list(row.token_ids) for row in rows], [list(row.logprobs.processed) for row in rows]


def _sequences(output: Any) -> Any:
    """The answers of a request, one after the other."""
    if output.error is not None:
        raise output.error
    return cycle(output.sequences)  # greedy ones are computed once


def _whole_model(trainer: Any) -> Any:
    """The trainer's model, if this process has all of it."""
    for part, name in (("deepspeed_plugin", "DeepSpeed"), ("fsdp_plugin", "FSDP")):
        if getattr(trainer.accelerator.state, part, None) is not None:
            raise ValueError(
                f"{name} divides or moves the weights between steps, which hf_paged.trl.rollout_func does "
                'not take; leave it out and set cache_implementation="paged"'
            )
    return trainer.accelerator.unwrap_model(trainer.model)


def _count_positions(model: Any) -> None:
    """Let a forward begin every row at position 0 that is padded on the left; trainers pass no positions."""
    own = model.get_base_model() if hasattr(model, "get_base_model") else model
    plain = own.config.get_text_config() is own.config  # pictures have positions of other kinds
    takes = "position_ids" in inspect.signature(own.forward).parameters
    if plain and takes and add_positions not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(add_positions, with_kwargs=True)


def add_positions(model: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The hook of models that count so; found by name when a model is pickled."""
    mask: Any = kwargs.get("attention_mask")
    counted = kwargs.get("position_ids") is not None or cache_in(kwargs) is not None
    missing = not counted and mask is not None and mask.dim() == 2
    return (args, kwargs | {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}) if missing else None


def _generation_config(trainer: Any) -> dict[str, Any]:
    """How the trainer wants its completions: fields of a GenerationConfig."""
    given = getattr(trainer, "generation_config", None)
    options = dict(trainer.generation_kwargs) if given is None else given.to_diff_dict()
    if options.get("max_new_tokens") is None:
        raise ValueError("the trainer sets no max_completion_length; the engine needs one")
    return {name: value for name, value in options.items() if name not in OURS}


def _prompt_ids(prompts: list[Any], trainer: Any) -> Any:
    """The token ids of texts or chats, as the trainer's own code makes them."""
    if isinstance(prompts[0], str):
        return trainer.processing_class(text=prompts)["input_ids"]
    if any(_has_media(message) for chat in prompts for message in chat):
        raise ValueError(WITHOUT_PICTURES)
    render = partial(
        trainer.processing_class.apply_chat_template,
        chat_template=getattr(trainer, "chat_template", None),
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        **(getattr(trainer, "chat_template_kwargs", None) or {}),
    )
    if getattr(trainer, "environment_factories", None) is None:
        return render(conversation=prompts, tools=getattr(trainer, "tools", None) or None)["input_ids"]
    tools = [trainer._env_tools[name] or None for name in trainer._batch_environments]  # each has its own
    rows = zip(prompts, tools, strict=True)
    return [render(conversation=[chat], tools=own)["input_ids"][0] for chat, own in rows]


def _has_media(message: Mapping[str, Any]) -> bool:
    content: Iterable[Any] = message.get("content") or ""
    return not isinstance(content, str) and any(part.get("type") != "text" for part in content)
