"""Requests in, tokens out: many at once, on one model as it is."""

from __future__ import annotations

import os
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal, Self, Unpack, overload

import torch

from ..blocks import check_salt, extra_key
from ..kv import in_forked_process
from ..model.adapters.apply import alone
from ..model.adapters.invocation import invocation_in
from ..model.adapters.loading import load_adapter
from ..model.adapters.peft_changes import let_changes_wait
from ..model.adapters.peft_loading import PeftAdapter
from ..model.adapters.state_dict import NoParts
from ..model.adaption_prompts import note_wrapper
from ..model.invariant.mode import batch_invariant, require_invariant
from ..model.loading import load_with_words
from ..model.methods import check_methods
from ..model.patches import note_self_written
from ..model.prompt_learning import is_virtual
from ..model.registry import base_model
from ..model.servable import check_servable, check_writes, versions
from ..model.snapshot import ModelSnapshot
from ..model.thread_state import restoring
from ..scheduling import Infeasible, Scheduler
from ..trace import Step, Writer
from .batches import AHEAD, Answers, BatchSpec
from .bounds import RequestBounds
from .driver import Books, Driver, require_no_dropout
from .handle import Handle, cancel_all
from .lifecycle import Lifecycle
from .loop import StepLoop
from .memory import EngineMemory
from .outputs.output import Increment, Output, with_errors_noticed
from .outputs.progress import Progress, shown
from .parallel import RankError, executor_of
from .preemption import Preemption
from .recorder import Recorder, block_map
from .requests.job import Job
from .requests.keywords import (
    AsyncBatchKeywords,
    BatchKeywords,
    ChatKeywords,
    GenerateKeywords,
    RequestKeywords,
    defaults_of,
    spell_out,
)  # fmt: skip
from .requests.options import Options
from .requests.params import METHODS, check_model, read_request
from .requests.prompts import OnePrompt, Prompts, conversations, words_of
from .state import Phase, in_turn
from .stats import EngineStats, stats_of
from .weights import KeptBlocks, PauseMode
from .worker.adapters import ACTIVE, AdapterInfo, EngineAdapters
from .worker.apart import ForwardsApart
from .worker.chosen_adapters import chosen_adapters, vocabulary_of
from .worker.config import EngineConfig, EngineOptions, options_among
from .worker.model_check import ModelCheck
from .worker.pools import Pools
from .worker.runner import Runner
from .worker.trial import Trial


