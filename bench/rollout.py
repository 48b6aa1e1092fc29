"""Sampling a group from its prefix: rollout.sample_batch against plain `generate(num_return_sequences=G)`, on a random model.

    python bench/rollout.py [--rounds 3]

skewed: 4 prompts of 256 tokens, G = 8; responses have 8 to 32 tokens, one in eight has 200. A random model ends nowhere, so a
hook on the model, the same for both sides, gives its text lengths: the vocabulary falls into 8 classes (id modulo 8), a response stays
in the class of its first token, and ends after as many tokens as its class says: logits outside the class are -inf, the stop token's
is -inf before the end and the only one after it. Within its class a response is drawn from the model's own logits. Both sides start
from the same seed, hence draw the same first tokens, and so have the same lengths: checked in every round.
Both sides sample all prompts in one batch (`speedup_skewed`: a plain loop over prompts would be slower still). With a single prompt
(`speedup_skewed_one_prompt`) there are fewer rows to drop.

prefix_1024: one prefix of 1024 tokens, 8 responses of 64 tokens, no early end: prefill once and growing in place alone.
Greedy tokens of both sides are equal, checked in the same run. Last line: one JSON object.
"""
import argparse
import json
import random

from common import race, random_model
import torch

from rollout import Sampling, first_stop, generation_config, sample_batch, sampling_mode

STOP, CLASSES = 2, 8
LENGTHS = [8, 12, 16, 20, 24, 28, 32, 200]  # tokens of a response, by the class of its first token


def give_lengths(model, prefix_tokens):
    """Hook: logits of a response that stays in its class and ends at that class's length. All it reads is the last token and its place."""
    classes = torch.arange(model.config.vocab_size) % CLASSES
    allowed = classes[None, :] == torch.arange(CLASSES)[:, None]  # [class, vocabulary]
    allowed[:, STOP] = False
    lengths = torch.tensor(LENGTHS)

    def hook(_, __, inputs, output):
        last = inputs["input_ids"][:, -1]
        done = inputs["position_ids"][:, -1].expand(len(last)) - prefix_tokens + 1  # tokens of the response so far
        mine = allowed[last % CLASSES]
        mine[done == 0] = torch.arange(model.config.vocab_size) != STOP
        ended = (done > 0) & (done >= lengths[last % CLASSES] - 1)
        mine[ended] = torch.arange(model.config.vocab_size) == STOP
        logits = output.logits[:, -1].masked_fill(~mine, -torch.inf)
        for c in range(CLASSES):  # the first token is of each class with probability 1 / 8
            first = logits[done == 0, c::CLASSES]
            logits[done == 0, c::CLASSES] = first - first.logsumexp(-1, keepdim=True)
        output.logits[:, -1] = logits
    return model.register_forward_hook(hook, with_kwargs=True)


def never_ends(_, __, output):
    output.logits[..., STOP] = -torch.inf


def plain(model, prefixes, size, sampling):
    """Responses (ids, up to and with the stop token) of one `generate` call on prefixes of equal length."""
    sampled = sampling.temperature > 0  # greedy rows of a prompt are equal; `generate` wants them as rows of their own
    config = generation_config(sampling, [STOP], sampling.max_new_tokens)
    config.num_return_sequences = size if sampled else 1
    ids = torch.tensor(prefixes if sampled else [p for p in prefixes for _ in range(size)])
    rows = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)[:, ids.shape[1]:].tolist()
    return [row[:first_stop(row, {STOP})] for row in rows]


def ours(model, prefixes, size, sampling):
    return [ids for group in sample_batch(model, prefixes, size, sampling, [STOP]) for ids, _ in group]


def compare(name, model, prefixes, sampling, rounds, size=8):
    """Speedup over plain `generate`; greedy tokens, and the lengths of each round, must be equal on both sides."""
    greedy = Sampling(temperature=0.0, max_new_tokens=sampling.max_new_tokens)
    assert ours(model, prefixes, size, greedy) == plain(model, prefixes, size, greedy), f"{name}: greedy tokens differ"
    lengths = {}

    def side(function):
        seeds = iter(range(1000))

        def sample():
            seed = next(seeds)
            torch.manual_seed(seed)
            found = [len(ids) for ids in function(model, prefixes, size, sampling)]
            assert lengths.setdefault(seed, found) == found, f"{name}, seed {seed}: lengths differ"
        return sample
    ratio = race(f"{name}, plain generate against ours", side(plain), side(ours), rounds)
    return ratio, [n for found in lengths.values() for n in found]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    rng, model = random.Random(0), random_model()
    prefix = lambda n: [rng.randrange(3, model.config.vocab_size) for _ in range(n)]
    prompts = [prefix(256) for _ in range(4)]
    with sampling_mode(model):
        hook, sampling = give_lengths(model, 256), Sampling(max_new_tokens=200)
        skewed, lengths = compare("skewed, prompts in one batch", model, prompts, sampling, args.rounds)
        by_prompt, _ = compare("skewed, one prompt", model, prompts[:1], sampling, args.rounds)
        hook.remove()
        hook = model.register_forward_hook(never_ends)
        long, _ = compare("prefix 1024, no early end", model, [prefix(1024)], Sampling(max_new_tokens=64), args.rounds)
        hook.remove()
    shares = {"up_to_32": sum(n <= 32 for n in lengths) / len(lengths), "of_200": sum(n == 200 for n in lengths) / len(lengths)}
    print(json.dumps({"speedup_skewed": skewed, "speedup_skewed_one_prompt": by_prompt, "speedup_prefix_1024": long, "greedy_tokens_equal": True,
                      "skewed_lengths": {k: round(v, 2) for k, v in shares.items()}, "rounds": args.rounds}))


if __name__ == "__main__":
    main()
