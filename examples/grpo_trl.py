"""GRPO with TRL on the tiny model: rollouts come from an engine on the trainer's own modules, with the sampler's
log-probabilities. The reward wants stories with the moon in them.

pip install trl
python examples/grpo_trl.py            # under two minutes on two cores
python examples/grpo_trl.py --generate # the rollouts by paged generate(), one word in the config
"""

import argparse
import tempfile

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from hf_paged import demo
from hf_paged.trainer import SampleCallback
from hf_paged.trl import rollout_func

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--generate", action="store_true")
options = parser.parse_args()

torch.manual_seed(0)
model, tokenizer = demo.model().float(), demo.tokenizer()
prompts = demo.prompts()[:4]


def reward(completions: list[str], **_: object) -> list[float]:
    """How often the moon, or what belongs to it, comes in a story."""
    return [float(sum(text.count(word) for word in ("moon", "night", "star"))) for text in completions]


with tempfile.TemporaryDirectory() as folder:
    trainer = GRPOTrainer(
        model=model,
        args=GRPOConfig(
            folder,
            per_device_train_batch_size=32,
            num_generations=8,
            max_completion_length=24,
            max_steps=options.steps,
            learning_rate=3e-4,
            use_cpu=not torch.cuda.is_available(),
            bf16=False,
            gradient_checkpointing=False,
            cache_implementation="paged",
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        reward_funcs=reward,
        processing_class=tokenizer,
        rollout_func=None if options.generate else rollout_func,
        callbacks=[SampleCallback(prompts[:1], every=max(1, options.steps // 4), max_new_tokens=24)],
    )
    trainer.train()

rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
few = max(1, len(rewards) // 8)
begin, end = sum(rewards[:few]) / few, sum(rewards[-few:]) / few
print(f"mean reward {begin:.2f} in the first {few} steps, {end:.2f} in the last {few}")
