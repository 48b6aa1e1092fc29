"""One optimisation step of TRL's GRPOTrainer against ours, on the same model, prompts, tokens and rewards: loss, gradients, time.

    pip install -r bench/requirements-peer.txt     # TRL, in an environment of its own
    python bench/peer.py [--rounds 2]

Single turn: 2 prompts of 256 tokens, 8 responses of 61 to 128 tokens each. TRL 1.16 gets the tokens through its `rollout_func`, and the rewards
through a reward function that looks them up; both measure all that follows: advantages, padding or packing, the reference's log-probs where
beta > 0, loss, backward, clipping, AdamW (learning rate 0, so every step is the same step). TRL's settings: fp32, no gradient checkpointing,
a micro-batch per 8 responses, `scale_rewards="group"` ((reward - mean) / (sample std + 1e-4), as ours), loss types grpo, dapo and dr_grpo,
`use_bias_correction_kl=False` (its default multiplies the KL by the ratio: the same loss, another gradient; GRPO's paper does not). Policy and
reference are two different random models, so that the KL term counts.
Steps of both sides alternate inside TRL's own training loop. The loss must be equal to 1e-4 and the gradients (before clipping) to a relative
distance of 1e-3, or the bench ends with an error. Last line: one JSON object.
"""
import argparse
import json
import logging
import os
import random
import statistics
import tempfile
import time
from pathlib import Path

os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"}
from common import random_model, seconds
import torch
from datasets import Dataset
from loss import make_group
from transformers import AutoTokenizer, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from murphy import MurphyConfig, assign_credit, optimise
from problems import Problem
from rollout import Group, Node, Tree

TINY = Path(__file__).resolve().parents[1] / "tiny"
LONGEST = 128


def make_trees(prompts, size, vocab):
    """One-turn trees of random tokens and rewards."""
    rng, trees = random.Random(0), []
    for p in range(prompts):
        prefix, responses, _ = make_group(rng, 256, vocab, size)
        nodes = [Node(-1, 1, 0, ids, "", "", True, reward=rng.choice([0.0, 0.25, 0.5, 1.0])) for ids in responses]
        trees.append(Tree(Problem(f"prompt {p}", ""), nodes, [Group(-1, prefix, list(range(size)))]))
    return trees


def gradients(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


class Alternate(TrainerCallback):
    """Times each of TRL's steps, and lets ours run behind it."""
    def __init__(self, ours):
        self.ours, self.times, self.gradients = ours, [], None

    def on_step_begin(self, *_, **__):
        self.start = time.perf_counter()

    def on_pre_optimizer_step(self, *_, model, **__):
        if self.gradients is None:
            self.gradients = gradients(model)

    def on_step_end(self, *_, **__):
        self.times.append((time.perf_counter() - self.start, seconds(self.ours)))


def trainer_of(folder, trees, loss_type, beta, steps, callback):
    """TRL's trainer, which gets tokens and rewards of the trees."""
    size, nodes = len(trees[0].nodes), {}
    for tree in trees:
        for node in tree.nodes:
            nodes[tuple(node.response_ids)] = node
    by_prompt = {tree.problem.task_id: tree for tree in trees}

    def rollout(prompts, _):
        taken = {name: iter(tree.nodes) for name, tree in by_prompt.items()}
        return {"prompt_ids": [by_prompt[p].groups[0].prefix_ids for p in prompts],
                "completion_ids": [next(taken[p]).response_ids for p in prompts], "logprobs": None}

    config = GRPOConfig(
        output_dir=str(Path(folder) / "trl"), use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none", save_strategy="no",
        logging_steps=1, disable_tqdm=True, max_steps=steps, learning_rate=0.0, weight_decay=0.0, max_grad_norm=1e9, seed=0, optim="adamw_torch",
        per_device_train_batch_size=size, gradient_accumulation_steps=len(trees), num_generations=size, max_completion_length=LONGEST,
        beta=beta, use_bias_correction_kl=False, loss_type=loss_type, scale_rewards="group", epsilon=0.2, temperature=1.0, disable_dropout=True,
        dataloader_pin_memory=False)
    return GRPOTrainer(model=folder, args=config, processing_class=AutoTokenizer.from_pretrained(TINY), rollout_func=rollout, callbacks=[callback],
                       reward_funcs=lambda completion_ids, **_: [nodes[tuple(ids)].reward for ids in completion_ids],
                       train_dataset=Dataset.from_list([{"prompt": tree.problem.task_id} for tree in trees]))


def compare(folder, model, reference, trees, loss_type, beta, rounds):
    """(loss of TRL, loss of ours, relative distance of gradients, median speedup) of one kind of loss."""
    config = MurphyConfig(beta=beta, normaliser=loss_type.replace("_", "-"), max_new_tokens=LONGEST, max_grad_norm=1e9)
    optimizer, metrics = torch.optim.AdamW(model.parameters(), lr=0.0), {}

    def ours():
        for tree in trees:
            assign_credit(tree, config)
        metrics.update(optimise(model, reference if beta else None, trees, optimizer, config))

    callback = Alternate(ours)
    trainer = trainer_of(folder, trees, loss_type, beta, rounds + 1, callback)
    trainer.remove_callback(PrinterCallback)
    if beta:
        trainer.ref_model.load_state_dict(reference.state_dict())
    trainer.train()
    theirs = trainer.state.log_history[0]["loss"]
    distance = ((callback.gradients - gradients(model)).norm() / callback.gradients.norm()).item()
    assert abs(theirs - metrics["loss"]) < 1e-4, f"{loss_type}, beta {beta}: loss {theirs} of TRL and {metrics['loss']} of ours"
    assert distance < 1e-3, f"{loss_type}, beta {beta}: gradients differ by {distance}"
    times = callback.times[1:]
    ratio = statistics.median(t / o for t, o in times)
    print(f"{loss_type}, beta {beta}: loss {theirs:.6f} of TRL, {metrics['loss']:.6f} of ours, gradients {distance:.1e} apart; step "
          f"{statistics.median(t for t, _ in times):.2f} s against {statistics.median(o for _, o in times):.2f} s, {ratio:.2f} x")
    return abs(theirs - metrics["loss"]), distance, ratio


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    model, reference = random_model(), random_model(seed=1).requires_grad_(False)
    trees, results = make_trees(2, 8, model.config.vocab_size), {}
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        for beta in (0.0, 0.04):
            for loss_type in ("grpo", "dapo", "dr_grpo"):
                results[f"{loss_type}_beta_{beta}"] = compare(folder, model, reference, trees, loss_type, beta, args.rounds)
    speedups = {name: round(ratio, 2) for name, (_, _, ratio) in results.items()}
    print(json.dumps({"speedup_vs_trl": min(speedups.values()), "speedups": speedups, "rounds": args.rounds,
                      "loss_difference": float(f"{max(r[0] for r in results.values()):.1e}"),
                      "gradient_distance": float(f"{max(r[1] for r in results.values()):.1e}")}))


if __name__ == "__main__":
    main()
