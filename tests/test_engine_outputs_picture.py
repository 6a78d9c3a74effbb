"""The picture of an output: its texts, and the blocks that its tokens had."""

from __future__ import annotations

from xml.etree import ElementTree

from hf_paged import Engine, demo
from hf_paged.engine.outputs.picture import MOST_TEXT, Answer, Usage, answers_picture, shortened

HIT, PROMPT, ANSWER = "<title>prompt, from the cache<", "<title>prompt<", "<title>answer<"


def test_outputs_and_engines_are_pictures() -> None:
    """Of an engine in the middle of its work, then of the answers, of a refused request, and of the end."""
    with Engine(demo.model(), demo.tokenizer(), block_size=8, num_blocks=1000) as engine:
        handles = [engine.submit("The fox & the <owl>", max_new_tokens=20, num_return_sequences=2, do_sample=True) for _ in range(2)]  # fmt: skip
        for _ in range(12):
            engine.step()
        running = engine._repr_html_()
        assert "request 1" in running
        assert "darker: shared" in running
        assert "+872 free" in running
        assert "the keys and values of 8 tokens" in running
        first, second = [handle.result() for handle in handles]
        assert first.block_size == 8
        refused = engine.submit("The fox", max_new_tokens=5000).result()
        engine.check()
        after = engine._repr_html_()
        assert "held" not in after
    assert "1,000 free" in engine._repr_html_()
    for html in (running, after, first._repr_html_(), second._repr_html_(), refused._repr_html_()):
        ElementTree.fromstring(html)
        assert len(html) < 8000
    assert first._repr_html_().count(" tokens</small>") == 2
    assert HIT not in first._repr_html_()
    assert HIT in second._repr_html_()
    assert "Output: refused" in refused._repr_html_()
    assert "square" not in refused._repr_html_()


def test_each_block_of_an_answer_is_a_square() -> None:
    """The last token was never computed with, so it is in none."""
    html = answers_picture("t", [], Usage(20, 8, 8), [Answer("a", 13, "stop")])
    assert [html.count(each) for each in (HIT, PROMPT, ANSWER)] == [1, 1, 1]
    drawn = {title: html.split(title)[1].split("</g>")[0].split('fill="')[0].count("M") for title in (HIT, PROMPT, ANSWER)}  # fmt: skip
    assert drawn == {HIT: 1, PROMPT: 2, ANSWER: 1}


def test_many_long_answers_are_a_small_picture() -> None:
    answers = [Answer("word " * 4000, 4000, "length")] * 30
    html = answers_picture("t", [], Usage(100_000, 0, 16), answers)
    assert len(html) < 60_000
    assert "+22 answers" in html
    assert html.count("(20,000 characters in all)") == 8
    assert shortened("a" * MOST_TEXT) == "a" * MOST_TEXT
    assert shortened(None) is None
