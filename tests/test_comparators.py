"""The comparators on examples worked out by hand, and whole runs of each."""
import json
import math
from dataclasses import replace

import pytest
import torch

from common import StubVerdict, random_model
from comparators import mucode, reveal, rlef
from eval import main as evaluate
from executor import Executor
from murphy import MurphyConfig, packed_logprobs
from problems import Problem, Test
from rollout import Group, Node, Tree
from train import main, settings_of
from test_train import SMALL, lines, weights, without_times

CONFIG = MurphyConfig(method="rlef", beta=0.1, max_new_tokens=8, learning_rate=1e-2)
HIDDEN_PASSES, HIDDEN_FAILS = StubVerdict([False, True], public=[True, False]), StubVerdict([True, False], public=[True, False])


def node(parent, turn, group, ids, verdict, code="x", reward=0.5):
    return Node(parent, turn, group, ids, "", code, False, verdict, reward)


# ---------------------------------------------------------------- equal numbers of programs

@pytest.mark.parametrize("method, group, turns, width", [
    ("murphy", 8, 2, 8), ("grpo", 8, 2, 72), ("grpo-mt", 8, 2, 36), ("rlef", 4, 3, 28), ("grpo", 3, 1, 3)])
def test_match_compute_samples_as_many_programs_as_a_whole_tree(method, group, turns, width):
    config = MurphyConfig(method=method, group_size=group, turns=turns, match_compute=True)
    assert config.width == width and replace(config, match_compute=False).width == group
    assert settings_of(["--method", "grpo", "--match-compute"])[1].width == 72


# ---------------------------------------------------------------- RLEF

def test_the_outcome_is_that_of_the_private_tests():
    assert [rlef.outcome(v) for v in (HIDDEN_PASSES, HIDDEN_FAILS, StubVerdict([True, True]), StubVerdict([True, False]))] == [1, -1, 1, -1]


def test_returns_of_a_chain_by_hand():
    chain = [node(-1, 1, 0, [5], HIDDEN_FAILS, code=""), node(0, 2, 1, [5], HIDDEN_FAILS), node(1, 3, 2, [5], HIDDEN_PASSES)]
    # turn 3: 1 - 0.1 * 2; turn 2: that - 0.1 * 1; turn 1: that - 0.2 for no code - 0.1 * -3
    assert rlef.turn_returns(chain, [-3.0, 1.0, 2.0], beta=0.1) == pytest.approx([0.8, 0.7, 0.8])
    assert rlef.turn_returns(chain[:2], [0.0, 0.0], beta=0.1) == pytest.approx([-1.2, -1.0])


def make_trees():
    """One problem: a chain of two turns and one of one; and one with a missing verdict."""
    infra = StubVerdict([False, False], infra=True, public=[True, False])
    nodes = [node(-1, 1, 0, [5, 6, 2], HIDDEN_FAILS), node(-1, 1, 0, [7, 2], HIDDEN_PASSES), node(-1, 1, 0, [8, 2], infra, reward=None),
             node(0, 2, 1, [9, 10, 2], HIDDEN_PASSES)]
    return [Tree(Problem("p", ""), nodes, [Group(-1, [3, 4, 11], [0, 1, 2]), Group(0, [3, 12, 13, 14], [3])])]


def test_advantages_are_returns_less_the_value_of_the_prefix():
    model, reference, trees = rlef.add_head(random_model()), random_model(seed=1), make_trees()
    torch.nn.init.normal_(model.value_head.weight)
    rows, owners = rlef.turn_rows(trees, CONFIG, "cpu")
    rlef.assign(trees, rows, owners, model, reference, CONFIG)
    nodes, kl = trees[0].nodes, {}
    for row, group in zip(rows, owners):
        gap = packed_logprobs(model, row, 1.0)[0] - packed_logprobs(reference, row, 1.0)[0]
        kl |= {id(n): d.sum().item() for n, d in zip(group, gap.split([len(n.response_ids) for n in group]))}
    value = lambda prefix: model.value_head(model.model(input_ids=torch.tensor([prefix])).last_hidden_state[0, -1]).item()
    returns = {0: -0.1 * kl[id(nodes[0])] + 1 - 0.1 * kl[id(nodes[3])], 1: 1 - 0.1 * kl[id(nodes[1])], 3: 1 - 0.1 * kl[id(nodes[3])]}
    for i, prefix in ((0, [3, 4, 11]), (1, [3, 4, 11]), (3, [3, 12, 13, 14])):
        assert nodes[i].credit == pytest.approx(returns[i], abs=1e-4)
        assert nodes[i].advantage == pytest.approx(returns[i] - value(prefix), abs=1e-4)
    assert nodes[2].credit is None and nodes[2].advantage is None and len(owners[0]) == 2


