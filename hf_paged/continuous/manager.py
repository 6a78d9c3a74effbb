"""transformers' manager of continuous batching, whose requests the engine computes."""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from transformers.generation.continuous_batching.continuous_api import (
    BackgroundThreadStatus,
    ContinuousBatchingManager,
    OutputRouter,
)
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from ..engine import Engine
from ..engine.state import in_turn
from ..model.ranks.tensor_parallel import mesh_of
from ..model.registry import base_model
from .engines import begin_on, holds, running_on
from .lease import EngineLease
from .options import ManagerProcessors, WorkloadNeed
from .requests import ActiveRequests, BatchProcessor, BatchRequest, output_id

T = TypeVar("T")
logger = logging.getLogger("hf_paged")

POLL = 0.1
"""Seconds after which the thread of results sees that it shall stop."""
TOGETHER = 16
"""The most outputs of requests that become one: the engine preempts them together."""
OF_ALL = {
    "num_return_sequences": "the manager's generation config",
    "seed": "the ContinuousBatchingConfig",
    "logprobs": "the ContinuousBatchingConfig (return_logprobs=True)",
}
"""Options of `Engine.submit` that all requests of a manager have alike, and where they are set."""


@in_turn
def _between_steps(engine: Engine, act: Callable[[], T]) -> T:
    """Call `act`; the engine takes no step meanwhile."""
    return act()


