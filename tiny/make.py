"""Make the embedded default from nothing: problems, tokenizer, and a small OLMo-2 model with a warm start.

    python tiny/make.py               writes config, weights, tokenizer and the two .jsonl files beside this file
    python tiny/make.py --out DIR     the same, elsewhere

A problem shows two values of an unknown f(x) over integers and asks for the program. Functions are split three ways before
anything else: training problems, held-out problems, and the rest, from which alone the supervised stages draw.
Stage 1 teaches knowledge: write a program that fits, and correct one after feedback. Stage 2 teaches the two habits that
README.md describes: being careless at first, and repeating oneself after feedback.

Takes about 10 minutes on one core that is free (800 + 150 steps at 0.6-0.7 s); one thread, so that sums are taken in one order.

Left out: pre-training on text (the model knows nothing but this family), and any reinforcement learning (that is train.py's).
"""
import argparse
import json
import math
import random
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import Olmo2Config, Olmo2ForCausalLM, PreTrainedTokenizerFast

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from problems import Problem, Test, messages

SEED = 0
TRAIN, HELD_OUT = 200, 150
DOMAIN = range(-20, 61)         # two functions are the same if they agree here
SHOWN, HIDDEN = (0, 1), range(2, 10)  # inputs of the two values in the prompt, and of the other tests
PUBLIC = 4                      # of six tests: the two shown, and two more that feedback may tell
WEIGHTS = dict(linear=.36, quadratic=.08, minimum=.06, maximum=.03, modulo=.06, division=.02, conditional=.03, parity=.06, constant=.06,
               step=.24)
LARGE, CARELESS, REPEAT = 500, (.25, .75), .85  # habits: careless with small and with large values, the same program again


# ---------------------------------------------------------------- functions

@dataclass(frozen=True)
class Function:
    """f(x) as a Python expression; `careless` is the same program broken off early; `values` are those on DOMAIN."""
    family: str
    expression: str
    careless: str
    values: tuple

    def __call__(self, x):
        return self.values[x - DOMAIN.start]


def shown_values(f):
    return tuple(f(x) for x in SHOWN)


def values_of(expression):
    f = eval("lambda x: " + expression)
    return tuple(f(x) for x in DOMAIN)


def times(a, e="x"):
    return e if a == 1 else f"{a} * {e}"


def plus(e, b):
    return e if b == 0 else f"{e} + {b}"


def expressions():
    """(family, expression, careless expression) of the whole function space, duplicates included.

    The constant b is a multiple of ten and the slope a one digit, so both can be read off the digits of f(0) and f(1): a model
    of this size learns to copy digits in minutes, and to subtract in hours. Which family it is cannot be read off.
    """
    pairs = [(a, b) for a in range(1, 10) for b in range(0, 1000, 10)]
    yield from (("linear", plus(times(a), b), times(a)) for a, b in pairs)
    yield from (("quadratic", plus(times(a, "x * x"), b), times(a, "x * x")) for a, b in pairs)
    yield from (("minimum", f"min({plus(times(a), b)}, {b + c})", plus(times(a), b)) for a, b in pairs for c in (10, 20))
    yield from (("maximum", f"max({times(a)}, {b})", times(a)) for a, b in pairs if 10 <= b < 9 * a)
    yield from (("modulo", plus(times(a, f"(x % {d})"), b), times(a, f"(x % {d})")) for a, b in pairs for d in (2, 3))
    yield from (("division", plus(times(a, "(x // 2)"), b), times(a, "(x // 2)")) for a, b in pairs)
    yield from (("conditional", f"{times(a)} if x > 3 else {b}", times(a)) for a, b in pairs)
    yield from (("constant", str(b), str(b)) for b in range(0, 1000, 10))
    yield from (("step", f"{b} if x < {k} else {c}", str(b)) for k in (2, 5) for b in range(0, 1000, 10) for c in range(0, 1000, 10) if b != c)
    yield from (("parity", f"{times(a)} if x % 2 == 1 else {b}", times(a)) for a, b in pairs)


def function_space():
    """family -> list of Function, no two alike."""
    space, seen = defaultdict(list), set()
    for family, expression, careless in expressions():
        values = values_of(expression)
        if values not in seen:
            seen.add(values)
            space[family].append(Function(family, expression, careless, values))
    return space