def test_the_value_loss_is_clipped_by_hand():
    row = rlef.TurnRow(*[None] * 7, returns=torch.tensor([1.0, 0.0]), old_value=torch.tensor(0.0), turns=4.0)
    # V moved by 0.5, the clipped V by 0.2: errors 0.25 and 0.64 for the return 1, 0.25 and 0.04 for 0
    assert rlef.value_loss(torch.tensor(0.5), row, CONFIG).item() == pytest.approx(0.5 * (0.64 + 0.25) / 4)


def test_the_loss_of_a_row_against_a_loop():
    model, reference, trees = rlef.add_head(random_model()), random_model(seed=1), make_trees()
    rows, owners = rlef.turn_rows(trees, CONFIG, "cpu")
    rlef.assign(trees, rows, owners, model, reference, CONFIG)
    total = sum(map(len, owners))
    for row, nodes in zip(rows, owners):
        row.turns, row.weights = total, 1 / (row.lengths.float() * total)
        loss = rlef.row_loss(model, row, CONFIG)[0].item()
        # on-policy the ratio is 1, so a response's mean token loss is -A; V is 0 at the start
        assert loss == pytest.approx(sum(-n.advantage + rlef.VALUE_WEIGHT * 0.5 * n.credit ** 2 for n in nodes) / total, abs=1e-5)


def test_rlef_trains_resumes_bit_for_bit_and_leaves_plain_checkpoints(tmp_path):
    flags = ["--method", "rlef", "--save-every", "2", "--updates-per-rollout", "2", *SMALL]
    assert main(["--out", str(tmp_path / "whole"), "--steps", "4", *flags]) == 0
    assert main(["--out", str(tmp_path / "half"), "--steps", "2", *flags]) == 0
    assert main(["--resume", str(tmp_path / "half"), "--steps", "4"]) == 0
    assert without_times(lines(tmp_path / "whole" / "metrics.jsonl")) == without_times(lines(tmp_path / "half" / "metrics.jsonl"))
    a, b = weights(tmp_path / "whole", 4), weights(tmp_path / "half", 4)
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a) and not any("value" in k for k in a)
    heads = [torch.load(tmp_path / name / "checkpoints" / "step-000004" / "head.pt") for name in ("whole", "half")]
    assert all(torch.equal(heads[0][k], heads[1][k]) for k in heads[0]) and heads[0]["value_head.weight"].abs().max() > 0
    tree = json.loads((tmp_path / "whole" / "trees.jsonl").read_text().splitlines()[0])
    assert all(math.isfinite(n["advantage"]) and abs(n["credit"]) <= 1.4 for n in tree["nodes"])


def test_rlef_with_adapters_is_refused(capsys):
    assert main(["--method", "rlef", "--lora-rank", "4"]) == 2 and "leave out --lora-rank" in capsys.readouterr().err


# ---------------------------------------------------------------- muCode

def tree_of(rewards, truncated=()):
    nodes = [Node(-1, 1, 0, [5 + i, 2], "", "x", i in truncated, None, r) for i, r in enumerate(rewards)]
    nodes.append(Node(0, 2, 1, [20, 21, 2], "", "x", False, None, 0.5))
    return Tree(Problem("p", ""), nodes, [Group(-1, [3, 4, 11], list(range(len(rewards)))), Group(0, [3, 12, 13, 14], [len(rewards)])])


def test_the_verifier_rates_a_response_by_the_state_at_its_last_token():
    model, tree = mucode.add_head(random_model()), tree_of([0.0, 1.0])
    torch.nn.init.normal_(model.verifier.head.weight)
    ((row, nodes),) = mucode.program_rows(tree, tree.nodes, CONFIG, "cpu")
    assert nodes == tree.nodes
    for logit, n in zip(model.verifier(row).tolist(), nodes):  # each behind the task alone, as lone sequences
        state = model.verifier.body(input_ids=torch.tensor([[3, 4, 11] + n.response_ids])).last_hidden_state[0, -1]
        assert logit == pytest.approx(model.verifier.head(state).item(), abs=1e-4)


