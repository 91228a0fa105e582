"""The world keeps the contract: `python -m unittest` in this folder, or pytest."""

import unittest

from combination_lock import CombinationLock

from agentr_core.environments.contract import check


class TestCombinationLock(unittest.TestCase):
    def test_it_keeps_the_contract(self) -> None:
        """As `agentr env doctor` checks it: splits, repeated episodes, rewards, and the expert."""
        violations = check(CombinationLock)
        assert not violations, violations

    def test_an_action_that_makes_no_sense_is_answered(self) -> None:
        world = CombinationLock()
        world.reset(world.instances("train")[0])
        transition = world.step("open")
        assert (transition.reward, transition.terminated) == (0.0, False)


if __name__ == "__main__":
    unittest.main()
