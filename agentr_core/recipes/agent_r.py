"""The sections of a recipe that say how Agent-R searches, criticises and pairs.

Defaults are the numbers of the Agent-R paper (arXiv 2501.11425, sections 4 and A) unless a field
says otherwise.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from agentr_core.fingerprint import later_field
from agentr_core.recipes.fields import AlphaRule, Count, Natural, SamplingFields, Temperature, TopP, Unit, record

Learning = Literal["clone", "sft", "rl"]
"""What an iteration does: supervised training on the expert's episodes; search, critique, splicing
and supervised training on the samples they made; or group RL."""


@record
class AgentRConfig:
    """Agent-R, and the group RL that may follow it."""

    phases: tuple[Learning, ...] = ("sft",)
    """What each iteration does; the last entry counts for all later iterations. A `clone` iteration
    (not in the paper) plays the expert on the training instances and searches nothing: a model that
    never wins has no good path to learn from. An `rl` iteration (not in the paper) goes on from the
    policy so far; section `grpo` says how it trains."""
    quote_chars: Count = later_field(4000)
    """The most characters of a turn, or of a judge's reply to it, that a report quotes; it says how
    many it leaves out."""


@record
class SearchConfig(SamplingFields):
    """The tree search. Source: Agent-R section 3.1 and its appendix."""

    method: Literal["mcts", "rollouts"] = "mcts"
    """`rollouts` collects the same number of independent episodes instead: `dives * width` for each
    instance.
    """
    dives: Count = 8
    give_up: Natural = later_field(0)
    """A tree gets no further dives after this many if none of them was rewarded; 0: it gets all.
    Only for `mcts`. Most of a search is spent on instances that the policy cannot win yet."""
    expert_start: bool = later_field(False)
    """Instead of giving a tree up, let its next `give_up` dives begin after the first half of the
    expert's steps, further ones after half of the rest, and so on until one is rewarded (not in the
    paper; reverse curriculum, arXiv 2402.05808). Paths through these steps count as good or bad
    like any other."""
    width: Count = 4
    depth: Count = 20
    exploration: Annotated[float, Field(ge=0)] = 0.25
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    max_new_tokens: Count = 500
    merge: Literal["reply", "action"] = "reply"
    """Which siblings count as equal: those with the same reply (as published) or with the same
    parsed action.
    """

    def faults(self) -> list[str]:
        """Return what is wrong with the section `search` of a recipe, one sentence each."""
        faults = []
        if self.temperature == 0 and self.width > 1:
            faults.append(
                "search.temperature: at 0 all replies at a node are the same; raise it, or set search.width=1"
            )
        if self.method != "mcts":
            faults += [
                f"search.{name}: independent episodes do not use it; leave it out, or set search.method=mcts"
                for name in ("give_up", "expert_start", "exploration", "merge")
                if getattr(self, name) != getattr(SearchConfig(), name)
            ]
        elif self.expert_start and self.dives == 1:
            faults.append("search.expert_start: a tree of one dive has no later one; raise search.dives")
        elif self.expert_start and not 0 < self.give_up < self.dives:
            faults.append(
                "search.expert_start: only dives after the first search.give_up begin after the expert's steps; "
                f"set search.give_up to a number from 1 to {self.dives - 1}"
            )
        return faults


@record
class CritiqueConfig(SamplingFields):
    """The first-error critique by the judge (`models.judge`, otherwise the acting model). Source:
    Agent-R section 3.2.
    """

    temperature: Temperature = 0.0
    votes: Count = 1
    """Judgements drawn for each step, at a temperature above 0; the majority counts, ties are
    uncertain."""
    scan_from: Literal["split", "root"] = "split"
    max_new_tokens: Count = 500
    unparsable: Literal["bad", "skip", "published"] = "skip"
    """What a judgement that cannot be parsed means for the scan: an error or nothing. `published`:
    none is unparsable, since verdicts are read as in the authors' code: whatever follows the last
    `Judgement:`, or the whole reply without it, is bad unless it has "good" or "uncertain" in it.
    """

    def faults(self) -> list[str]:
        """Return what is wrong with the section `critique` of a recipe, one sentence each."""
        if self.votes > 1 and self.temperature == 0:
            return ["critique.votes: at temperature 0 all votes are the same; raise critique.temperature"]
        return []


@record
class PairsConfig:
    """The pairs of paths that become revision samples. Source: Agent-R section 3.2, equations 3 to
    5.
    """

    alpha: tuple[Unit, ...] = (0.5, 0.7, 1.0)
    """Lowest reward of a good path in each iteration; the last value counts for all later
    iterations.
    """
    alpha_rule: AlphaRule = later_field("at_least")
    """`more_than` (as published): the reward lies above alpha; the full reward, 1, clears even an
    alpha of 1.
    """
    beta: Unit = 0.2
    beta_rule: Literal["gap", "absolute"] = "gap"
    """`gap`: good reward - bad reward > beta. `absolute`: bad reward < beta < good reward."""
    per_tree: Natural = 0
    """The most pairs kept from one tree; 0 means no cap (as published)."""
    per_bad_leaf: Natural = 0
    """The most pairs kept for one bad path; 0 means no cap (as published)."""
    order: Literal["turns", "shuffled", "published"] = later_field("turns")
    """Which pairs of a tree come first, and so are kept under a cap. `turns`: bad paths take turns,
    each with the shortest good path that it has not yet been paired with. `published`: by falling
    reward of the good path, then of the bad one, equal ones depth first; then all pairs with enough
    of a gap are shuffled by Python's `random` with seed 123, anew for each tree, and only then is
    alpha asked. `shuffled`: the same of pairs whose good path clears alpha, equal ones in the order
    in which the search ended them."""


# The section of a recipe that says how a bad prefix and a good suffix become one conversation.


@record
class ContinuationConfig(SamplingFields):
    """How a model goes on from a turn of revision in splice mode `continued`, or from before the
    first error in mode `rollback`."""

    by: Literal["actor", "teacher"] = later_field("actor")
    """Who goes on: the model that collects, or `models.teacher` (SCoRe, arXiv 2509.14257). A
    teacher that goes on does not collect: the errors are those of the actor."""
    samples: Count = 4
    """Tries for each pair."""
    temperature: Temperature = 1.0
    max_steps: Count = 20
    max_new_tokens: Count = 512
    per_pair: Natural = 1
    """The most successful tries of a pair that are kept, shortest first; 0 means all."""


@record
class SpliceConfig:
    """How a bad prefix and a good suffix become one conversation."""

    mode: Literal["verified", "blind", "direct", "continued", "rollback"] = "blind"
    """`blind`: as published. `direct`: the whole bad path is kept, no judge. `verified`: the splice
    is played in the environment and kept only if its live reward still clears alpha; observations
    are the live ones. `continued`: after the turn of revision the acting model itself goes on, and
    continuations that clear alpha are kept. `rollback` (LEAFE, arXiv 2603.16843): it goes on from
    before the first error and is told of that error and of the judge's reason, and what clears
    alpha is trained as if it had not been told; there is no turn of revision."""
    action: Annotated[str, Field(min_length=1, pattern=r"^[^\n]*$")] = "wait"
    """The action of the turn of revision: a dummy (as published), or one that shows where the agent
    stands, such as `inventory` in TextCraft. It is played in the modes `verified` and `continued`.
    """
    reflections: Annotated[int, Field(ge=1, le=20)] = 20
    """How many of the 20 sentences the one in the turn of revision is drawn from. A model that
    decodes greedily turns back only where a single sentence is likelier than going on, so with many
    sentences it turns back less."""
    no_error: Literal["keep", "reject"] = "keep"
    """What to do when the judge finds no bad step: keep the whole bad path (as published) or reject
    the pair, as mode `rollback` always does.
    """
    impossible: Literal["reject", "keep"] = later_field("reject")
    """What becomes of a splice that cannot have happened: the steps it keeps end the episode,
    perhaps in a disaster. `keep` (as published) works with the modes that play nothing, `blind` and
    `direct`."""
    shared_cut: Literal["reject", "keep"] = later_field("reject")
    """What becomes of a pair whose first bad step is one that both paths share, which happens only
    with `critique.scan_from: root`. The steps it keeps are those of the good path, so nothing was
    wrong there. `keep` (as published): the good path goes on after that step, with the turn of
    revision in its midst."""
    prune: bool = False
    """Leave out the steps of good paths and good suffixes that the live reward does not need; needs
    mode `verified`.
    """
    continuation: ContinuationConfig = ContinuationConfig()

    @property
    def goes_on(self) -> bool:
        """Whether a model goes on from bad paths."""
        return self.mode in ("continued", "rollback")

    def faults(self) -> list[str]:
        """Return what is wrong with the section `splice` of a recipe, one sentence each."""
        faults = []
        if self.prune and self.mode != "verified":
            faults.append(f"splice.prune: works only in splice.mode verified, not {self.mode}")
        if self.impossible == "keep" and self.mode not in ("blind", "direct"):
            faults.append(
                f"splice.impossible: mode {self.mode} plays its splices, which only possible ones allow; leave it out, "
                "or set splice.mode to blind or direct"
            )
        if not self.goes_on and self.continuation != ContinuationConfig():
            faults.append(
                f"splice.continuation: belongs to splice.mode continued or rollback, not {self.mode}; leave it out"
            )
        if self.mode == "rollback":
            defaults = SpliceConfig()
            faults += [
                f"splice.{name}: mode rollback has no turn of revision; leave it out"
                for name in ("action", "reflections")
                if getattr(self, name) != getattr(defaults, name)
            ]
        if self.continuation.samples > 1 and self.continuation.temperature == 0:
            faults.append("splice.continuation: more than one sample at temperature 0 would repeat the same one")
        return faults