def test_verifier_losses_by_hand():
    logits, right = torch.tensor([2.0, -1.0, 0.5]), torch.tensor([True, False, False])
    bce = mucode.verifier_terms(logits, right, "bce").tolist()
    assert bce == pytest.approx([math.log(1 + math.exp(-2)), math.log(1 + math.exp(-1)), math.log(1 + math.exp(0.5))])
    assert mucode.verifier_terms(logits, right, "bt").tolist() == pytest.approx([math.log(1 + math.exp(-3)), math.log(1 + math.exp(-1.5))])
    nodes = tree_of([1.0, 0.0]).nodes
    assert [mucode.count_terms(nodes, kind) for kind in ("bce", "bt")] == [3, 2] and mucode.count_terms(nodes[:1], "bt") == 0


def test_every_history_gets_the_best_program_of_its_problem():
    tree = tree_of([0.0, 1.0, 0.5], truncated=[2])
    for n, credit in zip(tree.nodes, [0.2, 0.6, 0.9, 0.6]):
        n.credit = credit
    first, second = mucode.relabelled([tree], [tree.nodes], "cpu")  # 2 is cut; of 1 and 3 the first
    assert first.input_ids.tolist() == [[3, 4, 11, 6, 2]] and second.input_ids.tolist() == [[3, 12, 13, 14, 6, 2]]
    assert [n.advantage for n in tree.nodes] == [0.0, 1.0, 0.0, 0.0]
    assert mucode.relabelled([tree], [[tree.nodes[2]]], "cpu") == []


@pytest.mark.parametrize("kind", ["bce", "bt"])
def test_a_verifier_learns_and_the_policy_stays_and_then_the_other_way_round(kind):
    model, config = mucode.add_head(random_model()), replace(CONFIG, method="mucode", verifier_loss=kind, max_grad_norm=10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    trees = [tree_of([0.0, 1.0, 0.0]), tree_of([1.0, 1.0, 0.0])]
    rows = [pair for tree in trees for pair in mucode.program_rows(tree, tree.nodes, config, "cpu")]
    names = lambda: {n: p.detach().clone() for n, p in model.named_parameters()}
    before = names()
    losses = [mucode.teach_verifier(model, rows, optimizer, config) for _ in range(20)]
    assert losses[-1] < 0.5 * losses[0] and losses[0] == pytest.approx(math.log(2), abs=1e-5)
    taught = names()
    assert all(torch.equal(before[n], taught[n]) == (not n.startswith("verifier")) for n in before if "q_proj" in n)
    mucode.rate(model, rows)
    labels = mucode.relabelled(trees, [tree.nodes for tree in trees], "cpu")
    likely = lambda: sum(packed_logprobs(model, row, 1.0)[0].sum().item() for row in labels)
    start, metrics = likely(), mucode.imitate(model, labels, optimizer, config)
    assert metrics["loss"] == pytest.approx(-start / sum(len(row.targets) for row in labels), rel=1e-4)  # equal lengths: a plain mean
    assert likely() > start
    assert all(torch.equal(taught[n], p) == n.startswith("verifier") for n, p in names().items() if "q_proj" in n)


def test_mucode_trains_resumes_bit_for_bit_and_its_verifier_serves_eval(tmp_path, capsys):
    flags = ["--method", "mucode", "--save-every", "1", "--verifier-loss", "bt", *SMALL]
    assert main(["--out", str(tmp_path / "whole"), "--steps", "2", *flags]) == 0
    assert main(["--out", str(tmp_path / "half"), "--steps", "1", *flags]) == 0
    assert main(["--resume", str(tmp_path / "half"), "--steps", "2"]) == 0
    assert without_times(lines(tmp_path / "whole" / "metrics.jsonl")) == without_times(lines(tmp_path / "half" / "metrics.jsonl"))
    a, b = weights(tmp_path / "whole", 2), weights(tmp_path / "half", 2)
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a) and not any("verifier" in k for k in a)
    checkpoint, out = str(tmp_path / "whole" / "checkpoints" / "step-000002"), tmp_path / "eval"
    evaluation = ["--model", checkpoint, "--limit", "3", "--iterations", "2", "--max-new-tokens", "24", "--workers", "1"]
    assert evaluate(evaluation + ["--verifier", checkpoint, "--samples", "3", "--out", str(out)]) == 0
    assert "the verifier's best of each turn" in capsys.readouterr().out
    for record in lines(out / "transcripts.jsonl"):
        assert len(record["chains"]) == 1 and 1 <= len(record["chains"][0]) <= 2
    assert evaluate(evaluation + ["--verifier", checkpoint]) == 2 and evaluate(evaluation + ["--verifier", "tiny", "--samples", "2"]) == 2
    assert "give --samples above 1" in (said := capsys.readouterr().err) and "--verifier tiny" in said


