"""The requests that an engine can compute at all."""

from __future__ import annotations

from bisect import bisect_left

from ..blocks.options import check_flag
from ..model.adapters.virtual import GivenPast
from ..model.ranks.tensor_parallel import mesh_of
from ..model.servable import longest, longest_source
from ..scheduling import Request, why_infeasible
from .multimodal.cross import CrossMedia, longest_picture
from .requests.params import RequestParams
from .worker.runner import Runner


class RequestBounds:
    """The lengths that a model is made for, and the kinds of input that its trial has shown it to take."""

    def __init__(self, runner: Runner) -> None:
        model = runner.eager.model
        self._runner = runner
        self._pools = runner.eager.pools
        self._name = type(model).__name__
        self._longest = longest(model)
        source = longest_source(model)
        decodes = model.config.is_encoder_decoder  # type: ignore[union-attr]
        self._longest_source = source if decodes else None
        self.lengths = self._longest, source if decodes else longest_picture(model)
        """The most tokens of a sequence, and those that an encoder makes or that a picture becomes."""

    @property
    def longest(self) -> int:
        """The most tokens that one sequence can have: by the model's positions and by the pools."""
        slots = [each.pool.total * each.pool.block_size for each in self._pools.kv_groups if each.kind.grows]
        bound = self._longest or max(slots)
        return bisect_left(range(1, bound + 1), True, key=self._never_fits)

    def _never_fits(self, tokens: int) -> bool:
        return self._why_infeasible(Request(0, (0,), tokens, 1)) is not None

    def _why_infeasible(self, request: Request) -> str | None:
        return why_infeasible(request, self._pools.kv_groups, self._pools.config.limits())

    def why_never(self, request: Request, virtual: int = 0) -> str | None:
        """The reason why a request could never be computed; None if it can. virtual: tokens that an adapter
        has put in front of its prompt.
        """
        if self._longest is not None and request.most_tokens > self._longest:
            prompt = f"{len(request.prompt)}, {virtual} of them virtual" if virtual else len(request.prompt)
            return (
                f"a sequence may become {request.most_tokens} tokens long (prompt {prompt}) and "
                f"{self._name} is made for {self._longest}; lower max_new_tokens"
            )
        if self._longest_source is not None and request.source > self._longest_source:
            return (
                f"the encoder of {self._name} is made for {self._longest_source} tokens, got "
                f"{request.source}; shorten them"
            )
        return self._why_infeasible(request)

    def source_length(self, params: RequestParams) -> int:
        """The tokens that a request's cross-attention layers attend to."""
        if isinstance(params.media, CrossMedia):
            return params.media.length
        if params.source is None:
            return 0
        assert self._runner.eager.encoder is not None
        return self._runner.eager.encoder.length(params.source)

    def require_computable(self, params: RequestParams) -> None:
        """Raise if a request has embeddings or media that the model does not take."""
        media = params.media
        check_flag("return_routing", params.return_routing)
        if params.return_routing:
            self._require_routing(params)
        if params.past is not None:
            self._require_past(params.past)
        if params.embeds is None and media is None:
            return
        if self._runner.why_no_embeddings is not None:
            raise ValueError(f"{self._runner.why_no_embeddings}; give token ids, or use generate()")
        if isinstance(media, CrossMedia) and self._runner.why_not_cross is not None:
            raise ValueError(f"{self._runner.why_not_cross}; use generate()")
        if media is not None:
            self._runner.merger.require(media)

    def _require_routing(self, params: RequestParams) -> None:
        """Raise if the routing of a request's answers cannot be kept."""
        if params.beams > 1:
            raise ValueError(
                f"return_routing=True and num_beams={params.beams}: the blocks of beams that have ended are "
                "gone with their routing; sample or decode greedily"
            )
        if mesh_of(self._runner.eager.model) is not None:
            raise ValueError(
                f"return_routing=True: several ranks compute {self._name}, and none records; use one rank"
            )
        if self._pools.config.compile:
            raise ValueError(
                "return_routing=True and an engine with compile=True, whose layers show no routing; make one "
                "without"
            )
        record = self._runner.eager.routing  # raises for a model that has none
        self._pools.require_room_for_routing(record.token_bytes)

    def _require_past(self, past: GivenPast) -> None:
        """Raise if keys and values are not those of the model's layers."""
        if self._pools.own.keys() != self._pools.paged.keys() or len(past.layers) != len(self._pools.slots):
            raise ValueError(
                f"{self._name} keeps more than keys and values, and the adapter's virtual tokens are nothing "
                "else; use generate()"
            )
        for number, (pair, slot) in enumerate(zip(past.layers, self._pools.slots, strict=True)):
            (kind,) = slot.kinds
            store, _ = self._pools.groups[kind].store(number)
            expected = [
                (store.layout.heads, width) for width in (store.layout.key_dim, store.layout.value_dim)
            ]
            found = [(each.shape[0], each.shape[2]) for each in pair]
            if found != expected:
                raise ValueError(
                    f"the adapter's keys and values in layer {number} have the heads and widths {found}, and "
                    f"{self._name} has {expected}; it is for another model"
                )
