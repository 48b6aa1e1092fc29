"""credit.py against hand-computed trees and brute-force oracles. T.. and G.. name public reports of wrong behaviour."""
import doctest
import itertools
import math
import random
import statistics

import pytest

import credit
from credit import chain_advantages, chain_returns, interp, intrap, local_advantages, mars, mers


def random_tree(rng, turns=3, width=4, missing=0.1):
    """Rewards and parents as a rollout grows them: failing nodes of a turn get children, some rewards are missing."""
    rewards, parents, frontier = [], [], [-1]
    for _ in range(turns):
        grown = []
        for parent in frontier:
            for _ in range(rng.randint(1, width)):
                reward = None if rng.random() < missing else rng.choice([0, 0.1, 0.25, 0.35, 0.5, 0.7, 1.0])
                rewards.append(reward)
                parents.append(parent)
                if reward is not None and reward < 1 and rng.random() < 0.7:
                    grown.append(len(rewards) - 1)
        frontier = grown
    return rewards, parents


def kids(parents, i):
    return [c for c, p in enumerate(parents) if p == i]


def oracle_mars(rewards, parents, i):
    """Straight from the words: the best reward in the whole subtree."""
    if rewards[i] is None:
        return None
    below = [oracle_mars(rewards, parents, c) for c in kids(parents, i)]
    return max([rewards[i]] + [b for b in below if b is not None])


def oracle_mers(rewards, parents, i, turns, gamma, turn=1):
    if rewards[i] is None:
        return None
    below = [oracle_mers(rewards, parents, c, turns, gamma, turn + 1) for c in kids(parents, i)]
    below = [b for b in below if b is not None]
    return rewards[i] if not below else (rewards[i] + gamma * sum(below) / len(below)) / (turns - turn + 1)


def depth(parents, i):
    return 1 if parents[i] < 0 else 1 + depth(parents, parents[i])


TREES = [random_tree(random.Random(seed)) for seed in range(200)]


def test_docstrings_run():
    assert doctest.testmod(credit).failed == 0


@pytest.mark.parametrize("gamma", [0.0, 0.5, 0.9, 1.0])
def test_backups_agree_with_the_oracle(gamma):
    for rewards, parents in TREES:
        assert mars(rewards, parents) == [oracle_mars(rewards, parents, i) for i in range(len(parents))]
        wanted = [oracle_mers(rewards, parents, i, 3, gamma, depth(parents, i)) for i in range(len(parents))]
        assert mers(rewards, parents, 3, gamma) == pytest.approx(wanted, abs=1e-12)


def test_local_advantages_agree_with_the_oracle():
    for seed, (rewards, parents) in enumerate(TREES):
        rng = random.Random(seed)
        credits, keep = mars(rewards, parents), [rng.random() < 0.8 for _ in parents]
        got = local_advantages(credits, parents, keep)
        for i in range(len(parents)):
            group = [credits[j] for j in range(len(parents)) if parents[j] == parents[i] and keep[j] and credits[j] is not None]
            if not keep[i] or credits[i] is None or len(set(group)) < 2:
                assert got[i] == 0.0
            else:
                assert got[i] == pytest.approx((credits[i] - statistics.mean(group)) / (statistics.stdev(group) + 1e-4))


def test_intrap_agrees_with_trying_every_subset():
    for seed, (rewards, parents) in enumerate(TREES):
        credits = mars(rewards, parents)
        for budget in (1, 2, 3):
            keep = intrap(credits, parents, budget)
            for parent in set(parents):
                scored = [i for i in kids(parents, parent) if credits[i] is not None]
                kept = [i for i in scored if keep[i]]
                assert len(kept) == min(budget, len(scored))
                best = max((statistics.pvariance([credits[i] for i in s]) for s in
                            itertools.combinations(scored, len(kept)) if s), default=0)
                assert not kept or statistics.pvariance([credits[i] for i in kept]) == pytest.approx(best, abs=1e-12)


def test_interp_keeps_the_widest_later_groups_and_turn_one():
    for rewards, parents in TREES:
        credits = mars(rewards, parents)
        for budget in (1, 2):
            keep = interp(credits, parents, budget)

            def std(parent):
                values = [credits[i] for i in kids(parents, parent) if credits[i] is not None]
                return statistics.stdev(values) if len(values) > 1 else 0.0
            later = sorted({p for p in parents if p >= 0})
            kept = {parents[i] for i in range(len(parents)) if keep[i] and parents[i] >= 0}
            scored = [p for p in later if any(credits[i] is not None for i in kids(parents, p))]
            assert len(kept) == min(budget, len(scored))
            assert all(std(p) + 1e-9 >= std(q) for p in kept for q in scored if q not in kept)
            assert all(keep[i] == (credits[i] is not None) for i in kids(parents, -1))
            for p in kept:  # a group is kept whole
                assert all(keep[i] == (credits[i] is not None) for i in kids(parents, p))


