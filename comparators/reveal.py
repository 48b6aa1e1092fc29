"""ReVeal (arXiv 2506.11442): generation and verification turns alternate; the model's own tests, not the given ones, guide it.

    expanded   every program into one verification turn, in which the model writes tests; they are run on the program, and where one
               fails, its result is the feedback of the next program. Chains of up to S programs with verifications between them
    return     of a turn: its own reward + the chain's outcome, which is the last program's pass rate on the problem's tests. Own reward of a
               program: its pass rate + what it gained on the program before; of a verification: the share of its tests that
               the reference solution passes, 0 without tests
    loss       GRPO's; a turn is compared with the same turn of the other chains of its problem

Certain, from its paper's summary: the alternation, executed tests of the model's own, the two own rewards, returns by turn. Our reading: the paper's
PPO with a value per turn is here GRPO's z-score, as in the other methods; later turns count through the outcome alone, for a
sum of their rewards would pay for failing first; a chain ends when no written test fails; chains in which the executor failed
are left out; pruning and --credit do not apply. Of an answer, the first MAX_TESTS different lines `assert call == value` count, where only
the left side calls the program: so that a test says something, and no test passes whatever the program does.

The tiny model was taught nothing but programs of one expression, so on its problems a program in a verification turn counts as
tests: what it gives at TINY_INPUTS is what the model expects. Problems need a `solution`; those of stdin have nothing to call, hence no tests.
In logs and trees both kinds of turns are numbered: program 1, verification 2, program 3; a verification's verdict is the reference's.

    python train.py --method reveal
"""
import ast
import time

import torch

import credit
from executor import Verdict
from murphy import all_reduce, autocast, device_of, optimise, tree_metrics
from problems import BadInput, Test, defined_names, extract_code, parse
from rollout import (Group, batches, chains_of, grow_trees, new_node, prefix_of, prefix_room, reward_of, sample_and_run, sample_batch,
                     sampling_mode, stop_ids)
from sharding import unsharded

MAX_TESTS = 4
TINY_INPUTS = (2, 5, 7)
CHECK = "Before your program is run: is it right?"
VERIFY_INSTRUCTION = f"Write up to {MAX_TESTS} tests for it, one a line, such as assert f(1) == 2, in one code block: ```python ... ```."


def check_problems(problems):
    for problem in problems:
        if not problem.solution:
            raise BadInput(f"problem {problem.task_id} has no `solution`, and --method reveal judges the model's tests by it; "
                           "add that field, or take another method")


# ---------------------------------------------------------------- written tests

def written_tests(problem, answer):
    """The Tests (list, at most MAX_TESTS) in a verification answer (str)."""
    tree = parse(extract_code(answer))
    names = {problem.entry_point} if problem.entry_point else defined_names(parse(problem.solution) or parse(""))
    statements = tree.body if tree else []
    if problem.source == "tiny":
        statements = [assertion for statement in statements for assertion in as_assertions(statement, problem.entry_point)]
    lines = dict.fromkeys(ast.unparse(s) for s in statements if isinstance(s, ast.Assert) and says_something(s.test, names))
    return [Test("assert", line) for line in list(lines)[:MAX_TESTS]]


def says_something(test, names):
    """Whether an asserted expression has the form `call == value`, of which the left side alone calls one of names."""
    def calls(node):
        return any(isinstance(n, ast.Call) and getattr(n.func, "id", getattr(n.func, "attr", "")) in names for n in ast.walk(node))
    return (isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq)
            and calls(test.left) and not calls(test.comparators[0]))


def as_assertions(statement, name):
    """`def name(x): return e` as `assert name(x := 2) == e` for TINY_INPUTS; another statement as it is."""
    if not (isinstance(statement, ast.FunctionDef) and statement.name == name and len(statement.args.args) == 1
            and len(statement.body) == 1 and isinstance(statement.body[0], ast.Return) and statement.body[0].value):
        return [statement]
    argument, value = statement.args.args[0].arg, ast.unparse(statement.body[0].value)
    tree = parse("\n".join(f"assert {name}({argument} := {x}) == ({value})" for x in TINY_INPUTS))
    return tree.body if tree else []  # `return *x` parses, (*x) does not


# ---------------------------------------------------------------- chains

def add_group(tokenizer, tree, parent, program, feedback, room, **instruction):
    """Open the group below node `parent` of a prefix that ends with feedback on the program. Returns its index."""
    ids, cut = prefix_of(tokenizer, tree.problem, program, feedback, room, **instruction)
    tree.groups.append(Group(parent, ids, truncated=cut))
    return len(tree.groups) - 1


def add_node(tree, node, turn, reward):
    """Put a node into its tree and group. Returns its index."""
    node.turn, node.reward = turn, reward
    tree.groups[node.group].members.append(len(tree.nodes))
    tree.nodes.append(node)
    return len(tree.nodes) - 1


