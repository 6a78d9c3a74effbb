"""Beam search on pages: the same sentences, the prompts stored once, and the seconds of both caches.

python examples/beams.py                    # the tiny model of the package, on the GPU if there is one
python examples/beams.py --shape llama8b    # 16 prompts of 256 tokens, an 8B Llama with random weights, on a GPU
"""

import argparse
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hf_paged  # noqa: F401  # importing it is what teaches generate() the word
from hf_paged import demo

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--shape", choices=["demo", "llama8b"], default="demo")
big = parser.parse_args().shape == "llama8b"
device = "cuda" if torch.cuda.is_available() else "cpu"
if big and device == "cpu":
    parser.error("--shape llama8b needs a GPU")

if big:
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256, max_position_embeddings=8192, pad_token_id=0,
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    ids = torch.randint(10, 1000, (16, 256), generator=torch.Generator().manual_seed(0)).to(device)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    beams = {"num_beams": 8, "max_new_tokens": 64, "min_new_tokens": 64, "do_sample": False}
else:
    model, tokenizer = demo.model().to(device), demo.tokenizer()
    inputs = tokenizer(demo.prompts()[:2], return_tensors="pt", padding=True).to(device)
    beams = {"num_beams": 6, "num_return_sequences": 3, "max_new_tokens": 32, "do_sample": False}


def timed(**word):
    """The answer of a warm call, and its seconds."""
    answer = None
    for _ in range(2):
        del answer  # and with it the blocks of the first call
        begin = time.perf_counter()
        answer = model.generate(**inputs, **beams, return_dict_in_generate=True, **word)
        answer.sequences.tolist()  # wait for the device
    return answer, time.perf_counter() - begin


stock, stock_seconds = timed()
paged, paged_seconds = timed(cache_implementation="paged")

if not big:
    print(*tokenizer.batch_decode(paged.sequences, skip_special_tokens=True), sep="\n")
tables = paged.cache.tables()
named, held = sum(map(len, tables)), len({block for row in tables for block in row})
print(f"{len(tables)} beams name {named} blocks, {held} are in memory")
print(f"seconds on {device}: stock {stock_seconds:.3f}, paged {paged_seconds:.3f}")
same = torch.equal(stock.sequences, paged.sequences)
print("the same tokens" if same else "not the same tokens")
assert (
    same or device == "cuda"
)  # a GPU adds in another order, and scores that rounding cannot tell apart may change places