def test_mucode_has_no_kl_term(capsys):
    assert settings_of(["--method", "mucode", "--model", "x"])[1].beta == 0
    assert main(["--method", "mucode", "--beta", "0.1"]) == 2 and "leave out --beta" in capsys.readouterr().err


# ---------------------------------------------------------------- ReVeal

SQUARE = Problem("q", "Write f.", [Test("assert", "assert f(3) == 9")], entry_point="f", solution="def f(x):\n    return x * x")


def fenced(code):
    return f"```python\n{code}\n```"


@pytest.mark.parametrize("answer, wanted", [
    ("assert f(1) == 1\nassert f(2) == 4\nassert f(1) == 1", ["assert f(1) == 1", "assert f(2) == 4"]),   # a test counts once
    ("assert True\nassert f(2)\nassert f(2) != 9\nassert 4 == 4\nassert f(2) == f(2)", []),               # and says something
    ("f = lambda x: 7\nassert f(2) == 7", ["assert f(2) == 7"]), ("assert f(", []),                      # nothing but tests is run
    ("\n".join(f"assert f({x}) == {x}" for x in range(9)), [f"assert f({x}) == {x}" for x in range(reveal.MAX_TESTS)]),
    ("def f(x):\n    return x", [])])
def test_written_tests_are_asserts_of_a_value(answer, wanted):
    assert [test.code for test in reveal.written_tests(SQUARE, fenced(answer))] == wanted


def test_without_an_entry_point_what_the_solution_defines_may_be_called():
    problem = replace(SQUARE, entry_point="", solution="def g(x):\n    return x")
    assert [t.code for t in reveal.written_tests(problem, fenced("assert g(1) == 1\nassert f(1) == 1"))] == ["assert g(1) == 1"]


def test_a_program_of_the_tiny_model_stands_for_the_values_it_gives():
    tiny = replace(SQUARE, source="tiny")
    tests = reveal.written_tests(tiny, fenced("def f(x):\n    return x * x if x > 3 else 5"))
    with Executor(1) as executor:
        (verdict,) = executor.run([(SQUARE.solution, tests)])
    assert verdict.passed == [x > 3 for x in reveal.TINY_INPUTS]
    assert "expected 5, got 4" in verdict.feedback()
    assert reveal.written_tests(tiny, fenced("def f(x):\n    return *x + 140")) == []


def test_written_tests_are_run_on_the_solution_and_on_the_program():
    program = node(-1, 1, 0, [5], HIDDEN_FAILS, code="def f(x):\n    return 2 * x")
    answers = [fenced("assert f(2) == 4\nassert f(3) == 9\nassert f(5) == 11"), "I would rather not."]
    checks = [Node(0, 2, 1, [5], text, "", False) for text in answers]
    with Executor(1) as executor:
        judged = reveal.judge([(Tree(SQUARE, [program]), 0)] * 2, checks, executor)
    assert [[v.passed for v in pair] for pair in judged] == [[[True, True, False], [True, False, False]], [[], []]]
    assert checks[0].code.splitlines()[1] == "assert f(3) == 9" and checks[1].code == ""
    assert judged[1][0].reward == 0.0


def chain_of(*rewards):
    return [node(t - 1, t + 1, t, [5 + t, 2], HIDDEN_FAILS, reward=r) for t, r in enumerate(rewards)]


@pytest.mark.parametrize("rewards, wanted", [
    ([0.5], [1.0]),                                       # own reward and outcome
    ([0.5, 1.0], [1.0, 1.5]),                             # verified, no fault found: the outcome is the program's
    ([0.25, 0.5, 1.0], [1.25, 1.5, 2.75]),                # gain 0.75 at turn 3
    ([0.5, 0.0, 0.25, 1.0, 0.75], [1.25, 0.75, 0.75, 1.75, 2.0])])   # gains -0.25 and 0.5
