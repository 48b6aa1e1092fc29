"""The embedded default: problem sets that are disjoint, a tokenizer that loses nothing, a model that can do some of the task."""
import json
import random
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from executor import Executor
from problems import FIX_INSTRUCTION, extract_code, load_problems, messages
from rollout import Sampling, evaluate
from tiny import make

TINY = Path(make.__file__).parent


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY)


@pytest.fixture(scope="module")
def executor():
    with Executor(2) as executor:
        yield executor


def rows(name):
    return [json.loads(line) for line in (TINY / f"{name}.jsonl").read_text().splitlines()]


def solution_values(name):
    return [make.values_of(row["solution"].rpartition("return ")[2]) for row in rows(name)]


def test_problem_sets_and_lessons_share_no_function():
    train, held_out = solution_values("train"), solution_values("heldout")
    _, _, rest = make.split_space(make.function_space(), random.Random(make.SEED))
    taught = {f.values for functions in rest.values() for f in functions}
    assert (len(set(train)), len(set(held_out))) == (make.TRAIN, make.HELD_OUT)
    assert not set(train) & set(held_out) and not taught & (set(train) | set(held_out))


def test_folder_is_small_and_whole():
    assert sum(f.stat().st_size for f in TINY.rglob("*") if "__pycache__" not in f.parts) <= 5_000_000
    model = AutoModelForCausalLM.from_pretrained(TINY)
    assert type(model).__name__ == "Olmo2ForCausalLM" and 1e6 <= model.num_parameters() <= 2e6


@pytest.mark.parametrize("text", ["", "f(3) == -17\n", "  x\t\r\n\n", "naïve 漢字 🙂 \x00", "<|user|>\n12<|assistant|>\n", "\ud7ff\ufeff e\u0301"])
def test_tokenizer_loses_nothing(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_digits_stand_alone(tokenizer):
    digits = set("0123456789")
    assert all(len(token) == 1 for token in tokenizer.get_vocab() if digits & set(token))


def test_chat_has_one_bos_and_ends_assistant_turns(tokenizer):
    problem = load_problems("tiny")[0]
    chat = messages(problem, make.program("x"), "Passed 0 of 6 tests.")
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert text == (f"<|endoftext|><|user|>\n{problem.prompt}\n<|assistant|>\n{make.program('x')}<|endoftext|>\n"
                    f"<|user|>\nPassed 0 of 6 tests.\n\n{FIX_INSTRUCTION}\n<|assistant|>\n")
    ids = tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True, tokenize=True, return_dict=True)["input_ids"]
    assert ids.count(tokenizer.bos_token_id) == 1 and tokenizer(problem.prompt)["input_ids"][0] != tokenizer.bos_token_id


def test_a_perfect_reader_gains_from_feedback():
    """Who always names the likeliest function that fits: 47.3 % of held-out problems at once, 86.7 % after one feedback (README.md)."""
    space = make.function_space()
    weight = {f: make.WEIGHTS[family] / len(functions) for family, functions in space.items() for f in functions}
    fits, solved = make.Lessons(space, None).fits, [0, 0]
    for row, values in zip(rows("heldout"), solution_values("heldout")):
        f = make.Function("", "", "", values)
        tests = [(int(re.search(r"f\((\d+)\)", test["code"])[1]), test["public"]) for test in row["tests"]]
        left = fits[make.shown_values(f)]
        for turn in (0, 1):
            guess = max(left, key=weight.get)
            solved[turn] += all(guess(x) == f(x) for x, _ in tests)
            told = [x for x, public in tests if public and guess(x) != f(x)][:1]  # the first failure
            left = [g for g in left if all(g(x) == f(x) for x in told)]
    assert solved == [71, 130]


def test_reference_solutions_pass(executor):
    for split in ("train", "heldout"):
        solutions = {row["task_id"]: row["solution"] for row in rows(split)}
        jobs = [(solutions[p.task_id], p.tests) for p in load_problems("tiny", split=split)]
        assert len(jobs) == len(solutions)
        assert [v.reward for v in executor.run(jobs)] == [1.0] * len(jobs)


def test_lessons_speak_as_the_executor_does(executor):
    """Supervised feedback is written without running anything; it must be what the trainer's model will read."""
    rng = random.Random(0)
    f, attempt = (make.Function("", e, "", make.values_of(e)) for e in ("2 * x + 3", "max(5 * x, 3)"))
    problem, inputs = make.make_problem(f, "", rng)
    verdict, = executor.run([(extract_code(make.program(attempt.expression)), problem.tests)])
    assert verdict.feedback() == make.feedback(f, attempt, inputs)
    assert verdict.visible().feedback() == make.feedback(f, attempt, inputs[:make.PUBLIC])


def test_the_model_can_do_some_of_it(tokenizer, executor):
    """Greedy Iter-1 on held-out problems is 20-50 %, and feedback has yet to become useful (README.md says why)."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    _, solved = evaluate(model, tokenizer, load_problems("tiny", split="heldout"), executor, 2, Sampling(0.0, max_new_tokens=48))
    first, second = (sum(row[k] for row in solved) / len(solved) for k in (0, 1))
    assert 0.2 <= first <= 0.5
    assert second <= first + 0.15
