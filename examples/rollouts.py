"""GRPO on one object: the engine samples from the model, the optimizer trains the same modules, and the engine
samples again. No copy of the weights, nothing to synchronise, and the sampler's log-probabilities have the bits of
the trainer's (batch_invariant, which needs a C++ compiler). The reward wants stories with the moon in them.

python examples/rollouts.py                   # under two minutes on two cores
python examples/rollouts.py --svg curves.svg  # the curves as a picture
"""

import argparse

import psutil
import torch
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence

from hf_paged import Engine, batch_invariant, demo

PROMPTS, SAMPLES, NEW, CLIP = 4, 8, 24, 0.2

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--svg", help="a file for the curves")
options = parser.parse_args()

torch.manual_seed(0)
model, tokenizer = demo.model().float().train(), demo.tokenizer()  # dropout is zero: the mode changes nothing
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
engine = Engine(model, tokenizer, keep_pools=True, num_blocks=1024, batch_invariant=True)
sampling = {"num_return_sequences": SAMPLES, "do_sample": True, "top_k": 0, "max_new_tokens": NEW}


def reward(text: str) -> float:
    """How often the moon, or what belongs to it, comes in a story."""
    return float(sum(text.count(word) for word in ("moon", "night", "star")))


def padded(rows: list[list[float]]) -> torch.Tensor:
    """[rows, longest], with zeros at the end, which no token of a causal model attends to."""
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True)


rewards, memory = [], []
for step in range(options.steps):
    # Rollout: a prompt's samples share its blocks.
    outputs = engine.generate(demo.prompts()[:PROMPTS], logprobs=True, **sampling)
    rows = [(output.prompt_token_ids, each) for output in outputs for each in output.sequences]
    scores = torch.tensor([reward(each.text) for _, each in rows]).view(PROMPTS, SAMPLES)
    advantages = ((scores - scores.mean(1, True)) / (scores.std(1, keepdim=True) + 1e-4)).view(-1, 1)

    # Loss: the sampler's log-probabilities are the old ones, so no forward is needed for them.
    ids = padded([prompt + each.token_ids for prompt, each in rows])
    old = padded([[0.0] * len(prompt) + [note.logprob for note in each.logprobs] for prompt, each in rows])
    with batch_invariant():
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        own = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    sampled = padded([[0] * len(prompt) + [1] * len(each.token_ids) for prompt, each in rows])[:, 1:] > 0
    mismatch = (own - old[:, 1:])[sampled].abs().max().item()
    ratio = (own - old[:, 1:]).exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    (-(gain * sampled).sum(1) / sampled.sum(1)).mean().backward()
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()  # the engine sees it: no stale block, no stale captured step
    optimizer.zero_grad()

    rewards.append(scores.mean().item())
    memory.append(psutil.Process().memory_info().rss / 2**20)
    held = f"mismatch {mismatch:.0e}  memory {memory[-1]:.0f} MB"
    print(f"step {step:3}  reward {rewards[-1]:5.2f}  {held}  " + "#" * round(12 * rewards[-1]))

engine.close()
if options.svg:
    picture = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 400 200" fill="none" font-size="11">'
    for name, curve, color, y in (("mean reward", rewards, "blue", 14), ("memory in MB", memory, "red", 28)):
        heights = enumerate(180 - 150 * value / (max(curve) or 1) for value in curve)
        points = " ".join(f"{20 + 360 * i / len(curve):.1f},{height:.1f}" for i, height in heights)
        picture += f'<text x="20" y="{y}" fill="{color}">{name}, up to {max(curve):.2f}</text>'
        picture += f'<polyline stroke="{color}" points="{points}"/>'
    with open(options.svg, "w") as file:
        file.write(picture + "</svg>\n")
