"""Outputs: log-probabilities are numbers until something reads them, and a long answer prints few of its ids."""

from __future__ import annotations

import gc
import pickle

import pytest
from engine_answers import PROMPTS

from hf_paged.engine import Engine, TokenLogprob
from hf_paged.engine.outputs.output import Output, SequenceOutput, TokenLogprobs


def test_they_are_numbers_until_they_are_read(engine: Engine) -> None:
    """A rollout has too many tokens for an object each, which the garbage collector would walk through."""

    def alive() -> int:
        return sum(type(each) is TokenLogprob for each in gc.get_objects())

    before = alive()
    wanted = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": True, "logprobs": 2}
    output = engine.submit(PROMPTS[1], num_return_sequences=3, **wanted).result()
    assert alive() == before
    for sequence in output.sequences:
        notes = list(sequence.logprobs)
        assert len(notes) == len(sequence.logprobs) == 6
        assert sequence.logprobs == notes == sequence.logprobs[:]
        assert sequence.logprobs[-1] == notes[5] == pickle.loads(pickle.dumps(sequence.logprobs))[5]
        assert sequence.logprobs.raw == [note.logprob for note in notes]
        assert sequence.logprobs.processed == [note.processed for note in notes]
        assert sequence.cumulative_logprob == sum(note.logprob for note in notes)
        with pytest.raises(IndexError):
            sequence.logprobs[6]


def test_rows_beside_more_top_logprobs_keep_their_own() -> None:
    row = [7.0, -1.5, -1.25, 1.0, -0.5, -0.75, -1.0, 3.0, 4.0, 5.0]
    for wanted, top_logprobs in enumerate([(), ((3, -0.5),), ((3, -0.5), (4, -0.75))]):
        notes = TokenLogprobs(wanted)
        notes.writer(3)(row)
        notes.append(TokenLogprob(8, -2.0, top_logprobs))  # a beam's
        assert notes == [TokenLogprob(7, -1.5, top_logprobs, -1.25, 1.0), TokenLogprob(8, -2.0, top_logprobs)]
        assert notes.processed == [-1.25, None]
        notes.crop(1)
        assert len(notes) == 1


def test_the_older_name_of_top_logprobs() -> None:
    note = TokenLogprob(7, -1.5, ((3, -0.5),))
    with pytest.warns(DeprecationWarning, match="favourites is now top_logprobs"):
        assert note.favourites == note.top_logprobs


def test_beams_have_raw_logprobs_alone(engine: Engine) -> None:
    output = engine.submit(PROMPTS[1], num_beams=3, do_sample=False, max_new_tokens=4, logprobs=1).result()
    assert all(note.processed is None and note.kept is None for note in output.sequences[0].logprobs)


def test_a_long_output_prints_few_ids() -> None:
    """But how many there are, the text, why it ended, and what it took."""
    notes = TokenLogprobs(0, [TokenLogprob(each, -1.0) for each in range(40)])
    long = SequenceOutput(list(range(4002)), "word " * 200, "stop", notes)
    output = Output(list(range(1000, 1500)), [long, SequenceOutput([3], None, "length")], cached_tokens=48)
    printed = repr(output)
    assert len(printed) < 1800
    assert "token_ids=[0, 1, 2, 3, 4, 5, ..., 4001; 4,002 in all]" in printed
    assert "prompt_token_ids=[1000, 1001, 1002, 1003, 1004, 1005, ..., 1499; 500 in all]" in printed
    assert "token_ids=[3]" in printed
    assert "word ... (1,000 characters in all)" in printed
    assert "finish_reason='stop'" in printed
    assert "cached_tokens=48" in printed
    assert "40 in all" in repr(notes)
    assert "error" not in printed
    assert "error=ValueError('x')" in repr(Output([1], [long], error=ValueError("x")))