# ---------------------------------------------------------------- wanted properties

def test_mars_never_lowers_a_reward_and_a_leaf_keeps_its_reward():
    for rewards, parents in TREES:
        m, e = mars(rewards, parents), mers(rewards, parents, 3)
        for i, reward in enumerate(rewards):
            if reward is not None:
                assert m[i] >= reward
                if not kids(parents, i):
                    assert m[i] == e[i] == reward


def test_reordering_siblings_changes_nothing():
    for seed, (rewards, parents) in enumerate(TREES[:60]):
        rng, order, frontier = random.Random(seed), [], [-1]
        while frontier:  # walk turn by turn, siblings shuffled
            siblings = [kids(parents, p) for p in frontier]
            for s in siblings:
                rng.shuffle(s)
            frontier = [i for s in siblings for i in s]
            order += frontier
        place = {old: new for new, old in enumerate(order)} | {-1: -1}
        moved = [rewards[i] for i in order], [place[parents[i]] for i in order]
        for rule in (mars, lambda r, p: mers(r, p, 3)):
            wanted = rule(rewards, parents)
            got = rule(*moved)
            assert [got[place[i]] for i in range(len(rewards))] == [None if w is None else pytest.approx(w, abs=1e-12) for w in wanted]


def test_zero_trees_stay_zero():
    parents = [-1, -1, 0, 0, 1, 2]
    assert mars([0.0] * 6, parents) == mers([0.0] * 6, parents, 3) == [0.0] * 6
    assert local_advantages([0.0] * 6, parents) == [0.0] * 6


def test_mers_at_gamma_zero_in_the_last_turn_is_the_reward():
    assert mers([0.5, 0.25], [-1, -1], 1, gamma=0) == [0.5, 0.25]
    assert mers([0.4, 0.6], [-1, 0], 2, gamma=0) == [0.2, 0.6]  # turn 1 of 2: halved


def test_a_worked_example():
    # turn 1: 0.2 and 1.0; the failing one has two corrections, 0.0 and 1.0
    rewards, parents = [0.2, 1.0, 0.0, 1.0], [-1, -1, 0, 0]
    assert mars(rewards, parents) == [1.0, 1.0, 0.0, 1.0]
    assert mers(rewards, parents, 2) == pytest.approx([(0.2 + 0.9 * 0.5) / 2, 1.0, 0.0, 1.0])
    a = local_advantages(mers(rewards, parents, 2), parents)
    spread = statistics.stdev([0.325, 1.0]) + 1e-4
    assert a == pytest.approx([(0.325 - 0.6625) / spread, (1 - 0.6625) / spread, -0.5 / (math.sqrt(0.5) + 1e-4), 0.5 / (math.sqrt(0.5) + 1e-4)])


# ---------------------------------------------------------------- public reports: trees

def test_T01_T03_the_root_is_worth_the_best_below_and_never_less_than_itself():
    assert mars([0.2, 0.0, 1.0], [-1, 0, 0])[0] == 1.0
    assert mars([0.4, 0.0, 0.1], [-1, 0, 0])[0] == 0.4


def test_T02_a_solved_node_without_children_keeps_its_reward():
    assert mars([1.0], [-1]) == mers([1.0], [-1], 2) == [1.0]


def test_T04_permuted_children():
    assert mars([0.2, 1.0, 0.0], [-1, 0, 0])[0] == mars([0.2, 0.0, 1.0], [-1, 0, 0])[0] == 1.0


def test_T05_children_of_different_parents_are_not_compared():
    parents = [-1] * 3 + [0] * 4 + [1] * 4 + [2]
    credits = [0.0, 0.0, 0.0] + [0, 0, 0, 1] + [1, 1, 1, 0] + [1]
    a = local_advantages(credits, parents)
    assert a[3:7] == pytest.approx([-0.25 / 0.5001] * 3 + [0.75 / 0.5001])
    assert a[7:11] == pytest.approx([0.25 / 0.5001] * 3 + [-0.75 / 0.5001])
    assert a[11] == 0.0 and a[:3] == [0.0] * 3