class Engine:
    """Continuous batching: every step computes one token of each running sequence and as much of the prompts
    as fits beside them.

    engine = Engine(model, tokenizer)
    engine.generate(["Once upon", "The fox"], max_new_tokens=40)    # a list in, a list out
    handle = engine.submit("The owl", do_sample=True, seed=1)       # or one by one
    for increment in handle: print(increment.text, end="")

    The model is the user's own, unchanged, and free for anything else between two steps. Waiting for a
    result drives the engine; `start()` lets a thread drive it, `step()` takes a step by hand. Requests end
    one by one, each with its own reason; an error of one ends no other.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        config: EngineConfig | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        """Make an engine on a model, with its tokenizer or processor if prompts are texts.

        In training mode the model's dropouts must be zero; the engine leaves the mode as it is.

        The options come by name or as `config`; help(hf_paged.EngineConfig) explains each.
        """
        check_methods(METHODS)
        let_changes_wait()
        self.config = EngineConfig.of(config, options)
        self.model: Any = base_model(model)
        words = words_of(tokenizer)
        if words is not None and not callable(getattr(words, "decode", None)):
            raise TypeError(
                f"tokenizer must have decode(), got {type(tokenizer).__name__}; give a tokenizer or "
                "processor there, options by name, or leave it out and submit token ids"
            )
        self.processor = tokenizer
        self.tokenizer = words
        self._options = Options()
        check_servable(self.model, model)
        check_model(self.model)
        arithmetic: Callable[[], AbstractContextManager[None]] = nullcontext
        if self.config.batch_invariant:
            require_invariant(self.model)
            arithmetic = batch_invariant
        self._executor = executor_of(self.model, self.config)
        with self._executor.making():
            self._make(arithmetic, model)
        weakref.finalize(self._books, self._executor.abandon).atexit = False
        _books.add(self._books)

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | os.PathLike[str],
        *,
        adapters: Mapping[str, Any] | None = None,
        tokenizer: Any = None,
        config: EngineConfig | None = None,
        **keywords: Any,
    ) -> Self:
        """An engine on a model that transformers loads, with its tokenizer, or its processor if it takes
        images.

        Args:
            name_or_path: a name on the Hub, a folder, or "demo". A folder of peft's is a model with its
                adapter.
            adapters: LoRA adapters by the names that requests give: folders as peft saves them.
            tokenizer: another tokenizer or processor than the model's, or its name.
            config: the engine's options at once; else they are among the keywords by their names.
            **keywords: all others are from_pretrained()'s: dtype, device_map, revision, quantization_config,
                trust_remote_code, ... Without device_map the model lies on the first CUDA device, else on
                the CPU.
        """
        options = options_among(keywords)
        if config is None:
            options.setdefault("fuse_projections", True)  # nobody else has these weights
        EngineConfig.of(config, options)  # what contradicts itself is refused before anything is loaded
        if not isinstance(adapters, Mapping | None):
            kind = type(adapters).__name__
            raise TypeError(f"adapters are folders by name, as {{'poet': 'adapters/poet'}}, got {kind}")
        model, words = load_with_words(name_or_path, tokenizer, keywords)
        engine = cls(model, words, config, **options)
        try:
            for name, source in (adapters or {}).items():
                engine.add_adapter(name, source)
        except BaseException:
            engine.close()
            raise
        return engine

    def _make(self, arithmetic: Callable[[], AbstractContextManager[None]], outer: Any) -> None:
        """Try the model out, and make the pools and all that computes. arithmetic: in what it computes.
        outer: what the user holds, perhaps peft's wrapper of the model.
        """
        note_wrapper(outer, self.model)
        self.pools = Pools(self.model, self.config)
        # Finalizers run in the middle of anything, so this one only notes that the pools have no owner.
        unmade = weakref.finalize(self, self.pools.memory.abandon, self.pools)
        unmade.atexit = False
        self.runner = Runner(self.model, self.pools)
        self._bounds = RequestBounds(self.runner)
        require_no_dropout(self.model)
        with self.pools.memory.lock:
            before = ModelSnapshot(self.model, alone=True)
        with self._executor.trying(self.runner):
            written = versions(self.model)
            with arithmetic(), alone(self.model):
                restoring(Trial(self.runner).run)
            check_writes(self.model, written)
            self.pools.settle(*self._bounds.lengths, captures=self.runner.capture_bytes)
        self.preemption = Preemption(self.pools, self.config.preemption)
        device = self.runner.eager.device
        with arithmetic():  # it decides whether kernels add the adapters
            self._adapters = EngineAdapters(self.model, self.config, device, self.runner.fillers, outer)
        self._adapters.apart = ForwardsApart(self.runner, self._adapters.contents)
        self.runner.eager.adapters = self._adapters
        self.scheduler = _scheduler_of(self.pools, self.preemption, self._adapters)
        self.checks = self.runner.eager.checks
        with self.pools.memory.lock:
            after = ModelSnapshot(self.model, alone=True)
            note_self_written(self.model, after.set_since(before))
            model_check = ModelCheck(self.model, self.checks)
        self._loop = StepLoop(
            self._executor, self.runner, model_check, self.scheduler, self.preemption, self._adapters
        )
        self._books = Books(self._loop)
        self.lock, self.state, self.settle = self._books.lock, self._books.state, self._books.settle
        self.driver = Driver(self._books, arithmetic)
        self._lifecycle = Lifecycle(self.driver)
        unmade.detach()
        weakref.finalize(self._books, self.pools.memory.abandon, self.pools).atexit = False

    def __repr__(self) -> str:
        words = [type(self.model).__name__, f"form={self.runner.form!r}", f"requests={len(self._books.jobs)}"]
        words += [word for word in (self.state.word,) if word is not None]
        memory = EngineMemory.of(self.pools, self.model, self._bounds, self.runner.capture_bytes)
        return f"Engine({', '.join(words)}): {memory}"

    @in_turn
    def _repr_html_(self) -> str:
        header = self.pools.described(type(self.model).__name__)
        return block_map(self.scheduler, header).picture(repr(self))

    @property
    def longest(self) -> int:
        """The most tokens that one sequence can have, prompt and answer together: by the model's positions
        and by the pools."""
        return self._bounds.longest

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "an engine lives in its model's pools and cannot be pickled or copied; make another one for the "
            "other model"
        )

    # ---- requests

    def submit(
        self,
        prompt: Any = None,
        generation_config: Any = None,
        *,
        inputs_embeds: torch.Tensor | None = None,
        seed: int | None = None,
        logprobs: int | bool | None = None,
        prompt_logprobs: int | bool | None = None,
        return_routing: bool = False,
        priority: int = 0,
        salt: str | None = None,
        tenant: str = "",
        adapter: str | Sequence[str] | None = ACTIVE,
        task_ids: int | torch.Tensor | None = None,
        **generate_keywords: Unpack[GenerateKeywords],
    ) -> Handle:
        """Queue a request and answer with its handle; nothing is computed yet.

        An option that the engine does not honour raises ValueError here. A request that could never fit comes
        back at once with finish_reason "refused" and the numbers in its error.

        Args:
            prompt: a text or chat messages (with a tokenizer), or token ids. Of an encoder-decoder the
                encoder's, or input_features=... is; decoder_input_ids=... is what its decoder begins with.
            generation_config: options as generate() takes them; keywords come before it.
            inputs_embeds: what the model shall take for the embeddings of the prompt, [tokens, hidden] or
                [1, tokens, hidden]; processors see the prompt's ids, if there are any.
            seed: of its draws: the same answer whatever runs beside it.
            logprobs: True, or how many top tokens are reported beside each chosen one.
            prompt_logprobs: the same of the prompt's tokens.
            return_routing: whether each sequence of the output has the experts of its tokens, of a mixture of
                experts.
            priority: higher is sooner, under policy="priority".
            salt: requests share their prefixes only with requests of the same salt.
            tenant: for whose share of the blocks this request's count, under `cache_shares`.
            adapter: the name of an adapter, or of several LoRA adapters that are added up; None for the model
                alone. Not given, it is what is active on the peft model now.
            task_ids: the number of its task, if its adapter is a multitask prompt or of the method Poly.
            **generate_keywords: max_new_tokens, temperature, top_p, num_beams and all others of generate(),
                logits_processor, stopping_criteria and prefix_allowed_tokens_fn among them; and as in
                OpenAI's API stop (strings that end an answer and are no part of its text),
                presence_penalty, frequency_penalty and logit_bias. `hf_paged.engine.RequestKeywords`
                explains each.
        """
        keywords = {**generate_keywords, "inputs_embeds": inputs_embeds}
        params = read_request(
            self.model,
            self.processor,
            prompt,
            generation_config,
            keywords,
            seed,
            logprobs,
            prompt_logprobs,
            return_routing,
            self._options,
            vocabulary_of(self._adapters, adapter),
        )
        self._books.require_open()
        self._executor.require_lead()
        self._executor.require_media(params.media)
        if not self.scheduler.unfinished:  # a look takes milliseconds, and the next step takes another
            self._adapters.contents.look_again()
        chosen = chosen_adapters(self._adapters, adapter, params, task_ids)
        params = params.behind(chosen.virtual)
        self._executor.require_media(params.past)
        self._bounds.require_computable(params)
        job = Job(params, None, self.tokenizer, chosen)
        job.active = self._adapters.active
        extra = extra_key(None if salt is None else check_salt(salt))
        if chosen.task >= 0:
            extra = extra_key(extra, "task", chosen.task)
        if params.return_routing:  # of tokens that others have cached it may not be known
            extra = extra_key(extra, "routing")
        number = next(self._books.numbers)
        request = job.request(number, priority, extra, self._bounds.source_length(params), tenant)
        reason = self._bounds.why_never(request, params.virtual)
        if reason is None:
            self.driver.queue(job, request)
        else:
            job.close("refused", Infeasible(reason))
        return Handle(job, self.driver)

    @overload
    def generate(
        self, prompts: OnePrompt, generation_config: Any = None, **keywords: Unpack[BatchKeywords]
    ) -> Output: ...
    @overload
    def generate(
        self, prompts: Iterable[Any], generation_config: Any = None, **keywords: Unpack[BatchKeywords]
    ) -> list[Output]: ...
    def generate(
        self,
        prompts: Any,
        generation_config: Any = None,
        *,
        progress: Progress[int] = None,
        strict: bool = False,
        **keywords: Unpack[RequestKeywords],
    ) -> Output | list[Output]:
        """The outputs of all prompts under the same options, in their order; of a single prompt (a text, chat
        messages, token ids) its output.

        progress: a bar shows after a while, with True at once and with False never. A function is called with
        the number of requests that have ended, and that of all.

        A warning counts the requests that were refused or failed. With `strict` the error of one is raised
        instead: of a refused one before anything is computed, of a failed one at the end.
        """
        given = Prompts.of(prompts)
        handles: list[Handle] = []
        try:
            for prompt in given.prompts:
                handles.append(self.submit(prompt, generation_config, **keywords))
                _require_accepted(handles[-1], strict)
            with shown(progress, len(handles)) as ended:

                def show() -> None:
                    ended(sum(each.done for each in handles))

                self.driver.drive([handle._job for handle in handles], lambda: False, ended=show)
                for handle in handles:
                    if not handle.done:  # a thread drives
                        handle.result()
                        show()
                show()
        except BaseException:
            cancel_all(handles)
            raise
        outputs = with_errors_noticed([handle.result() for handle in handles], strict)
        return outputs[0] if given.single else outputs

    @overload
    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        generation_config: Any = None,
        **keywords: Unpack[ChatKeywords],
    ) -> Output: ...
    @overload
    def chat(
        self,
        messages: Iterable[Sequence[Mapping[str, Any]]],
        generation_config: Any = None,
        **keywords: Unpack[ChatKeywords],
    ) -> list[Output]: ...
    def chat(
        self,
        messages: Any,
        generation_config: Any = None,
        *,
        tools: Sequence[Any] | None = None,
        chat_template: str | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **keywords: Unpack[BatchKeywords],
    ) -> Output | list[Output]:
        """The answer to the messages of a conversation, or the answers to a list of conversations.

        Args:
            messages: as in [{"role": "user", "content": "Hello"}], or several such lists.
            tools: functions that the model may call: Python functions with docstrings, or JSON schemas.
            chat_template: a template in Jinja instead of the tokenizer's.
            continue_final_message: continue the last message instead of answering it.
            chat_template_kwargs: options of the template: enable_thinking, documents, ...
            **keywords: those of generate().
        """
        template = {"tools": tools, "chat_template": chat_template, **(chat_template_kwargs or {})}
        if continue_final_message:
            template |= {"continue_final_message": True, "add_generation_prompt": False}
        prompts = conversations(messages, template)
        found: Output | list[Output] = self.generate(prompts, generation_config, **keywords)
        return found

    def map(
        self,
        data: Any,
        out: str | os.PathLike[str] | None = None,
        generation_config: Any = None,
        *,
        key: str | None = None,
        progress: Progress[int | None] = None,
        overwrite: bool = False,
        **keywords: Unpack[RequestKeywords],
    ) -> Answers:
        """The answers to a data set, as (index, output) in the order in which they end. Only some items are
        read ahead of those that are computed: data may be longer than memory.

        data: an iterable of prompts, as a list, a generator, a column of a data set or of a table. An item
        may be a dict with a "prompt" or with "messages", and with options of its own; its other keys are left
        alone. key: the key of each item's prompt, of which nothing else is taken.

        out: a file to which all answers are written as JSON lines before this returns. One that is there is
        continued: items are computed whose answer is not in it, or which have changed. Answers of another
        model, or under other options, are refused, and with `overwrite` replaced. An item that cannot be
        answered has its "error" there. What has ended before an interrupt is in the file.

        progress: as generate() has it; None in the place of the number of all items if it is not known.
        keywords: options of all items, as submit() has them.
        """
        options = (
            dict(keywords)
            if generation_config is None
            else {**keywords, "generation_config": generation_config}
        )
        most = AHEAD * self.config.limits().sequences
        spec = BatchSpec(self.submit, self.driver, self._adapters, self.processor, most, options)
        return Answers(spec, data, key, progress, out, overwrite)

    def stream(
        self,
        prompt: Any,
        generation_config: Any = None,
        **keywords: Unpack[RequestKeywords],
    ) -> Iterator[Increment]:
        """The increments of one request. Leaving the iteration ends the request."""
        handle = self.submit(prompt, generation_config, **keywords)
        try:
            yield from handle
        finally:
            handle.cancel()

    @overload
    async def agenerate(
        self, prompts: OnePrompt, generation_config: Any = None, **keywords: Unpack[AsyncBatchKeywords]
    ) -> Output: ...
    @overload
    async def agenerate(
        self, prompts: Iterable[Any], generation_config: Any = None, **keywords: Unpack[AsyncBatchKeywords]
    ) -> list[Output]: ...
    async def agenerate(
        self,
        prompts: Any,
        generation_config: Any = None,
        *,
        strict: bool = False,
        **keywords: Unpack[RequestKeywords],
    ) -> Output | list[Output]:
        """`generate` for coroutines: the event loop continues meanwhile, and a task that is cancelled ends
        its requests.
        """
        given = Prompts.of(prompts)
        handles: list[Handle] = []
        try:
            for prompt in given.prompts:
                handles.append(self.submit(prompt, generation_config, **keywords))
                _require_accepted(handles[-1], strict)
            outputs = with_errors_noticed([await handle for handle in handles], strict)
            return outputs[0] if given.single else outputs
        except BaseException:
            cancel_all(handles)
            raise

    async def astream(
        self,
        prompt: Any,
        generation_config: Any = None,
        **keywords: Unpack[RequestKeywords],
    ) -> AsyncIterator[Increment]:
        """`stream` for coroutines."""
        handle = self.submit(prompt, generation_config, **keywords)
        try:
            async for increment in handle:
                yield increment
        finally:
            handle.cancel()

    # ---- who drives

    @property
    def closed(self) -> bool:
        """True once the engine takes no request any more."""
        return self.state.phase >= Phase.CLOSING

    @property
    def driven(self) -> bool:
        """True while a thread drives the engine: one was started, and it has neither ended nor been
        stopped.
        """
        return self.driver.driven

    @property
    def thread_error(self) -> BaseException | None:
        """The error of a step that ended the engine's thread, if it has ended so."""
        thread = self.driver.background
        return None if thread is None else thread.error

    def start(self) -> Self:
        """Let a thread drive the engine from now on: requests are computed whether a caller waits or not, and
        submitting is prompt.

        An error of a step reaches every waiting caller and ends the thread; a further call starts it again.
        `stop()` and `close()` end it, and so does the end of the process. Awaiting a handle calls it, too.
        """
        self.driver.start()
        return self

    def stop(self) -> None:
        """Stop the thread after its current step. Requests stay, and a caller that waits for one drives."""
        self.driver.stop()

    def step(self) -> list[Output]:
        """One step of all requests; the answer is what ended in it. Without work it does nothing."""
        return self.driver.step()

    def warm_up(self) -> bool:
        """Capture the steps that many requests will need, one after another, until a request comes: true once
        none is missing any more. Kernels that still compile are not waited for.

        No other thread may compute with the model meanwhile. Compiled steps, and those of a model that runs
        code of the user's or has adapters, are captured when they come.
        """
        return self.driver.warm_up()

    # ---- several ranks

    @property
    def leads(self) -> bool:
        """True where requests go to this engine: on rank 0, and where one process has the whole model."""
        return self._executor.leads

    @in_turn
    def broadcast(self, value: Any) -> None:
        """On rank 0 of a tensor-parallel engine: send a value that can be pickled to all other ranks, whose
        `follow(receive)` calls receive(value) between two steps.
        """
        self._books.require_open()
        self._executor.require_lead()
        if self.state.paused:
            raise RuntimeError("the other ranks do not follow a paused engine; call resume() first")
        self._executor.broadcast(value)

    def follow(self, receive: Callable[[Any], object] = lambda value: None) -> bool:
        """On all ranks but 0 of a tensor-parallel engine: compute what rank 0 schedules.

        Returns False when rank 0 has closed its engine (this one is closed then, too), and True when it has
        paused: change the model here as there, then call this again. Raises RankError if a rank has failed.
        While rank 0 is idle this waits, however long. receive: called with what rank 0 broadcasts.
        """
        self._executor.require_follower()
        self._books.require_open()
        try:
            paused = self._executor.follow(receive)
        except RankError:
            self._books.drop_captures()
            raise
        if not paused:
            self.close()
        return paused

    # ---- the model in other hands

    def pause(self, mode: PauseMode = "recompute") -> None:
        """Release the model: until `resume` its weights may change, and requests wait.

        mode: "recompute" frees all blocks; the tokens of requests stay and are computed again, with the
        weights of then. "wait" finishes the requests that have come, "abort" ends them, and both free all
        blocks. "keep" keeps the blocks of running requests: they continue where they are if the weights stay
        the same or `weights_changed(kv="keep")` is called, else they are computed again.
        """
        self._lifecycle.pause(mode)

    def resume(self) -> None:
        """Continue. Cached blocks, and those of requests that were kept, are dropped if the weights have
        changed.
        """
        self._lifecycle.resume()

    def weights_changed(self, kv: KeptBlocks = "drop") -> None:
        """Note that the weights are others, however they were written; the engine is paused or idle.

        kv: "drop" forgets cached blocks, and requests that were kept are computed again. "keep" lets requests
        continue, and prompts begin, with keys and values of the old weights; stats()["kv_kept"] counts it.
        """
        self._lifecycle.weights_changed(kv)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Copy tensors into the model's weights of these names, in place; the names that were loaded.

        Requests that run are put down meanwhile and computed again, unless the engine is paused already.
        Captured steps stay: they read the weights where they lie. Ranks are all given the same tensors, in a
        pause, and keep their parts.
        """
        return self._lifecycle.load_weights(weights)

    def sleep(self, level: int = 1) -> None:
        """Give memory back until `wake_up` (or `resume`): requests wait and are computed again.

        level: 1 gives back the pools and captured steps, 2 moves the weights to the host's memory as well.
        """
        self._lifecycle.sleep(level)

    def wake_up(self) -> None:
        """Bring the weights back and continue; pools and captured steps are made again when needed."""
        self._lifecycle.resume()

    # ---- adapters

    def add_adapter(self, name: str, source: Any, config: Any = None) -> None:
        """Let requests name an adapter: submit(..., adapter=name).

        source: a folder as peft saves it, a state dict with its config as `config`, or another peft model
        that has an adapter of that name. The model's own modules stay as they are, and so do its answers to
        other requests. Adapters of a peft model are there by their names without this. On several ranks
        rank 0 calls this, and every rank takes its part.
        """
        self._books.require_open()
        self._executor.require_lead()
        state, config = self._adapters.read(name, source, config)
        if is_virtual(config):
            self._adapters.contents.virtual.add(name, state, config)
            return
        try:
            layers = load_adapter(self.model, state, config, name, kernels=self._adapters.contents.kernels)
        except NoParts as why:
            apart = PeftAdapter(state, config, str(why))
            self.driver.between_steps(partial(self._adapters.apart.require_servable, name, apart))
            self._books.enter_adapter(name, {}, apart)
            return
        loaded = self._adapters.hold(layers, invocation_in(config))
        if self.config.lm_head_fp32 and self.model.get_output_embeddings() in loaded.host.layers:
            raise ValueError(
                f"lm_head_fp32=True and the adapter {name!r} of lm_head: its products are not computed in "
                "float32; leave one of them out"
            )
        self._books.enter_adapter(name, layers, loaded)

    @in_turn
    def remove_adapter(self, name: str, when: Literal["now", "idle"] = "now") -> None:
        """Forget an adapter that was added. While requests have it that is refused, or with when="idle" done
        when the last of them has ended; no new one may name it meanwhile.
        """
        if when not in ("now", "idle"):
            raise ValueError(f"when={when!r} is neither 'now' nor 'idle'")
        self._executor.require_lead()
        users = self._books.users_of(name)
        if users and when == "now":
            raise ValueError(
                f"{users} requests have the adapter {name!r}; cancel them, or call "
                f"remove_adapter({name!r}, when='idle')"
            )
        self._adapters.leave(name)
        self._books.remove_idle_adapters()

    @in_turn
    def adapters(self) -> dict[str, AdapterInfo]:
        """The adapters that requests can name."""
        return self._adapters.infos(self._books.users_of)

    # ---- the engine itself

    @in_turn
    def stats(self) -> EngineStats:
        """Requests by state, blocks by kind of layer, counts so far, and what is off and why."""
        self._books.receive()
        return stats_of(self._loop, self.state, self._lifecycle.counts)

    @in_turn
    def trace(self, path: str | os.PathLike[str]) -> Recorder:
        """Write down every step from now on, until the answer is closed: `with engine.trace("steps.jsonl"):
        ...`.

        `hf_paged.trace.read` gives it back. A path that ends with ".gz" is packed.
        """
        self._books.require_open()
        for each in self._loop.recorders:
            if not (each.closed or each.live):
                raise RuntimeError(f"{each!r} is being written; close it first")
        header = self.pools.described(type(self.model).__name__)
        return self._loop.record(Writer(path, header), header, self.lock.lock, None)

    @in_turn
    def watch(self, report: Callable[[Step], None], every: float = 0.1) -> Recorder:
        """Have `report(step)` called with what has changed in the blocks and the queue, until the answer is
        closed: first with all there is, then behind a step, at most once in `every` seconds, and when nothing
        is left to do.

        A step of `hf_paged.trace` stands for all steps since the one before; the answer's `header` has the
        kinds of layers. The thread that drives the engine calls `report`, so it must neither wait nor raise.
        """
        self._books.require_open()
        header = self.pools.described(type(self.model).__name__)
        return self._loop.record(report, header, self.lock.lock, every)

    @in_turn
    def check(self) -> None:
        """Recount all books; AssertionError at the first difference (C7)."""
        self.scheduler.check()

    def close(self) -> None:
        """End what runs with "abort", the thread if there is one, and give the pools back. Twice is once.

        From within a step it is done at its end. A trace that cannot be written is logged; only the trace's
        own `close()` raises.
        """
        self.driver.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *trouble: object) -> None:
        self.close()


def _scheduler_of(pools: Pools, preemption: Preemption, adapters: EngineAdapters) -> Scheduler:
    config = pools.config
    for kv_group in pools.kv_groups:
        kv_group.pool.weights.update(config.cache_shares)
    return Scheduler(
        pools.kv_groups,
        config.limits(),
        config.policy,
        admission=config.admission,
        prefix_caching=config.prefix_caching and (pools.paged == pools.own or config.snapshots_every > 0),
        verify=config.check_hits or config.verify is not None,
        state_every=config.snapshots_every,
        swap=preemption.decide,
        adapters=adapters.slots,
    )


def _require_accepted(handle: Handle, strict: bool) -> None:
    """Raise the error of a request that was refused in `submit()`, if its caller is strict."""
    output = handle._job.output
    if strict and output is not None and output.error is not None:
        raise output.error


for _method in (
    Engine.submit, Engine.generate, Engine.chat, Engine.map, Engine.stream, Engine.agenerate, Engine.astream,
):  # fmt: skip
    spell_out(_method, RequestKeywords, {"priority": 0, "adapter": ACTIVE})


_books: weakref.WeakSet[Books] = weakref.WeakSet()


def _after_fork() -> None:
    for each in list(_books):
        each.forked()


in_forked_process(_after_fork)
spell_out(Engine.__init__, EngineOptions, defaults_of(EngineConfig))
