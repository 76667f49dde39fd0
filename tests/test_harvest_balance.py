"""Which solved problems become pairs: reward first, then the cap on one structure's share."""

from __future__ import annotations

from collections import Counter

import pytest

from aflow_tune.harvest.balance import Solved, choose


def solved(table: dict[str, dict[str, float]]) -> list[Solved]:
    """From problem to structure to reward."""
    return [
        Solved(problem, structure, f"graph {structure}", reward)
        for problem, of_problem in table.items()
        for structure, reward in of_problem.items()
    ]


def kept(pairs: tuple[Solved, ...]) -> dict[str, str]:
    return {item.problem: item.structure for item in pairs}


def test_without_a_cap_the_highest_reward_of_each_problem_wins() -> None:
    chosen = choose(
        solved({"p": {"A": 9.0, "B": 3.0}, "q": {"A": 8.0, "B": 8.5}, "r": {"A": 1.0}}), seed=0
    )
    assert kept(chosen.pairs) == {"p": "A", "q": "B", "r": "A"}
    assert (chosen.dropped, chosen.share) == (0, None)


def test_a_crowded_structure_hands_over_the_problems_that_lose_least() -> None:
    # A wins all four; at most half may be A's. B costs 0.5, 4.0, 0.1 and 3.0 of reward.
    table = {
        "p": {"A": 9.0, "B": 8.5},
        "q": {"A": 9.0, "B": 5.0},
        "r": {"A": 9.0, "B": 8.9},
        "s": {"A": 9.0, "B": 6.0},
    }
    chosen = choose(solved(table), per_structure=0.5, seed=0)
    assert kept(chosen.pairs) == {"p": "B", "q": "A", "r": "B", "s": "A"}
    assert (chosen.dropped, chosen.share) == (0, 0.5)


def test_what_nobody_can_take_over_is_dropped_lowest_reward_first() -> None:
    # Only A solves p to s; B solves t and u. Of A two may stay beside two of B.
    table = {name: {"A": reward} for name, reward in zip("pqrs", (4.0, 7.0, 6.0, 5.0), strict=True)}
    chosen = choose(solved({**table, "t": {"B": 1.0}, "u": {"B": 1.0}}), per_structure=0.5, seed=0)
    assert kept(chosen.pairs) == {"q": "A", "r": "A", "t": "B", "u": "B"}
    assert chosen.dropped == 2


def test_a_cap_that_so_few_structures_cannot_keep_becomes_equal_shares() -> None:
    one = choose(solved({name: {"A": 1.0} for name in "pqr"}), per_structure=0.25, seed=0)
    assert len(one.pairs) == 3
    assert (one.dropped, one.share) == (0, 1.0)
    two = {"p": {"A": 2.0}, "q": {"A": 1.0}, "r": {"B": 1.0}}
    both = choose(solved(two), per_structure=0.25, seed=0)
    assert kept(both.pairs) == {"p": "A", "r": "B"}
    assert (both.dropped, both.share) == (1, 0.5)


@pytest.mark.parametrize("share", [0.3, 0.4, 0.5, 0.75])
def test_no_structure_exceeds_its_share(share: float) -> None:
    # Structure number s solves problem p where p is divisible by s; lower numbers pay more.
    table = {
        f"p{number}": {str(s): 10.0 - s for s in (1, 2, 3, 5) if number % s == 0}
        for number in range(1, 61)
    }
    chosen = choose(solved(table), per_structure=share, seed=0)
    counts = Counter(item.structure for item in chosen.pairs)
    assert len(chosen.pairs) + chosen.dropped == 60
    assert max(counts.values()) <= share * len(chosen.pairs)
    assert all(table[item.problem][item.structure] == item.reward for item in chosen.pairs)


def test_several_pairs_of_a_problem_have_different_structures() -> None:
    found = [
        Solved("p", "A", "one", 5.0),
        Solved("p", "A", "two", 4.0),
        Solved("p", "B", "three", 3.0),
        Solved("p", "C", "four", 2.0),
    ]
    chosen = choose(found, per_problem=2, seed=0)
    assert [item.text for item in chosen.pairs] == ["one", "three"]


def test_the_seed_decides_between_equals_and_nothing_else() -> None:
    table = {f"p{number}": {"A": 1.0, "B": 1.0} for number in range(40)}
    first = choose(solved(table), seed=1).pairs
    assert set(first) == set(choose(list(reversed(solved(table))), seed=1).pairs)
    assert {item.structure for item in first} == {"A", "B"}
    assert first != choose(solved(table), seed=2).pairs


def test_nothing_solved_is_nothing_kept() -> None:
    assert choose([], per_structure=0.5, seed=0).pairs == ()
