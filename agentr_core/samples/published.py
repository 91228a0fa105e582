"""Reading files of the published code: Agent-R's search trees (`search_results_12.json`) and
revision records (`textcraft_centric.jsonl`), and ETO's episode logs (`12.json`).

Source: the code that reads them, `path_collection.py` and `mcts_utils` of Agent-R and
`construct_preference.py` of ETO.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentr_core.errors import DataFileError

Node = Mapping[str, Any]
Record = dict[str, Any]
_READ_NODE_FIELDS = ("children", "state", "llm_response", "obs", "visits", "value", "is_terminal")
"""The fields of a node that are read; `state` only of the root."""


def with_instance_index(record: Record, name: str) -> Record:
    """Return a tree or log with the index of its instance, which is only in `name`, the file's name
    without suffix; any other record as it is.
    """
    if is_tree(record):
        return {**record, "task_num": name.rpartition("_")[2]}
    return {**record, "id": name} if _is_log(record) and "id" not in record else record


def is_tree(record: Node) -> bool:
    """Return whether an object is a node of one of Agent-R's trees."""
    return {"children", "state", "llm_response", "visits"} <= record.keys()


def _is_log(record: Node) -> bool:
    meta = record.get("meta")
    return isinstance(meta, dict) and "reward" in meta and isinstance(record.get("conversations"), list)


def as_conversation(record: Record, where: str) -> Record:
    """Convert a record of these files to one with turns: the best path of a tree, the spliced turns
    of a revision record, a log with its reward. Turns that carry no loss in the file carry none.
    Any other record is returned as it is.

    Raises `DataFileError` for a malformed tree, one without a path that ended, and the expert
    demonstrations that come with some environments, which are not read.
    """
    if reason := _unreadable_reason(record):
        raise DataFileError(f"{where} has {reason}")
    if is_tree(record):
        (best, reward), _ = _best_and_worst(record, where)
        return {"id": record.get("task_num"), "messages": _turns(record, best), "reward": reward}
    if "revise_log" in record:
        return {"id": record.get("task_num"), "messages": _with_explicit_loss(record["revise_log"])}
    return {**record, "reward": record["meta"]["reward"]} if _is_log(record) else record


def _unreadable_reason(record: Node) -> str:
    """Return, as the end of an error message, what a record of an environment's expert
    demonstrations contains and why it is not read; empty for any other record.
    """
    if any(isinstance(task, dict) and "goldActionSequences" in task for task in record.values()):
        return "ScienceWorld's gold paths, which the world's own expert plays; leave eto.expert.file empty"
    plan = record.get("plan")
    if isinstance(plan, dict) and "high_pddl" in plan:
        return (
            "a plan for ALFRED's robot; the world's own expert plays the walkthrough of the game beside it, so leave "
            "eto.expert.file empty"
        )
    if {"states", "actions", "action_idxs"} <= record.keys():
        return (
            "a shopper of WebShop, whose goal has no number and whose products are named by their titles; write it as "
            "a conversation with the id of its instance"
        )
    return ""


def as_pair(record: Record, where: str) -> Record:
    """Convert a record of these files to a preference pair: the best and the worst path of a tree,
    or the good and the bad path of which a revision record was made. Any other record is returned
    as it is.

    Raises `DataFileError` for a malformed tree, one without a path that ended, and one whose ended
    paths all have the same value.
    """
    if is_tree(record):
        (best, best_reward), (worst, worst_reward) = _best_and_worst(record, where)
        if best_reward == worst_reward:
            raise DataFileError(f"{where}: no two ended paths of the tree differ in value; leave the file out")
        rewards = {"chosen_reward": best_reward, "rejected_reward": worst_reward}
        return {
            "id": record.get("task_num"),
            **_split_at_difference(_turns(record, best), _turns(record, worst)),
            **rewards,
        }
    logs = [record.get(name) for name in ("high_log", "low_log")]
    if "revise_log" in record and isinstance(logs[0], list) and isinstance(logs[1], list):
        return {
            "id": record.get("task_num"),
            **_split_at_difference(_with_explicit_loss(logs[0]), _with_explicit_loss(logs[1])),
        }
    return record


