"""ET-Agent's measures of an evaluation, by name: rows of table metric in addition to those of
`stages.measures`.

performance, efficiency, tool_productivity, successful_execution,
successful_execution_as_published, reasoning_length, redundant_calls
                            see `behaviour.Behaviour`
performance_gain_over_base, efficiency_gain_over_base
                            their gains over the base model, paired by question
f1                          word F1 on knowledge questions, by rule
judged                      the reward on mathematics questions: by rule, then by the judge
exact_match                 the share of answers that are a gold one, word for word or in value
conciseness, nudged_right   on the test set, if the recipe asks for them
source-s/...                any of these, for one source of questions
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from agentr_core.answers import readable
from agentr_core.environments.reasoning.grammar import Answers
from agentr_core.environments.reasoning.problems import Problem
from agentr_core.environments.reasoning.reading import prediction_of
from agentr_core.environments.reasoning.scoring import exact_match
from agentr_core.environments.reasoning.world import ReasoningWorld
from agentr_core.evaluation.metrics import Estimate, clustered_share
from agentr_core.methods.et_agent.behaviour import Attempt, attempt_of, behaviour, gains
from agentr_core.methods.et_agent.conciseness import is_concise, read_vote
from agentr_core.recipes.evaluation import TEST
from agentr_core.runtime.place import Workplace
from agentr_core.stages.evaluate import evaluation_id
from agentr_core.stages.lost_episodes import ended_episodes
from agentr_core.store.codec.calls import load_answers
from agentr_core.store.codec.trajectories import Episode, load_episodes
from agentr_core.types import Answer, Trajectory

NUDGED = "nudged"
"""The name of the evaluation whose episodes go on after wrong answers."""
CONCISENESS = "conciseness"
"""The purpose of votes, as in table `answer`."""
OF_SOURCE = "source-"
"""Begins the names of metrics of one source of questions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """An episode, and the question that it answers; None in a world that has no questions."""

    attempt: Attempt
    trajectory: Trajectory
    problem: Problem | None
    answers: Answers = "plain"


def measures(place: Workplace, iteration: int, name: str, episodes: Sequence[Episode]) -> dict[str, Estimate]:
    """Return the measures of the episodes of an evaluation, and of those of each source."""
    asked = Asked.of(place, iteration, [one.trajectory_id for one in episodes]) if name == TEST else Asked()
    answered = [
        replace(
            one,
            attempt=replace(
                one.attempt,
                concise=asked.concise(episode.trajectory_id),
                nudged_right=asked.nudged_right(episode),
                origin=episode.origin,
            ),
        )
        for one, episode in zip(answers_of(place, [e.trajectory for e in episodes]), episodes, strict=True)
    ]
    found = _measured(answered)
    if iteration and (base := ended_episodes(place, evaluation_id(place, 0, name))):
        before = answers_of(place, [one.trajectory for one in base])
        gained = gains([one.attempt for one in answered], [one.attempt for one in before])
        found |= {name: estimate for name, estimate in gained.items() if estimate.n}
    for source in sorted({one.attempt.source for one in answered}):
        own = _measured([one for one in answered if one.attempt.source == source])
        found |= {f"{OF_SOURCE}{source}/{name}": estimate for name, estimate in own.items()}
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Answers to the side questions of an evaluation: votes by trajectory, and whether a nudge made
    an answer right, by instance and repeat.
    """

    votes: Mapping[str, Mapping[int, Answer]] = field(default_factory=dict)
    nudged: Mapping[tuple[str, int], bool] = field(default_factory=dict)

    @classmethod
    def of(cls, place: Workplace, iteration: int, trajectory_ids: Sequence[str]) -> Asked:
        """Return the stored answers on the given trajectories of an evaluation."""
        played = load_episodes(place.store, evaluation_id(place, iteration, NUDGED))
        return cls(
            votes=load_answers(place.store, CONCISENESS, trajectory_ids),
            nudged={(one.instance.key, one.repeat): one.trajectory.success for one in played},
        )

    def concise(self, trajectory_id: str) -> bool | None:
        """Return whether the votes find an episode concise; None without votes that can be read."""
        said = self.votes.get(trajectory_id)
        return is_concise([read_vote(readable(vote) or "") for vote in said.values()]) if said else None

    def nudged_right(self, episode: Episode) -> bool | None:
        """Return whether a wrong answer became right; None if the policy was not told to think
        on.
        """
        return self.nudged.get((episode.instance.key, episode.repeat))


def answers_of(place: Workplace, trajectories: Sequence[Trajectory]) -> list[Answered]:
    """Return episodes with the questions that they answer; an episode without a question has its
    world as source.
    """
    curriculum = place.recipe.et_agent.curriculum
    found = []
    with place.worlds() as worlds:
        for trajectory in trajectories:
            env = worlds.of(trajectory.instance)
            problem = env.problem(trajectory.instance) if isinstance(env, ReasoningWorld) else None
            source = trajectory.instance.environment if problem is None else problem.source
            attempt = attempt_of(trajectory, source=source, counts=curriculum.counts, refused=curriculum.refused_calls)
            answers = env.answers if isinstance(env, ReasoningWorld) else "plain"
            found.append(Answered(attempt=attempt, trajectory=trajectory, problem=problem, answers=answers))
    return found


def _measured(answered: Sequence[Answered]) -> dict[str, Estimate]:
    of_behaviour = behaviour([one.attempt for one in answered])
    found = {one.name: getattr(of_behaviour, one.name) for one in fields(of_behaviour)} | _scores(answered)
    return {name: estimate for name, estimate in found.items() if estimate.n}


def _scores(answered: Sequence[Answered]) -> dict[str, Estimate]:
    """Return the scores of answers that disregard cost."""
    known = [(one.trajectory, one.problem, one.answers) for one in answered if one.problem is not None]
    keys = [trajectory.instance.key for trajectory, *_ in known]
    math = [(t.instance.key, t.reward) for t, problem, _ in known if problem.domain == "math"]
    words = [
        (t.instance.key, problem.correctness(prediction_of(t, answers), answers))
        for t, problem, answers in known
        if problem.domain == "knowledge"
    ]
    return {
        "f1": clustered_share([value for _, value in words], [key for key, _ in words]),
        "judged": clustered_share([value for _, value in math], [key for key, _ in math]),
        "exact_match": clustered_share([float(_exact(*one)) for one in known], keys),
    }


def _exact(trajectory: Trajectory, problem: Problem, answers: Answers) -> bool:
    said = prediction_of(trajectory, answers)
    if problem.domain == "math" or problem.options:
        return problem.correctness(said, answers) == 1
    return exact_match(said, problem.golds, answers)