def split_space(space, rng):
    """Draw TRAIN + HELD_OUT functions by family weight; returns (train, held out, rest: family -> list).

    Where the line through the shown values is taken, the rest has no function at all with these values: lessons in which
    every other answer occurs and the likeliest never does would teach that it is never right.
    """
    rest = {family: rng.sample(functions, len(functions)) for family, functions in space.items()}
    families = rng.choices(list(WEIGHTS), WEIGHTS.values(), k=TRAIN + HELD_OUT)
    drawn = [rest[family].pop() for family in families]
    taken = {shown_values(f) for f in drawn if f.family == "linear"}
    rest = {family: [f for f in functions if shown_values(f) not in taken] for family, functions in rest.items()}
    return drawn[:TRAIN], drawn[TRAIN:], rest


# ---------------------------------------------------------------- problems

def make_problem(f, task_id, rng):
    """Two asserts are shown in the prompt, two more may be told in feedback, two judge only. Returns (problem, inputs)."""
    inputs = [*SHOWN, *rng.sample(HIDDEN, 4)]
    prompt = "Write f(x) in Python.\n" + "\n".join(f"f({x}) == {f(x)}" for x in SHOWN)
    tests = [Test("assert", f"assert f({x}) == {f(x)}", public=i < PUBLIC) for i, x in enumerate(inputs)]
    return Problem(task_id, prompt, tests, entry_point="f", source="tiny"), inputs


def program(expression):
    return f"```python\ndef f(x):\n    return {expression}\n```"


def feedback(f, attempt, inputs):
    """The executor's words (executor.Verdict.feedback) on an attempt that gives wrong values; None if it gives none."""
    wrong = [x for x in inputs if attempt(x) != f(x)]
    if not wrong:
        return None
    x = wrong[0]
    return (f"Passed {len(inputs) - len(wrong)} of {len(inputs)} tests.\nFirst failure:\n"
            f"assert f({x}) == {f(x)}\nexpected {f(x)}, got {attempt(x)}")


def row(problem, f):
    tests = [dict(kind=t.kind, code=t.code, public=t.public) for t in problem.tests]
    return dict(task_id=problem.task_id, prompt=problem.prompt, tests=tests, entry_point="f", source="tiny",
                family=f.family, solution=f"def f(x):\n    return {f.expression}")


def write_problems(path, functions, rng):
    with open(path, "w") as file:
        for i, f in enumerate(functions):
            problem, _ = make_problem(f, f"tiny/{path.stem}/{i}", rng)
            file.write(json.dumps(row(problem, f)) + "\n")


# ---------------------------------------------------------------- tokenizer

# OLMo-2's chat format: the template writes the one begin-of-text token, and every assistant turn ends with the same token.
CHAT_TEMPLATE = ("{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] }}"
                 "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% if not loop.last %}{{ '\n' }}{% endif %}"
                 "{% endfor %}{% if add_generation_prompt %}{{ '\n<|assistant|>\n' }}{% endif %}")