class EngineBatchingManager(ContinuousBatchingManager):
    """The manager of `model.init_continuous_batching()` after `install(generate_batch=True)`. Results come
    through transformers' own router.

    The model stays in its mode, unless dropout is active or code of the user's runs in its forward: then eval
    mode holds while the manager runs, as with transformers' own.
    """

    def __init__(
        self, model: Any, generation_config: Any, continuous_batching_config: Any, workload_hints: Any = None
    ) -> None:
        # Not super().__init__(): it makes what the engine stands for.
        self.model: Any = base_model(model)
        own: Any = self.model.generation_config
        self.logit_processor: Any = ManagerProcessors(generation_config, own)
        if generation_config.eos_token_id is None:  # ends at no token, whatever the model's config has
            generation_config = copy.copy(generation_config)
            generation_config.eos_token_id = -1
        self.generation_config = generation_config
        self.continuous_batching_config = continuous_batching_config
        self.num_return_sequences = getattr(generation_config, "num_return_sequences", None) or 1
        self.background_thread_status = BackgroundThreadStatus()
        self.output_router = OutputRouter()
        self.is_tp_driver = True
        self.warmed_up = False
        self._broadcasts = mesh_of(self.model) is not None
        """True if the managers of other ranks deliver this one's results."""
        need = WorkloadNeed.of(workload_hints, self.logit_processor.options.get("num_beams") or 1)
        self.lease = EngineLease(self.model, continuous_batching_config, need, self._broadcasts)
        self._use_prefix_sharing = bool(continuous_batching_config.allow_block_sharing)
        self._numbers = itertools.count()
        self._generation_thread: threading.Thread | None = None  # type: ignore[assignment]  # may end
        self._requests = ActiveRequests()
        self.batch_processor: Any = BatchProcessor(self._requests)
        self._ready: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
        self._unsent: queue.SimpleQueue[list[GenerationOutput]] = queue.SimpleQueue()
        self._pausing: list[int] = []
        """The threads that hold a pause."""

    # ---- the engine

    @property
    def engine(self) -> Engine:
        """The engine that computes the requests, made when first needed."""
        return self.lease.engine(self)

    def warmup(self) -> None:
        """Make the engine: it tries the model out and compiles its kernels."""
        assert self.engine is not None
        self.warmed_up = True

    def start(self) -> None:
        """Let threads compute requests and deliver results."""
        if self.is_running():
            logger.warning("the manager is running already")
            return
        self.background_thread_status.clear()
        self.lease.renew()
        with self.lease.borrowed(self):
            self._start_engine()
        self._generation_thread = threading.Thread(
            target=self._deliver_all, name="hf_paged-results", daemon=True
        )
        self._generation_thread.start()

    def _start_engine(self) -> None:
        while not begin_on(self.engine, self, alone=self._broadcasts):
            self.lease.renew()  # it was closed this moment
        if self._broadcasts:
            self.engine.resume()
        self.engine.start()

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:
        """Stop after the requests that have come, or at once; the engine stays with its model for the next
        session.
        """
        status = self.background_thread_status
        if self._generation_thread is None:
            logger.warning("the manager was not started")
            return
        if threading.get_ident() in self._pausing:
            raise RuntimeError("the manager cannot stop from inside a pause; leave pause() first")
        begin = time.perf_counter()
        status.request_stop(status.HARD_STOP if hard_stop else status.FLUSH_AND_STOP, 0)
        self._ready.put([])  # no request: the thread of results looks at the status
        if block:
            self.join(begin, timeout)
        if keep_for_next_session:
            self.model._cached_continuous_batching_manager = self

    def destroy(self) -> None:
        """Stop, and give the engine's pools back unless a workload of known size made them."""
        if self.is_running():
            self.stop(block=True)
        self.lease.end(self)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Hold the requests while the caller changes the weights in place: their tokens stay, and their keys
        and values are computed again with the new weights.
        """
        me = threading.get_ident()

        def begin() -> None:
            self._require_running()
            self._send_unsent()  # a caller on another rank may wait for these before it pauses
            self.engine.pause()
            self._pausing.append(me)

        def end() -> None:
            self._pausing.remove(me)
            if not any(each._pausing for each in [self, *running_on(self.engine)]):
                self.engine.resume()

        _between_steps(self.engine, begin)
        try:
            yield
        finally:
            _between_steps(self.engine, end)

    def _require_running(self) -> None:
        status = self.background_thread_status
        if not self.is_running() or status.local_status == status.STOPPED:
            reason = "cannot pause while no generation loop is running; call start() first"
            raise RuntimeError(reason) from self.background_thread_status.fatal_error

    # ---- requests

    def add_request(
        self,
        input_ids: list[int],
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | list[int] | None = None,
        **options: Any,
    ) -> str | None:
        """Submit a request; its id, or None if the manager takes none any more. A request that the engine
        refuses ends as FAILED, with the reason. ValueError for the id of one that is under way.
        """
        self._require_known(options)
        if not self._accepts():
            return None
        lengths = {"max_new_tokens": max_new_tokens, "eos_token_id": eos_token_id}
        with self._requests.entering(1, request_id) as ids:
            self._submit(ids, input_ids, streaming, record_timestamps, {**lengths, **options})
        return ids[0]

    def add_requests(
        self,
        inputs: list[list[int]],
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        **options: Any,
    ) -> list[str]:
        """Submit requests, before the engine takes another step; their ids. Where callers wait for all of
        them, equal prompts are samples of one request of the engine.
        """
        self._require_known(options)
        with self._requests.entering(len(inputs)) as ids:
            if self.is_tp_driver and self._accepts():
                options["max_new_tokens"] = max_new_tokens
                most = 1 if streaming or record_timestamps else self._most_together(options)
                groups = self._grouped(ids, inputs, most)

                def submit() -> None:
                    for some, prompt in groups:
                        self._submit(some, prompt, streaming, record_timestamps, options)

                _between_steps(self.engine, submit)
        return ids

    def _accepts(self) -> bool:
        denial = self.background_thread_status.can_accept_new_requests()
        if denial is not None:
            logger.warning("%s A request is dropped.", denial)
        return denial is None

    def _require_known(self, options: dict[str, Any]) -> None:
        if options and not self.continuous_batching_config.per_request_processors:
            raise ValueError(
                f"options of single requests ({sorted(options)}) need per_request_processors=True in the "
                "ContinuousBatchingConfig"
            )

    def _most_together(self, options: dict[str, Any]) -> int:
        """How many requests with one prompt may be one request of the engine. Their outputs come together and
        are drawn from one seed, so it is one if there is a seed for each, or a workload of unknown size.
        """
        beams = {**self.logit_processor.options, **options}.get("num_beams") or 1
        seeded = self.continuous_batching_config.seed is not None
        if seeded or beams > 1 or self.lease.need is None or not holds(self.engine, self.lease.need):
            return 1
        return max(1, min(TOGETHER, self.engine.config.limits().sequences) // self.num_return_sequences)

    def _grouped(
        self, ids: list[str], inputs: list[list[int]], most: int
    ) -> Iterable[tuple[list[str], tuple[int, ...]]]:
        """The ids of at most so many requests with the same prompt, and the prompt."""
        alike: dict[tuple[int, ...], list[str]] = {}
        for request_id, tokens in zip(ids, inputs, strict=True):
            key = tuple(tokens if isinstance(tokens, list) else map(int, tokens))  # of lists no id is touched
            alike.setdefault(key, []).append(request_id)
        for prompt in sorted(alike, reverse=True) if self._use_prefix_sharing else alike:
            for begin in range(0, len(alike[prompt]), most):
                yield alike[prompt][begin : begin + most], prompt

    def _submit(
        self, ids: list[str], prompt: Iterable[int], streams: bool, stamps: bool, options: dict[str, Any]
    ) -> None:
        """Hand requests to the engine as one: they have the same prompt."""
        tokens = list(map(int, prompt))
        outputs = len(ids) * self.num_return_sequences
        config = self.continuous_batching_config
        number = next(self._numbers)
        try:
            wanted = self._wanted(tokens, options)
            alike = not wanted["do_sample"] and (wanted.get("num_beams") or 1) == 1
            handle = self.engine.submit(
                tokens,
                seed=None if config.seed is None else config.seed + number,
                logprobs=True if config.return_logprobs else None,
                **{"num_return_sequences": 1 if alike else outputs, **wanted},
            )
        except (ValueError, TypeError, RuntimeError) as error:
            for each in ids:
                self._fail(each, tokens, error)
            return
        copies = outputs if alike else 1
        request = BatchRequest(ids, tokens, handle, self.num_return_sequences, copies, stamps, streams)
        self._requests.add(request)
        ready = self._ready
        handle.watch(lambda: ready.put(ids), each=streams or stamps)
        ready.put(ids)  # what came before is not announced

    def _wanted(self, prompt: list[int], options: dict[str, Any]) -> dict[str, Any]:
        """The options of a request of the engine."""
        options = {name: value for name, value in options.items() if value is not None}
        of_all = sorted(OF_ALL.keys() & options.keys())
        if of_all:
            places = " and ".join(f"{name} in {OF_ALL[name]}" for name in of_all)
            raise ValueError(f"{of_all} of a single request: all requests have the same; set {places}")
        wanted = {**self.logit_processor.options, **options}
        if "do_sample" not in options and wanted["do_sample"] and not self.generation_config.do_sample:
            wanted = self.logit_processor.greedy(self.model, wanted)
        new, eos = self.generation_config.max_new_tokens, self.generation_config.eos_token_id
        lengths = {
            "max_new_tokens": max(1, self.engine.longest - len(prompt)) if new is None else new,
            "eos_token_id": -1 if eos is None else eos,
        }
        return {**lengths, **wanted}

    def cancel_request(self, request_id: str) -> None:
        """End a request; nothing of it is delivered any more."""
        request = self._requests.remove(request_id)
        if request is not None and not any(each in self._requests for each in request.ids):
            request.handle.cancel()

    # ---- the thread of results

    def _deliver_all(self) -> None:
        """Deliver what the engine has announced, until the manager shall stop."""
        status = self.background_thread_status
        try:
            while status.local_status != status.HARD_STOP or self._pausing:
                if self.engine.closed:
                    raise RuntimeError("the engine was closed while the manager ran; call start() again")
                self._broadcast()
                with contextlib.suppress(queue.Empty):
                    self._deliver(self._ready.get(timeout=POLL))
                    for _ in range(self._ready.qsize()):  # other ranks get them together
                        self._deliver(self._ready.get_nowait())
                idle = self._ready.empty() and not (self._requests or self._pausing)
                if idle and status.local_status == status.FLUSH_AND_STOP:
                    break
                error = self.engine.thread_error
                if error is not None:
                    raise RuntimeError(f"the engine's thread has ended: {error}") from error
        except Exception as error:
            logger.exception("the generation loop of continuous batching has failed")
            status.record_fatal_error(error)
        finally:
            self._end_all(status.fatal_error)
            status.mark_as_stopped()

    def _deliver(self, ids: list[str]) -> None:
        request = self._requests.of(ids)
        if request is None:
            return
        done = request.handle.done  # read first: the last increment comes before the output
        new = request.read() if request.streams or request.stamps else []
        if done:
            kept = [self._requests.remove(each) is not None for each in ids]  # else cancelled
            ended = [each for place, each in enumerate(request.ended()) if kept[place // request.each]]
            lengths = {each.request_id: len(each.generated_tokens) for each in ended}
            new = [each for each in new if len(each.generated_tokens) < lengths.get(each.request_id, 0)]
            new += ended
        self._give_out(new)

    def _give_out(self, outputs: list[GenerationOutput]) -> None:
        """Note outputs for the managers of other ranks, then deliver them here: a caller may pause then."""
        if self._broadcasts:
            self._unsent.put(outputs)
        self._route(outputs)

    def _route(self, outputs: Iterable[GenerationOutput]) -> None:
        """Deliver outputs to callers here. Of a handler whose event loop has closed they are lost."""
        for output in outputs:
            try:
                self.output_router.deliver(output)
            except RuntimeError as error:
                logger.info("a result of %s is lost: %s", output.request_id, error)

    def _broadcast(self) -> None:
        """Let the managers of other ranks deliver what was delivered here, unless they are paused."""
        if not self._unsent.empty():
            _between_steps(self.engine, self._send_unsent)

    def _send_unsent(self) -> None:
        outputs: list[GenerationOutput] = []
        while not (self._pausing or self._unsent.empty()):
            outputs += self._unsent.get()
        if outputs:
            self.engine.broadcast(outputs)

    def _fail(
        self, request_id: str, prompt: list[int], error: BaseException, so_far: Iterable[list[int]] = ()
    ) -> None:
        """Deliver an output with the error for each id of a request: callers wait for all of them."""
        logger.error("request %s is refused: %s", request_id, error)
        failed = [
            GenerationOutput(
                request_id=output_id(request_id, place),
                prompt_ids=prompt,
                generated_tokens=tokens,
                error=str(error),
                status=RequestStatus.FAILED,
            )
            for place, tokens in enumerate(so_far or [[] for _ in range(self.num_return_sequences)])
        ]
        self._give_out(failed)

    def _end_all(self, error: BaseException | None) -> None:
        """The thread ends: requests that have not come to their end have failed."""
        reason = error or RuntimeError("the manager was stopped before this request was complete")
        for request_id, request in self._requests.remove_all():
            request.read()
            request.handle.cancel()
            self._fail(request_id, request.prompt, reason, request.tokens_of(request_id))
        try:
            while not _between_steps(self.engine, self._end_session):
                time.sleep(POLL)
        except RuntimeError as broken:  # ranks have failed, which all of them know
            self.background_thread_status.record_fatal_error(broken)
        self.lease.give_back(self)

    def _end_session(self) -> bool:
        """Let no pause begin any more, and the managers of other ranks stop; not while a pause lasts."""
        if self._pausing:
            return False
        self.background_thread_status.mark_as_stopped()
        if self._broadcasts:
            self._send_unsent()
            self.engine.broadcast(None)
            self.engine.pause()
        return True
