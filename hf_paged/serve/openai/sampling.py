"""A request's meaning for the engine: the keywords of `submit()`, as plain values."""

from __future__ import annotations

import re
from typing import Any

from hf_paged_cli.limits import ServerLimits

from ..http.errors import invalid
from .protocol import Generating

GREEDY_BELOW = 1e-5
"""A temperature below this is 0, as in vLLM: scores divided by it would be no numbers."""
NO_END = 2**31 - 1
"""An end of sequence that no model has."""


NUMBER = re.compile("0|[1-9][0-9]{0,9}")
OF_DRAWS: dict[str, tuple[float, ...]] = {
    "temperature": (0.0, 1.0),
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
    "seed": (),
}
"""Options that a beam search does not take, and their neutral values."""
OF_BEAMS: dict[str, tuple[float, ...]] = {"length_penalty": (1.0,), "early_stopping": (False,)}
"""Options that others do not take."""


class Sampling:
    """Reads requests for one model.

    defaults: the model's generation config, whose sampling options hold where a request has none; without one
    OpenAI's hold.
    """

    def __init__(
        self, defaults: Any, ends: list[int], limits: ServerLimits, widest: int, priorities: bool
    ) -> None:
        self._defaults = defaults
        self.ends = ends
        self._limits = limits
        self._widest = widest
        self._priorities = priorities

    def check(self, request: Generating, vocabulary: int) -> None:
        """Raise for what is beyond a limit or contradicts itself, before anything is tokenized."""
        limits = self._limits
        self._require_at_most(
            "n" if request.drawn == request.n else "best_of", request.drawn, min(limits.n, self._widest)
        )
        name = "top_logprobs" if getattr(request, "top_logprobs", None) else "logprobs"
        self._require_at_most(name, request.alternatives or 0, limits.logprobs)
        self._require_at_most("prompt_logprobs", request.prompt_logprobs or 0, limits.logprobs)
        if request.prompt_logprobs is not None and request.stream:
            raise invalid(
                "prompt_logprobs are not sent in streams; leave stream out, or use echo and logprobs of "
                "/v1/completions",
                "prompt_logprobs",
            )
        self._require_at_most("stop", len(request.stop or ()), limits.stop)
        self._require_at_most(
            "stop", max(map(len, request.stop or ()), default=0), limits.stop_chars, " characters"
        )
        self._require_at_most("logit_bias", len(request.logit_bias or ()), limits.logit_bias)
        self._require_at_most("stop_token_ids", len(request.stop_token_ids or ()), limits.logit_bias)
        if any(not each for each in request.stop or ()):
            raise invalid("a stop string is empty; leave it out", "stop")
        if request.priority and not self._priorities:
            raise invalid("this server runs requests in order of arrival; leave priority out", "priority")
        if request.stream_options is not None and not request.stream:
            raise invalid(
                "stream_options are for streams; give stream=true, or leave them out", "stream_options"
            )
        for name, tokens in {
            "stop_token_ids": request.stop_token_ids or (),
            "logit_bias": self._bias(request),
        }.items():
            for token in tokens:
                if not 0 <= token < vocabulary:
                    raise invalid(
                        f"token id {token} of {name} is not one of the {vocabulary} of the vocabulary; leave "
                        "it out",
                        name,
                    )
        self._check_beams(request)

    def _require_at_most(self, name: str, value: int, most: int, unit: str = "") -> None:
        if value > most:
            raise invalid(f"{name}: {value}{unit} are asked for and the limit is {most}; lower it", name)

    def _check_beams(self, request: Generating) -> None:
        beams = bool(request.use_beam_search)
        for name, neutral in (OF_DRAWS if beams else OF_BEAMS).items():
            value = getattr(request, name)
            if value is not None and value not in neutral:
                why = "a beam search draws nothing" if beams else f"{name} is for use_beam_search=true"
                raise invalid(f"{name}={value}: {why}; leave it out", name)
        if beams:
            return
        if request.drawn > 1 and not self.temperature(request):
            raise invalid(
                f"{request.drawn} answers with temperature=0 are equal; raise it, or use_beam_search", "n"
            )

    def temperature(self, request: Generating) -> float:
        """That of a request's draws; 0 for none."""
        given = request.temperature
        if given is None:
            given = self._defaults.temperature
        value = 1.0 if given is None else float(given)
        return 0.0 if value < GREEDY_BELOW else value

    def keywords(self, request: Generating, new: int) -> dict[str, Any]:
        """The keywords of `submit()` for an answer of at most `new` tokens."""
        found: dict[str, Any] = {"max_new_tokens": new}
        found |= self._beams(request) if request.use_beam_search else self._draws(request)
        if request.repetition_penalty is not None:
            found["repetition_penalty"] = request.repetition_penalty
        if request.min_tokens:
            found["min_new_tokens"] = request.min_tokens
        bias = self._bias(request)
        if bias:
            found["logit_bias"] = bias
        for name in ("presence_penalty", "frequency_penalty", "stop"):
            if getattr(request, name):
                found[name] = getattr(request, name)
        if request.ignore_eos or request.stop_token_ids:
            ends = [*([] if request.ignore_eos else self.ends), *(request.stop_token_ids or ())]
            found["eos_token_id"] = ends or NO_END
        if request.alternatives is not None or request.drawn > request.answers:
            found["logprobs"] = request.alternatives or True
        if request.priority:
            found["priority"] = request.priority
        if request.task_ids is not None:
            found["task_ids"] = request.task_ids
        return found

    def _draws(self, request: Generating) -> dict[str, Any]:
        temperature = self.temperature(request)
        if not temperature:
            return {"do_sample": False, "num_beams": 1, "num_return_sequences": 1}
        found: dict[str, Any] = {
            "do_sample": True,
            "num_beams": 1,
            "temperature": temperature,
            "num_return_sequences": request.drawn,
        }
        # Left out, transformers' own default of 50 would be taken.
        top_k = self._defaults.top_k if request.top_k is None else request.top_k
        found["top_k"] = max(top_k or 0, 0)
        for name, neutral in (("top_p", 1.0), ("min_p", None)):
            given = getattr(request, name)
            value = getattr(self._defaults, name, None) if given is None else given
            found[name] = neutral if value is None else value
        if request.seed is not None:
            found["seed"] = request.seed % 2**63
        return found

    def _beams(self, request: Generating) -> dict[str, Any]:
        found: dict[str, Any] = {
            "do_sample": False,
            "num_beams": request.answers,
            "num_return_sequences": request.answers,
        }
        for name in ("length_penalty", "early_stopping"):
            if getattr(request, name) is not None:
                found[name] = getattr(request, name)
        return found

    def _bias(self, request: Generating) -> dict[int, float]:
        given = request.logit_bias or {}
        for key in given:
            if NUMBER.fullmatch(key) is None:  # int() also takes "+5", "1_0" and digits of other scripts
                raise invalid(
                    f"logit_bias has the key {key[:80]!r}; expected the number of a token, as '5'",
                    "logit_bias",
                )
        return {int(key): float(value) for key, value in given.items()}
