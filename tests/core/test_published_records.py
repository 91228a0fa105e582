"""The records of the published code of Agent-R, by a miniature of its rules, and ours with its
settings: all equal.

The miniature reads nodes and judgements and nothing else of ours. Source: the description of the
method's record building (leaves, pairs, first-error critique, splice), written down here afresh.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from toy import Line, Policy, generation, instance

from agentr_core.fingerprint import derive_seed, fingerprint
from agentr_core.methods.agent_r.critique import critique_of, judge_paths, scans_of
from agentr_core.methods.agent_r.pairs import good_paths, pairs_of_tree
from agentr_core.methods.agent_r.splice import REFLECTIONS, path_provenance, splice
from agentr_core.methods.faults import load
from agentr_core.recipes.agent_r import CritiqueConfig, PairsConfig, SearchConfig, SpliceConfig
from agentr_core.search.grow import grow
from agentr_core.search.tree import leaf_paths
from agentr_core.stages.dataset import whole_samples
from agentr_core.types import Critique, Generation, Message, Node, Rejection, Request, Sample, Tree

Turn = tuple[str, str, bool]
JUDGED = (
    "It helps.\nJudgement: Good",
    "Who knows.\nJudgement: uncertain",
    "It harms.\nJudgement: Bad",
    "I cannot tell.",
    "All is good so far, but this",
    "Judgement: Good, or rather: Judgement: none",
    "Judgement: not good",
    "judgement: bad. It is no good move.",
)
REFLECTION: Turn = ("assistant", "Thought: one of ten\nAction: wait", True)


def judgement(tree: Tree, node: int) -> str:
    """What the judge says of a step: mostly good, so that errors come late, too."""
    return JUDGED[max(0, int(fingerprint(tree.seed, node), 16) % 24 - 16)]


class PublishedCode:
    """The published way from a tree to its records."""

    def __init__(self, tree: Tree, env: Line, *, alpha: float, beta: float) -> None:
        self.tree, self.alpha, self.beta = tree, alpha, beta
        self.opening: list[Turn] = [
            ("user", env.instruction, False),
            ("assistant", "Ok.", False),
            ("user", tree.first_observation, False),
        ]

    def leaves(self, under: int = 0) -> list[Node]:
        """Depth first, as the authors walk their trees."""
        children = [node for node in self.tree.nodes if node.parent == under and node.index != under]
        if children:
            return [leaf for child in children for leaf in self.leaves(child.index)]
        return [self.tree.nodes[under]] if self.tree.nodes[under].terminal else []

    def way(self, leaf: Node) -> list[Node]:
        nodes = [leaf]
        while nodes[0].parent > 0:
            nodes.insert(0, self.tree.nodes[nodes[0].parent])
        return nodes

    def pairs(self) -> list[tuple[Node, Node]]:
        if self.tree.nodes[0].value_sum <= 0:
            return []
        leaves = sorted(self.leaves(), key=lambda node: node.value, reverse=True)
        pairs = [(high, low) for high in leaves for low in leaves if high.value - low.value > self.beta + 1e-9]
        # Not the generator of the module, from which another thread may draw between two lines.
        random.Random(123).shuffle(pairs)
        return [(high, low) for high, low in pairs if self.good(high)]

    def good(self, leaf: Node) -> bool:
        return leaf.value > self.alpha or leaf.value == 1

    def kept(self, low: list[Node], judged: bool) -> list[Node]:
        nodes = []
        for node in low:
            nodes.append(node)
            verdict = judgement(self.tree, node.index).split("Judgement:")[-1].lower()
            if judged and "good" not in verdict and "uncertain" not in verdict:
                break
        return nodes

    def record(self, high: Node, low: Node, judged: bool) -> list[Turn]:
        good, bad = self.way(high), self.kept(self.way(low), judged)
        same = 0
        while same < min(len(good), len(bad)) and self.reply(good[same]) == self.reply(bad[same]):
            same += 1
        turns = [*self.opening, *self.turns(bad, train=False), REFLECTION, ("user", "ok.", False)]
        return [*turns, *self.turns(good[same:], train=True)][:-1]

    def whole(self, leaf: Node) -> list[Turn]:
        return [*self.opening, *self.turns(self.way(leaf), train=True)][:-1]

    def reply(self, node: Node) -> str:
        assert node.step is not None
        return node.step.reply

    def turns(self, nodes: Sequence[Node], *, train: bool) -> list[Turn]:
        turns: list[Turn] = []
        for node in nodes:
            assert node.step is not None
            turns += [("assistant", node.step.reply, train), ("user", node.step.observation, False)]
        return turns


SPLICE = {"no_error": "keep", "reflections": 10, "impossible": "keep", "shared_cut": "keep"}
CRITIQUE = CritiqueConfig(temperature=1.0, scan_from="root", unparsable="published")


async def critic(tree: Tree, pairs: Sequence[object]) -> Callable[..., Critique]:
    node_of = {derive_seed(7, "critique", tree.instance.key, node.index): node.index for node in tree.nodes}

    async def ask(request: Request) -> list[Generation]:
        return [generation(judgement(tree, node_of[request.seed]))]

    scans = scans_of(pairs, CRITIQUE)  # type: ignore[arg-type]
    verdicts = await judge_paths(scans, ask, CRITIQUE, seed=7, count_tokens=lambda _: 1, context_length=9999)
    return lambda pair: critique_of(pair, verdicts, CRITIQUE)


async def trees() -> list[Tree]:
    config = SearchConfig(dives=6, width=4, depth=5)
    moves = ("right", "right", "left", "look", "stop", "jump")
    return [await grow(instance(index % 5), Line(), Policy(moves), config, seed=index) for index in range(12)]


def plain_turns(sample: object) -> list[Turn]:
    assert isinstance(sample, Sample), sample
    return [_plain(message) for message in sample.messages]


def _plain(message: Message) -> Turn:
    thought, _, action = message.text.partition("\nAction: ")
    if thought.removeprefix("Thought: ") in REFLECTIONS[:10] and action == "wait":
        return REFLECTION if message.train else ("assistant", "an untrained reflection", False)
    return message.role, message.text, message.train


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["blind", "direct"])
@pytest.mark.parametrize("alpha", [0.5, 0.7, 1.0])
async def test_the_published_settings_give_the_published_records_in_number_and_order(mode: str, alpha: float) -> None:
    """At 269e248 more than half of them were missing: cut in the shared steps, or after the end of
    an episode. At 29f26ac those cut in the shared steps left out the steps up to the split, and
    pairs with good paths of equal reward were in another order.
    """
    pairs_config = PairsConfig(alpha=(alpha,), beta=0.2, alpha_rule="more_than", order="published")
    config = SpliceConfig(mode=mode, **SPLICE)  # type: ignore[arg-type]
    env, total, num_impossible, num_shared = Line(), 0, 0, 0
    for number, tree in enumerate(await trees()):
        tree_id = f"t{number}"
        reference = PublishedCode(tree, env, alpha=alpha, beta=0.2)
        expected = [reference.record(high, low, mode == "blind") for high, low in reference.pairs()]
        pairs, _ = pairs_of_tree(tree_id, leaf_paths(tree, tree_id), pairs_config, alpha=alpha, seed=3)
        critique = await critic(tree, pairs)
        samples = [splice(pair, critique(pair), env, config, alpha=alpha, seed=5) for pair in pairs]
        assert [plain_turns(sample) for sample in samples] == expected
        total += len(samples)
        strict = SpliceConfig(mode=mode, no_error="keep")  # type: ignore[arg-type]
        outcomes = [splice(pair, critique(pair), env, strict, alpha=alpha, seed=5) for pair in pairs]
        reasons = [rejection.reason for rejection in outcomes if isinstance(rejection, Rejection)]
        num_shared += reasons.count("cut-in-shared-prefix")
        num_impossible += len(reasons) - reasons.count("cut-in-shared-prefix")
    assert total > 400
    assert num_impossible > total / 10, "what only splice.impossible=keep keeps"
    assert (num_shared > total / 10) == (mode == "blind"), "what only splice.shared_cut=keep keeps"


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [0.5, 0.7, 1.0])
async def test_the_good_paths_are_those_of_the_published_code(alpha: float) -> None:
    env = Line()
    for number, tree in enumerate(await trees()):
        reference = PublishedCode(tree, env, alpha=alpha, beta=0.2)
        expected = [reference.whole(leaf) for leaf in reference.leaves() if reference.good(leaf)]
        paths = good_paths(leaf_paths(tree, f"t{number}"), alpha, "more_than")
        samples = [
            sample
            for path in paths
            for sample in whole_samples(
                env, "", path.trajectory, "stretches", stage="splice", provenance=path_provenance(path)
            )
        ]
        assert sorted(map(plain_turns, samples)) == sorted(expected)


@pytest.mark.parametrize("name", ["webshop-agent-r", "textcraft-agent-r", "sciworld-agent-r", "agent-r-three-worlds"])
def test_the_recipes_as_published_have_these_settings(name: str) -> None:
    file = Path(__file__).parents[2] / "deployments" / "recipes" / f"{name}.yaml"
    recipe = load(file, [])
    assert (recipe.splice, recipe.data.duplicates) == (SpliceConfig(mode="blind", **SPLICE), "keep")  # type: ignore[arg-type]
    assert replace(recipe.critique, max_new_tokens=CRITIQUE.max_new_tokens) == CRITIQUE
    assert recipe.pairs == PairsConfig(beta=0.2, alpha_rule="more_than", order="published")
    assert {world.environment.action.labels for world in recipe.worlds().values()} == {"published"}
    header = " ".join(line.removeprefix("# ") for line in file.read_text().splitlines() if line.startswith("#"))
    assert "ow replies are read" in header or "Replies are read as in the authors' searches" in header
    assert "qual records are all trained on" in header
