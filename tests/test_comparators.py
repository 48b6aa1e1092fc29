"""The comparators on examples worked out by hand, and whole runs of each."""
import json
import math
from dataclasses import replace

import pytest
import torch

from common import StubVerdict, random_model
from comparators import rlef
from murphy import MurphyConfig, packed_logprobs
from problems import Problem
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