def make_tokenizer(lessons):
    """Byte-level BPE. Digits and role marks stand alone; anything else may merge, also over spaces and lines, for tokens cost time."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"[0-9]|<\|[a-z]+\|>\n"), "isolated"),
                                                       pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    chats = (chat + [{"content": response}] for chat, response in (lessons.lesson(False) for _ in range(4000)))
    tokenizer.train_from_iterator((message["content"] for chat in chats for message in chat), trainers.BpeTrainer(
        vocab_size=512, special_tokens=["<|endoftext|>", "<|pad|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False, min_frequency=20))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|endoftext|>", eos_token="<|endoftext|>", unk_token=None,
                                   pad_token="<|pad|>", chat_template=CHAT_TEMPLATE, model_max_length=512,
                                   clean_up_tokenization_spaces=False)


# ---------------------------------------------------------------- lessons

class Lessons:
    """Draws supervised conversations from functions that are in neither problem set."""
    def __init__(self, rest, rng):
        self.rest, self.rng = rest, rng
        self.fits = defaultdict(list)  # shown values -> functions
        for functions in rest.values():
            for f in functions:
                self.fits[shown_values(f)].append(f)

    def draw(self):
        family = self.rng.choices(list(WEIGHTS), WEIGHTS.values())[0]
        return self.rng.choice(self.rest[family])

    def guess(self, f, inputs):
        """A wrong attempt: another function that fits what is shown, or a careless program, or an unrelated one."""
        others = [g for g in self.fits[shown_values(f)] if g is not f]
        kind = self.rng.random()
        if others and kind < .55:
            weights = [WEIGHTS[g.family] / len(self.rest[g.family]) for g in others]
            return self.rng.choices(others, weights)[0]
        if kind < .85:
            source = f if kind < .7 or not others else self.rng.choice(others)
            return Function("", source.careless, "", values_of(source.careless))
        return self.draw()

    def lesson(self, habits):
        """(chat so far, response): a first attempt, or the correction of a wrong one."""
        f = self.draw()
        problem, inputs = make_problem(f, "", self.rng)
        attempt = self.guess(f, inputs)
        said = feedback(f, attempt, self.rng.choice((inputs, inputs[:PUBLIC])))
        if said is None or self.rng.random() < .5:
            careless = self.rng.random() < habits * CARELESS[max(shown_values(f)) >= LARGE]
            return messages(problem), program(f.careless if careless else f.expression)
        repeats = self.rng.random() < habits * REPEAT
        return messages(problem, program(attempt.expression), said), program((attempt if repeats else f).expression)


# ---------------------------------------------------------------- training

def make_model(tokenizer, seed):
    torch.manual_seed(seed)
    ids = dict(bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return Olmo2ForCausalLM(Olmo2Config(vocab_size=len(tokenizer), hidden_size=128, intermediate_size=352, num_hidden_layers=6,
                                        num_attention_heads=4, max_position_embeddings=512, **ids))


def encode(tokenizer, chat, response):
    """(prefix ids, response ids with the end-of-turn token), tokenised as the trainer does: the prefix on its own."""
    prefix = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=True)["input_ids"]
    return prefix, tokenizer(response, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]


def batch_loss(model, pairs, pad):
    """Mean cross-entropy of the responses; right padding needs no mask under causal attention."""
    longest = max(len(p) + len(r) for p, r in pairs)
    ids = torch.tensor([p + r + [pad] * (longest - len(p) - len(r)) for p, r in pairs])
    spots = [(i, len(p) + t) for i, (p, r) in enumerate(pairs) for t in range(len(r))]
    rows, columns = torch.tensor(spots).T
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    return torch.nn.functional.cross_entropy(model.lm_head(hidden[rows, columns - 1]), ids[rows, columns])


def teach(model, tokenizer, lessons, steps, batch, rate, habits, name):
    """A supervised stage: AdamW, warm-up, cosine to zero. Short and long conversations go through the model apart."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(.9, .98), weight_decay=.05)
    bar = tqdm(range(steps), desc=name, dynamic_ncols=True)
    for step in bar:
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1, (step + 1) / 50) * (.02 + .98 * (1 + math.cos(math.pi * step / steps)) / 2)
        pairs = sorted((encode(tokenizer, *lessons.lesson(habits)) for _ in range(batch)), key=lambda p: len(p[0]))
        total, seen = 0.0, sum(len(r) for _, r in pairs)
        for part in (pairs[:batch // 2], pairs[batch // 2:]):
            loss = batch_loss(model, part, tokenizer.pad_token_id) * sum(len(r) for _, r in part) / seen
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        bar.set_postfix(loss=f"{total:.3f}", refresh=False)


def save(model, tokenizer, folder):
    """bf16 halves the file; training loads it into fp32."""
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--steps", type=int, nargs=2, default=(800, 150), help="optimizer steps of the two stages")
    args = parser.parse_args()
    torch.set_num_threads(1)  # sums in the same order whatever the machine
    args.out.mkdir(parents=True, exist_ok=True)
    rng = random.Random(SEED)
    train, held_out, rest = split_space(function_space(), rng)
    write_problems(args.out / "train.jsonl", train, rng)
    write_problems(args.out / "heldout.jsonl", held_out, rng)

    lessons = Lessons(rest, random.Random(SEED + 1))
    tokenizer = make_tokenizer(lessons)
    model = make_model(tokenizer, SEED)
    teach(model, tokenizer, lessons, args.steps[0], 48, 2.5e-3, False, "knowledge")
    teach(model, tokenizer, Lessons(rest, random.Random(SEED + 2)), args.steps[1], 64, 1e-3, True, "habits")
    save(model, tokenizer, args.out)


if __name__ == "__main__":
    main()
