"""GRPO on one object: the engine samples from the model, the optimizer trains the same modules, and the engine
samples again. No copy of the weights, nothing to synchronise, and the sampler's log-probabilities have the bits of
the trainer's (batch_invariant, which needs a C++ compiler). The reward wants stories with the moon in them.

python examples/rollouts.py                   # under two minutes on two cores
python examples/rollouts.py --svg reward.svg  # the curves as a picture
"""

import argparse

import torch
from torch.nn.utils import clip_grad_norm_

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
prompts = demo.prompts()[:PROMPTS]


def reward(text: str) -> float:
    """How often the moon, or what belongs to it, comes in a story."""
    return float(sum(text.count(word) for word in ("moon", "night", "star")))


def logprobs_of(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """What the trainer's forward says of each token but the first, [rows, tokens - 1]."""
    with batch_invariant():
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
        return logits.float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


curve: list[tuple[float, float]] = []  # mean reward, bytes of the pools
for step in range(options.steps):
    # Rollout: a prompt's samples share its blocks.
    outputs = engine.generate(
        prompts, num_return_sequences=SAMPLES, do_sample=True, top_k=0, max_new_tokens=NEW, logprobs=True
    )
    rows = [(output.prompt_token_ids, each) for output in outputs for each in output.sequences]
    rewards = torch.tensor([reward(each.text or "") for _, each in rows]).view(PROMPTS, SAMPLES)
    advantages = ((rewards - rewards.mean(1, True)) / (rewards.std(1, keepdim=True) + 1e-4)).flatten()

    # One padded batch: prompts and answers, and the sampler's own log-probabilities.
    width = max(len(prompt) + len(each.token_ids) for prompt, each in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask, old, weights = torch.zeros_like(ids), torch.zeros(ids.shape), torch.zeros(ids.shape)
    for row, (prompt, each) in enumerate(rows):
        end = len(prompt) + len(each.token_ids)
        ids[row, :end] = torch.tensor(prompt + each.token_ids)
        mask[row, :end] = 1
        weights[row, len(prompt) : end] = 1 / len(each.token_ids)
        old[row, len(prompt) : end] = torch.tensor([note.logprob for note in each.logprobs or ()])

    # Loss: the sampler's log-probabilities are the old ones, so no forward is needed for them.
    own = logprobs_of(ids, mask)
    sampled = weights[:, 1:] > 0
    mismatch = (own.detach() - old[:, 1:])[sampled].abs().max().item()
    ratio = (own - old[:, 1:]).exp()
    gain = torch.minimum(ratio * advantages[:, None], ratio.clamp(1 - CLIP, 1 + CLIP) * advantages[:, None])
    loss = -(gain * weights[:, 1:]).sum(1).mean()
    loss.backward()
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()  # the engine sees it: no stale block, no stale captured step
    optimizer.zero_grad()

    curve.append((float(rewards.mean()), engine.stats()["memory"]["reserved_bytes"]))
    if step % max(1, options.steps // 10) == 0 or step == options.steps - 1:
        bar = "#" * round(12 * curve[-1][0])
        held = f"mismatch {mismatch:.0e}  pools {curve[-1][1]:,} B"
        print(f"step {step:3}  reward {curve[-1][0]:5.2f}  {held}  {bar}")

engine.close()
if options.svg:
    highest = max(value for value, _ in curve) or 1.0
    places = [(20 + 360 * i / len(curve), 180 - 160 * y / highest) for i, (y, _) in enumerate(curve)]
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    line = f'<polyline fill="none" stroke="#2f80ed" stroke-width="2" points="{points}"/>'
    title = (
        f'<text x="20" y="14" font-size="12">mean reward of {len(curve)} steps, up to {highest:.2f}</text>'
    )
    with open(options.svg, "w") as file:
        file.write(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 400 200">{title}{line}</svg>\n')
