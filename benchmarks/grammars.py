"""What a grammar costs: the demo model's requests free, under a JSON schema together, and one by one.

    OMP_NUM_THREADS=1 python benchmarks/grammars.py --rows 64

free        tokens a second of `Engine.generate()` without a grammar
together    with a schema: masks of all rows filled at once, tokens chosen together
one by one  the same schema behind a processor that the engine does not know
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from hf_paged import Engine, demo
from hf_paged.engine.sampling.grammar import Grammars, json_grammar

SCHEMA = {
    "type": "array", "minItems": 20,
    "items": {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}, "legs": {"type": "integer", "maximum": 99}}, "required": ["name", "legs"], "additionalProperties": False},
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    model, tokenizer = demo.model().to(options.device), demo.tokenizer()
    grammars = Grammars(tokenizer, model.config.vocab_size, [1])
    begin = time.perf_counter()
    grammar = grammars.compiled(json_grammar(SCHEMA))
    print(f"compiled in {1e3 * (time.perf_counter() - begin):.0f} ms")
    prompts = [tokenizer(demo.prompts()[i % 8])["input_ids"] for i in range(options.rows)]

    def processors(way: str, prompt: list[int]) -> list[Any]:
        processor = grammar.processor(len(prompt))
        return {
            "free": [],
            "together": [processor],
            "one by one": [lambda ids, scores: processor(ids, scores)],
        }[way]

    for way in ("free", "together", "one by one"):
        seconds = []
        for _ in range(1 + options.runs):
            with Engine(model, max_batch_sequences=options.rows) as engine:
                begin = time.perf_counter()
                handles = [
                    engine.submit(
                        prompt, max_new_tokens=options.new, do_sample=True, top_k=0, seed=i, eos_token_id=1 if way != "free" else 10**6,
                        logits_processor=processors(way, prompt),
                    )
                    for i, prompt in enumerate(prompts)
                ]  # fmt: skip
                tokens = sum(len(handle.result().sequences[0].token_ids) for handle in handles)
                seconds.append(time.perf_counter() - begin)
        best = min(seconds[1:])
        print(f"{way:10}  {tokens / best:8.0f} tokens a second, {1e3 * best / options.new:.2f} ms a step")


if __name__ == "__main__":
    main()
