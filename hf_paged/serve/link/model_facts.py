"""Facts about a model for its server."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, NamedTuple

from ...engine import Engine
from ...engine.worker.adapters import AdapterInfo
from ...model.adapters.vocabulary import scores_of
from ...model.loading import takes_images


class ModelFacts(NamedTuple):
    """Facts about a model and its engine for the server: the first message, and the only one that is read
    before the event loop runs.

    longest: the most tokens of a sequence. sequences: that run at once. priorities: whether requests may
    have some. vocabulary, scores: how many ids have embeddings, and scores. defaults: the model's generation
    config. adapters: those that there are at first. shows: whether its forward takes images.
    response_template: how its answers are read.
    """

    name: str
    longest: int
    sequences: int
    block_size: int
    priorities: bool
    vocabulary: int
    scores: int
    defaults: Any
    adapters: dict[str, AdapterInfo]
    shows: bool
    response_template: dict[str, Any] | None

    @classmethod
    def of(cls, engine: Engine, tokenizer: Any) -> ModelFacts:
        """The facts of an engine that was made without a tokenizer: texts are the server's."""
        model = engine.model
        if model.config.is_encoder_decoder:
            raise ValueError(
                f"{type(model).__name__} is an encoder-decoder, which is not served yet; use hf_paged.Engine"
            )
        embeddings = model.get_input_embeddings()
        return cls(
            type(model).__name__,
            engine.longest,
            engine.config.limits().sequences,
            engine.config.block_size,
            engine.config.policy == "priority",
            int(getattr(embeddings, "num_embeddings", None) or embeddings.weight.shape[0]),
            scores_of(model) or int(model.config.get_text_config(decoder=True).vocab_size),
            model.generation_config,
            engine.adapters(),
            takes_images(model),
            _template_of(tokenizer, model),
        )

    def refusal_of_images(self, processor: Any) -> str | None:
        """Why requests may not bring images; None if they may."""
        if not self.shows:
            return f"{self.name} takes none"
        if getattr(processor, "image_processor", None) is None:
            return f"{self.name} is served without the processor of its images, see the server's log"
        return None

    @property
    def ends(self) -> list[int]:
        """The model's ends of sequence."""
        eos = self.defaults.eos_token_id
        return [] if eos is None else list(eos) if isinstance(eos, list) else [int(eos)]


def _template_of(tokenizer: Any, model: Any) -> dict[str, Any] | None:
    """The response template of a tokenizer, or what transformers knows for the kind of model."""
    if find_spec("transformers.utils.chat_parsing") is None:  # an older release reads no answers
        return None
    own: dict[str, Any] | None = getattr(tokenizer, "response_template", None)
    if own is not None:
        return own
    try:
        from transformers.cli.serving.utils import get_response_template
    except ImportError:  # an older release has none
        return None
    found: dict[str, Any] | None = get_response_template(tokenizer, model)
    return found