def verify(model, tokenizer, frontier, executor, turn, config, seconds, bar):
    """A verification turn below every program of the frontier [(tree, index)].

    Returns [(tree, index of the verification, program, verdict of its tests on the program)] where a written test failed.
    """
    stop, room, start = stop_ids(model, tokenizer), prefix_room(model.config, tokenizer, config.sampling), time.perf_counter()
    groups = [add_group(tokenizer, tree, i, tree.nodes[i], lambda _: CHECK, room, instruction=VERIFY_INSTRUCTION) for tree, i in frontier]
    prefixes, nodes = [tree.groups[g].prefix_ids for (tree, _), g in zip(frontier, groups)], [None] * len(frontier)
    with sampling_mode(model):
        for batch in batches(prefixes, 1, config.sampling):
            for k, [response] in zip(batch, sample_batch(model, [prefixes[k] for k in batch], 1, config.sampling, stop, bar)):
                tree, parent = frontier[k]
                nodes[k] = new_node(tokenizer, tree.problem, parent, groups[k], *response)
    seconds["sampling"] = seconds.get("sampling", 0.0) + time.perf_counter() - start
    start, found = time.perf_counter(), []
    for (tree, i), node, (judged, checked) in zip(frontier, nodes, judge(frontier, nodes, executor)):
        node.verdict = judged
        index = add_node(tree, node, turn, reward_of(judged))
        if node.reward is not None and not checked.infra and not all(checked.passed):
            found.append((tree, index, tree.nodes[i], checked))
    seconds["execution"] = seconds.get("execution", 0.0) + time.perf_counter() - start
    return found


def judge(frontier, nodes, executor):
    """[(verdict on the reference solution, verdict on the program)] of the tests in verification nodes; a node's code becomes its tests."""
    jobs, where = [], []
    for (tree, i), node in zip(frontier, nodes):
        tests = written_tests(tree.problem, node.text)
        node.code = "\n".join(test.code for test in tests)
        where.append(len(jobs) if tests else None)
        jobs += [(tree.problem.solution, tests), (tree.nodes[i].code, tests)] if tests else []
    verdicts, nothing = executor.run(jobs), Verdict([], [])
    return [(nothing, nothing) if at is None else (verdicts[at], verdicts[at + 1]) for at in where]


def grow_chains(model, tokenizer, problems, executor, config, seconds, bar=None):
    """One tree per problem: config.width chains of program, verification, program, ... Returns list of Tree, with rewards."""
    binary, verdicts = config.reward == "binary", {}
    stop, room = stop_ids(model, tokenizer), prefix_room(model.config, tokenizer, config.sampling)
    trees = grow_trees(model, tokenizer, problems, executor, turns=1, group_size=config.width, sampling=config.sampling,
                       binary_reward=binary, seconds=seconds, bar=bar)
    frontier = [(tree, i) for tree in trees for i in range(len(tree.nodes))]
    for turn in range(2, 2 * config.turns, 2):
        whole = [(tree, i) for tree, i in frontier if tree.nodes[i].reward is not None]
        found = verify(model, tokenizer, whole, executor, turn, config, seconds, bar)
        groups = [add_group(tokenizer, tree, i, program, verdict.feedback, room) for tree, i, program, verdict in found]
        below = [(tree, i) for tree, i, _, _ in found]
        grown = sample_and_run(model, tokenizer, below, groups, executor, 1, config.sampling, stop, verdicts, seconds, bar)
        frontier = [(tree, add_node(tree, node, turn + 1, reward_of(node.verdict, binary))) for (tree, _), [node] in zip(below, grown)]
    return trees


# ---------------------------------------------------------------- returns

def turn_returns(chain):
    """Returns (list of float) of the turns of a chain of nodes: program, verification, program, ..."""
    rewards = [node.reward for node in chain]
    outcome = rewards[(len(chain) - 1) // 2 * 2]  # of the last program
    gain = [rewards[t] - rewards[t - 2] if t >= 2 and t % 2 == 0 else 0.0 for t in range(len(chain))]
    return [reward + more + outcome for reward, more in zip(rewards, gain)]


def assign(tree):
    """Fill credit (the return) and advantage (z-score within a turn over the chains) of the nodes of whole chains."""
    chains = [chain for chain in chains_of(tree) if all(node.reward is not None for node in chain)]
    for chain in chains:
        for node, value in zip(chain, turn_returns(chain)):
            node.credit = value
    for turn in range(max(map(len, chains), default=0)):
        nodes = [chain[turn] for chain in chains if len(chain) > turn]
        for node, advantage in zip(nodes, credit.local_advantages([n.credit for n in nodes], [-1] * len(nodes))):
            node.advantage = advantage


# ---------------------------------------------------------------- the step

def more_metrics(trees, device):
    """Over all processes: prompts with a right program; verifications with any test; share of right tests."""
    checks = [n for tree in trees for n in tree.nodes if n.turn % 2 == 0 and n.reward is not None]
    solved = [any(n.reward == 1 for n in tree.nodes if n.turn % 2) for tree in trees]
    sums = torch.tensor([sum(solved), len(trees), sum(bool(n.code) for n in checks), sum(n.reward for n in checks), len(checks)],
                        dtype=torch.float64, device=device)
    prompts_solved, prompts, tested, right, count = all_reduce(sums).tolist()
    share = lambda part: part / count if count else None
    return {"solved_prompts": prompts_solved / prompts, "verifications_with_tests": share(tested), "tests_right": share(right)}


def step(model, reference, tokenizer, problems, executor, optimizer, config, seed, bar=None):
    """One step of ReVeal; arguments and results as murphy.murphy_step."""
    torch.manual_seed(seed)
    seconds, start = {}, time.perf_counter()
    with unsharded(model), autocast(model):
        trees = grow_chains(model, tokenizer, problems, executor, config, seconds, bar)
    for tree in trees:
        assign(tree)
    grown = time.perf_counter()
    metrics = optimise(model, reference, trees, optimizer, config)
    seconds |= {"rollout": grown - start, "optimisation": time.perf_counter() - grown}
    return trees, tree_metrics(trees, config, seconds) | metrics | more_metrics(trees, device_of(model))
