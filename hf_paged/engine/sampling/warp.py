"""The next token of many rows at once: greedy, or drawn under each row's own temperature and cuts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ...kv.ops import on, triton_package
from ...kv.upload import upload
from ...scheduling import UNKNOWN
from .parameters import MIN_P, TEMPERATURE, TOP_K, TOP_P, Warps
from .random_numbers import row_numbers


def penalised(scores: torch.Tensor, ids: torch.Tensor, by: torch.Tensor | float) -> torch.Tensor:
    """Scores [rows, vocabulary] with each row's repetition penalty on its tokens `ids` [rows, n], each once.

    Ids without a score cannot be repeated. by: the penalties [rows, 1].
    """
    vocabulary = scores.shape[1]
    wide = torch.nn.functional.pad(scores, (0, 1))
    ids = ids.masked_fill((ids < 0) | (ids >= vocabulary), vocabulary)
    own = wide.gather(1, ids)
    return wide.scatter_(1, ids, torch.where(own < 0, own * by, own / by))[:, :vocabulary]


def greedy_tokens(scores: torch.Tensor) -> torch.Tensor:
    """The best tokens of scores [rows, vocabulary], and the same with UNKNOWN in rows without one: [2, rows].

    A row has none if its scores contain NaN or are all -inf.
    """
    tokens = scores.argmax(-1)
    sound = scores.gather(1, tokens[:, None])[:, 0] > -torch.inf  # to torch NaN is the largest number
    return torch.stack([tokens, tokens.masked_fill(~sound, UNKNOWN)])


def greedy_tokens_now(scores: torch.Tensor) -> torch.Tensor:
    """`greedy_tokens` outside captured steps: on the host numpy finds them in a tenth of torch's time."""
    if scores.device.type != "cpu":
        return greedy_tokens(scores)
    rows = scores.numpy()
    tokens = rows.argmax(1).tolist()  # to numpy, too, NaN is the largest number
    host = [token if row[token] > -torch.inf else UNKNOWN for row, token in zip(rows, tokens, strict=True)]
    return upload([tokens, host], scores.device)


def scaled(scores: torch.Tensor, rows: Warps) -> torch.Tensor:
    """The scores [rows, vocabulary] under each row's temperature."""
    temperature = rows.tensors.get(TEMPERATURE.column.name)
    return scores if temperature is None else scores / temperature


def cut(scores: torch.Tensor, rows: Warps) -> torch.Tensor:
    """The scores [rows, vocabulary], with -inf for what each row's cuts leave out."""
    top_k = rows.tensors.get(TOP_K.column.name)
    if top_k is not None:
        most = min(int(max(rows.numbers[TOP_K.column.name])), scores.shape[1])
        places = (top_k.clamp(max=most) - 1).clamp(min=0)
        least = scores.topk(most).values.gather(1, places).masked_fill(top_k == 0, -torch.inf)
        scores = scores.masked_fill(scores < least, -torch.inf)
    top_p = rows.tensors.get(TOP_P.column.name)
    if top_p is not None:
        ascending, order = scores.sort()
        below = ascending.softmax(-1).cumsum(-1) <= (1 - top_p).to(scores.dtype)
        below &= top_p < 1
        below[:, -1] = False
        scores = scores.masked_fill(below.scatter(1, order, below), -torch.inf)
    min_p = rows.tensors.get(MIN_P.column.name)
    if min_p is not None:
        chances = scores.softmax(-1)
        lowest = min_p * chances.amax(-1, keepdim=True)
        scores = scores.masked_fill(chances < lowest, -torch.inf)
    return scores


def draw(scores: torch.Tensor, states: np.ndarray, positions: Sequence[int]) -> torch.Tensor:
    """A token [rows] for every row of scores [rows, vocabulary], drawn by its softmax. states: `row_states`.

    The draw depends on the seed of the row's request, the number of its sample and the position of the token,
    and on nothing else (C35).
    """
    chance = upload(row_numbers(states, positions), scores.device, torch.float64)
    kernels = triton_package("auto", scores.device, scores.dtype)
    if kernels is not None:
        with on(scores.device):
            tokens: torch.Tensor = kernels.draw(scores, chance)
        return tokens
    chances = scores.softmax(-1).double().cumsum(-1)
    at = chance[:, None] * chances[:, -1:]
    return torch.searchsorted(chances, at, right=True).squeeze(1)


def mend(chosen: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Tokens [2, rows] as `greedy_tokens` gives them, some of them drawn since, with invalid ids replaced.

    A draw may be outside the vocabulary, as where a temperature is so low that all scores are infinite. It
    becomes a valid id on the device and UNKNOWN on the host.
    """
    tokens, host = chosen
    host = torch.where(host < 0, host, tokens).masked_fill(tokens >= vocabulary, UNKNOWN)
    return torch.stack([tokens.clamp(max=vocabulary - 1), host])