def unread_fields(record: Node, *, pairs: bool) -> frozenset[str] | None:
    """Return the names of the fields of a record of these files that have a value and are not read;
    None for any other record.
    """
    if is_tree(record):
        return frozenset(f"nodes.{name}" for node, _ in _nodes(record, "") for name in node if _is_unread(node, name))
    if "revise_log" in record:
        used_fields = ("task_num", *(("high_log", "low_log") if pairs else ("revise_log",)))
        return frozenset(
            name for name, value in record.items() if name not in used_fields and value not in (None, "", [])
        )
    if _is_log(record):
        return frozenset(f"meta.{name}" for name, value in record["meta"].items() if name != "reward" and value)
    return None


def _is_unread(node: Node, name: str) -> bool:
    return name not in (*_READ_NODE_FIELDS, "task_num") and bool(node[name])


def _nodes(root: Node, where: str) -> Iterator[tuple[Node, tuple[Node, ...]]]:
    """Yield the nodes of a tree, depth first, each with the path to it: the nodes from a child of
    the root to the node itself; empty for the root. Raises `DataFileError` for a malformed node.
    """
    stack: list[tuple[Any, tuple[Node, ...]]] = [(root, ())]
    while stack:
        node, path = stack.pop()
        if not isinstance(node, dict) or not isinstance(node.get("children"), list):
            raise DataFileError(f"{where}: a node of the tree has no list of children; leave the file out")
        yield node, path
        stack += [(child, (*path, child)) for child in reversed(node["children"])]


ScoredPath = tuple[tuple[Node, ...], float]
"""A path and its value in [0, 1]."""


def _best_and_worst(root: Node, where: str) -> tuple[ScoredPath, ScoredPath]:
    """Return the ended path of the highest mean value and that of the lowest; of several, the first
    one depth first. Raises `DataFileError` if no path ended or a node is malformed.
    """
    ended_paths = [
        (path, _value(node, where))
        for node, path in _nodes(root, where)
        if path and node.get("is_terminal") and not node["children"]
    ]
    if not ended_paths:
        raise DataFileError(f"{where}: no path of the tree ended; leave the file out")
    # Rewards of ScienceWorld's server go up to 100, those of the others to 1.
    max_reward = 100 if max(value for _, value in ended_paths) > 1 else 1
    best, worst = max(ended_paths, key=lambda item: item[1]), min(ended_paths, key=lambda item: item[1])
    return (best[0], best[1] / max_reward), (worst[0], worst[1] / max_reward)


def _value(node: Node, where: str) -> float:
    value, visits = node.get("value"), node.get("visits")
    if not isinstance(value, int | float) or not isinstance(visits, int | float):
        raise DataFileError(f"{where}: a node of the tree has no numbers value and visits; leave the file out")
    return value / visits if visits else 0.0


def _turns(root: Node, path: Sequence[Node]) -> list[Any]:
    turns = _with_explicit_loss(root["state"]) if isinstance(root["state"], list) else []
    for node in path:
        turns.append({"role": "assistant", "content": node.get("llm_response"), "loss": True})
        turns.append({"role": "user", "content": node.get("obs")})
    return turns


def _with_explicit_loss(turns: Any) -> Any:
    """Return turns with `loss` False in each reply that has no such flag; anything but a list as it
    is.
    """
    if not isinstance(turns, list):
        return turns
    return [
        {**turn, "loss": turn.get("loss") or False}
        if isinstance(turn, dict) and turn.get("role") == "assistant"
        else turn
        for turn in turns
    ]


def _split_at_difference(chosen: list[Any], rejected: list[Any]) -> Record:
    """Return a record with the turns that both sides begin with as `prompt`, and the rest of each
    side as `chosen` and `rejected`, without a user turn at the end.
    """
    prompt_length = 0
    while prompt_length < min(len(chosen), len(rejected)) and chosen[prompt_length] == rejected[prompt_length]:
        prompt_length += 1
    return {
        "prompt": chosen[:prompt_length],
        "chosen": _without_last_user_turn(chosen[prompt_length:]),
        "rejected": _without_last_user_turn(rejected[prompt_length:]),
    }


def _without_last_user_turn(turns: list[Any]) -> list[Any]:
    last = turns[-1] if turns else None
    return turns[:-1] if isinstance(last, dict) and last.get("role") == "user" else turns