def test_T06_unequal_depth_does_not_move_the_baseline():
    # a sibling solved at turn 1 and one solved at turn 2: both are worth 1, whatever the number of turns
    assert local_advantages(mars([0.5, 1.0, 1.0], [-1, -1, 0]), [-1, -1, 0]) == [0.0, 0.0, 0.0]


def test_T08_a_missing_reward_is_not_zero():
    rewards, parents = [0.2, None, 1.0], [-1, 0, 0]
    assert mars(rewards, parents) == [1.0, None, 1.0]
    assert mers(rewards, parents, 2)[0] == pytest.approx((0.2 + 0.9 * 1.0) / 2)
    assert local_advantages([0.0, None, 1.0], [-1, -1, -1])[1] == 0.0
    assert local_advantages([0.0, None, 1.0], [-1, -1, -1])[2] == pytest.approx(local_advantages([0.0, 1.0], [-1, -1])[1])
    assert intrap([0.0, None, 1.0], [-1] * 3, 2) == [True, False, True]
    assert interp([0.0, None, 1.0], [-1] * 3, 1) == [True, False, True]


def test_T09_stalling_is_not_paid_twice():
    # a chain 0.3 -> 0.9 -> 0.9: MaRS pays every turn the outcome, not the sum of its scores
    assert mars([0.3, 0.9, 0.9], [-1, 0, 1]) == [0.9, 0.9, 0.9]


def test_T10_pruned_nodes_are_no_part_of_the_baseline():
    assert local_advantages([0.0, 1.0, 0.5], [-1] * 3, [True, True, False])[:2] == local_advantages([0.0, 1.0], [-1, -1])


# ---------------------------------------------------------------- public reports: advantages

def test_G08_G09_equal_groups_and_groups_of_one():
    assert local_advantages([1.0] * 4, [-1] * 4) == local_advantages([0.0] * 4, [-1] * 4) == [0.0] * 4
    assert local_advantages([0.7], [-1]) == [0.0]


def test_G10_equal_but_not_dyadic():
    assert local_advantages([0.35] * 8, [-1] * 8) == [0.0] * 8
    nearly = [0.1 + 0.2, 0.3, 0.3, 0.3]  # 5.6e-17 apart
    assert local_advantages(nearly, [-1] * 4) == [0.0] * 4


def test_G11_group_wise_not_batch_wise():
    # two prompts are two trees, each with a group of its own; here as two parents of one tree
    a = local_advantages([0.5, 0.5, 1.0, 0.0, 0.0, 0.0], [-1, -1, 0, 0, 1, 1], eps=0)
    assert a[2:] == pytest.approx([1 / math.sqrt(2), -1 / math.sqrt(2), 0.0, 0.0])  # sample std; +-1 with the population's


# ---------------------------------------------------------------- chains, and bad input

def test_chains_get_their_last_reward_everywhere():
    rewards, parents = [0.2, 1.0, 0.5, 0.7], [-1, -1, 0, 2]
    returns = chain_returns(rewards, parents)
    assert returns == [0.7, 1.0, 0.7, 0.7]
    a = chain_advantages(returns, parents)
    assert a[0] == a[2] == a[3] == pytest.approx(-0.15 / (statistics.stdev([0.7, 1.0]) + 1e-4)) and a[1] == -a[0]
    assert chain_returns([0.2, None], [-1, 0]) == [0.2, None]
    with pytest.raises(ValueError, match="one child"):
        chain_returns([0, 1, 1], [-1, 0, 0])


@pytest.mark.parametrize("rule", [mars, lambda r, p: mers(r, p, 2), local_advantages, chain_returns,
                                  lambda r, p: intrap(r, p, 1), lambda r, p: interp(r, p, 1)])
@pytest.mark.parametrize("rewards, parents, words", [
    ([0.0, 1.0], [-1], "rewards for"), ([float("nan")], [-1], "not a finite"), ([0.0], [0], "stand before"),
    ([0.0, 1.0], [1, -1], "stand before"), ([0.0], [-2], "stand before")])
def test_what_is_no_tree_is_refused(rule, rewards, parents, words):
    with pytest.raises(ValueError, match=words):
        rule(rewards, parents)


def test_a_tree_deeper_than_num_turns_and_a_budget_of_zero_are_refused():
    with pytest.raises(ValueError, match="num_turns"):
        mers([0, 0, 0], [-1, 0, 1], 2)
    for prune in (intrap, interp):
        with pytest.raises(ValueError, match="at least 1"):
            prune([0.0], [-1], 0)


def test_empty_trees():
    assert mars([], []) == mers([], [], 2) == local_advantages([], []) == intrap([], [], 1) == interp([], [], 1) == []
