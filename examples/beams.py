"""Beam search on pages: the same sentences, the prompt stored once.

python examples/beams.py
"""

import torch

import hf_paged  # noqa: F401  # importing it is what teaches generate() the word
from hf_paged import demo

model, tokenizer = demo.model(), demo.tokenizer()
inputs = tokenizer(demo.prompts()[:2], return_tensors="pt", padding=True)
beams = {"num_beams": 6, "num_return_sequences": 3, "max_new_tokens": 32, "do_sample": False}

stock = model.generate(**inputs, **beams)
paged = model.generate(**inputs, **beams, cache_implementation="paged", return_dict_in_generate=True)
assert torch.equal(stock, paged.sequences)

print(*tokenizer.batch_decode(paged.sequences, skip_special_tokens=True), sep="\n")
tables = paged.past_key_values.tables()
named, held = sum(map(len, tables)), len({block for row in tables for block in row})
print(f"{len(tables)} beams name {named} blocks, {held} are in memory")