def test_returns_of_turns_by_hand(rewards, wanted):
    assert reveal.turn_returns(chain_of(*rewards)) == pytest.approx(wanted)


def test_right_at_once_is_worth_more_than_failing_first():
    assert reveal.turn_returns(chain_of(1.0, 1.0))[0] > reveal.turn_returns(chain_of(0.0, 1.0, 1.0))[0]


def test_a_turn_is_compared_with_the_same_turn_of_other_chains():
    rewards, parents = [0.0, 1.0, 0.5, 0.5, 1.0, 0.5, 1.0, None], [-1, -1, -1, 0, 1, 2, 3, 5]  # chains 0-3-6, 1-4, 2-5-7
    nodes = [node(p, 1, 0, [5], HIDDEN_FAILS, reward=r) for p, r in zip(parents, rewards)]
    reveal.assign(Tree(SQUARE, nodes))
    assert [n.credit for n in nodes] == [1.0, 2.0, None, 1.5, 2.0, None, 3.0, None]  # the third chain lost its verdict
    assert [nodes[i].advantage for i in (0, 1)] == pytest.approx([-0.5 / (0.5 ** 0.5 + 1e-4), 0.5 / (0.5 ** 0.5 + 1e-4)])
    assert nodes[4].advantage == -nodes[3].advantage > 0 and nodes[6].advantage == 0.0
    assert [nodes[i].advantage for i in (2, 5, 7)] == [None] * 3


def test_reveal_trains_resumes_bit_for_bit_and_alternates(tmp_path):
    flags = ["--method", "reveal", "--turns", "3", "--save-every", "1", "--lora-rank", "4", *SMALL, "--group-size", "3", "--eval-iterations", "1"]
    assert main(["--out", str(tmp_path / "whole"), "--steps", "2", *flags]) == 0
    assert main(["--out", str(tmp_path / "half"), "--steps", "1", *flags]) == 0
    assert main(["--resume", str(tmp_path / "half"), "--steps", "2"]) == 0
    assert without_times(lines(tmp_path / "whole" / "metrics.jsonl")) == without_times(lines(tmp_path / "half" / "metrics.jsonl"))
    a, b = weights(tmp_path / "whole", 2), weights(tmp_path / "half", 2)
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    for tree in lines(tmp_path / "whole" / "trees.jsonl"):
        assert [n["turn"] for n in tree["nodes"]].count(1) == [n["turn"] for n in tree["nodes"]].count(2) == 3
        for n in tree["nodes"]:
            asked = tree["groups"][n["group"]]["prompt"]
            assert (reveal.CHECK in asked) == (n["turn"] % 2 == 0) and len(n["status"]) == (n["code"].count("assert") if n["turn"] % 2 == 0 else 6)
            assert n["turn"] % 2 == 0 or n["turn"] == 1 or "Passed" in asked and tree["nodes"][n["parent"]]["code"].split("\n")[0] != ""
    m = lines(tmp_path / "whole" / "metrics.jsonl")[-1]
    assert m["grad_norm"] > 0 and 0 <= m["tests_right"] <= m["verifications_with_tests"] <= 1


def test_reveal_needs_a_solution(tmp_path, capsys):
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"task_id": "bare", "prompt": "Write f.", "tests": [{"kind": "assert", "code": "assert f(1) == 1"}]}))
    assert main(["--method", "reveal", "--dataset", str(path), "--out", str(tmp_path / "r")]) == 2
    assert "problem bare has no `solution`" in capsys.readouterr().err


# ---------------------------------------------------------------- two processes

@pytest.mark.parametrize("method", ["rlef", "mucode", "reveal"])
def test_comparators_train_on_two_processes(tmp_path, method):
    """train.py itself checks that the processes' weights agree after the step."""
    from test_distributed import ROOT, run
    run(2, *("--method", method, "--out", tmp_path, "--steps", "1", "--prompts-per-step", "2", "--group-size", "4", "--eval-problems", "2",
             "--eval-iterations", "1", "--workers", "1", "--beta", "0"), script=ROOT / "train.py")
    (m,) = lines(tmp_path / "metrics.jsonl")
    assert m["nodes"] >= 8 and m["grad_norm"] > 0  # of both processes: four programs each
    assert (tmp_path / "checkpoints" / "step-000001" / "head.pt").exists() == (method != "reveal")
