"""Agent-R in one file: a language agent finds its own mistakes and learns to turn back from them.

    python data/manual/wheel.py                  # one turn of the wheel
    python data/manual/wheel.py --seed 0 1 2     # three, each from the base model, and their mean

The method is that of "Agent-R: Training Language Model Agents to Reflect via Iterative
Self-Training" (arXiv 2501.11425, "the paper" below), the world TextCraft, the agent a shipped
language model of 3.5 million parameters. Nothing but the world is elsewhere.
2026-11-29, a busy core of an AMD EPYC, nine minutes a seed: +15.3 (+6.5 to +24.2) points on 100
held-out goals, the mean of seeds 0, 1 and 2: +19.0, +18.0 and +9.0.
"""

from __future__ import annotations

import argparse
import logging
import math
import random
import sys
from functools import partial, reduce
from operator import is_
from pathlib import Path
from statistics import fmean, stdev

import torch
import transformers
from torch.nn.utils.rnn import pad_sequence

from agentr_core.environments.crafting.textcraft import TextCraft

# The world knows where the shipped data is, in a checkout and in an installed package.
MODEL = Path(TextCraft.files_of({})[0]).parents[1] / "models" / "textcraft-tiny"
ROWS = 256  # replies that are written side by side
DIVES, WIDTH, DEPTH, EXPLORATION = 2, 4, 10, 0.25  # in the paper 8, 4, 20, 0.25
ALPHA, BETA = 0.5, 0.2  # in its second and third turn, alpha is 0.7 and 1
EPOCHS, BATCH, RATE = 4, 8, 1e-3

Chat = list[dict[str, str]]
Pair = tuple[list["Node"], list["Node"]]  # a good path and a bad one of the same tree
Record = tuple[Chat, int]  # a conversation, and the first step whose reply is trained


class Node:
    """A moment of an episode: the step that led here, and the world after it."""

    def __init__(self, world: TextCraft, observation: str, path: list[Node] | None = None) -> None:
        self.world, self.observation, self.state = world, observation, world.snapshot()
        self.path = [*(path or []), self]  # path[t] is the node after step t
        self.reply, self.action, self.reward, self.over = "", "", 0.0, False
        self.children: list[Node] = []
        self.visits, self.total = 0, 0.0

    def step(self, reply: str, limit: float = math.inf) -> Node:
        """Return where a reply leads. The goal, a loop or step `limit` ends an episode."""
        self.world.restore(self.state)
        action = self.world.parse(reply)
        observation, reward, terminated, *_ = self.world.step(action)
        node = Node(self.world, observation, self.path)
        node.reply, node.action, node.reward = reply, action, reward
        loop = [(other.reply, other.state) for other in node.path].count((reply, node.state)) == 3
        node.over = terminated or loop or len(self.path) >= limit
        return node

    def chat(self) -> Chat:
        """Return the conversation so far; turn 2t + 1 is the reply of step t."""
        texts = [self.world.instruction, "Ok.", self.path[0].observation]
        for node in self.path[1:]:
            texts += [node.reply, node.observation]
        return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]

    def uct(self) -> float:
        """Return W/N + c sqrt(ln N(parent) / N), equation 2 of the paper; infinite if unvisited."""
        if not self.visits:
            return math.inf
        return self.total / self.visits + EXPLORATION * math.sqrt(math.log(self.path[-2].visits) / self.visits)


class Policy:
    """The shipped language model, whose weights `finetune` changes."""

    def __init__(self) -> None:
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL, padding_side="left")
        self.model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
        self.tokens = partial(self.tokenizer.apply_chat_template, return_dict=False)

    @torch.inference_mode()
    def answer(self, chats: list[Chat], limit: int, n: int = 1, *, greedy: bool = False) -> list[list[str]]:
        """Return n replies of at most `limit` tokens to each conversation, sampled or greedy."""
        prompts = [self.tokens(chat, add_generation_prompt=True) for chat in chats]
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        answers = [[""]] * len(prompts)
        for part in (order[at : at + ROWS // n] for at in range(0, len(order), ROWS // n)):
            batch = self.tokenizer.pad({"input_ids": [prompts[i] for i in part]}, return_tensors="pt")
            mask, cache = batch["attention_mask"], transformers.DynamicCache(config=self.model.config)
            place = (mask.cumsum(-1) - 1).clamp(min=0)
            logits = self.model(batch["input_ids"], mask, place, cache, logits_to_keep=1).logits
            cache.batch_repeat_interleave(n)  # a prompt is read once for all its replies
            logits, mask, place = (each.repeat_interleave(n, 0) for each in (logits, mask, place[:, -1:]))
            end, rows = self.tokenizer.eos_token_id, torch.arange(len(mask))
            written = torch.full((len(rows), limit), end)
            for column in range(limit):
                token = logits[:, -1].argmax(-1, True) if greedy else logits[:, -1].softmax(-1).multinomial(1)
                written[rows, column] = token[:, 0]
                going = (token[:, 0] != end).nonzero()[:, 0]
                if not len(going):
                    break
                cache.batch_select_indices(going)  # what has ended takes no more time
                rows, token, mask, place = (each[going] for each in (rows, token, mask, place))
                mask, place = torch.cat([mask, torch.ones_like(token)], 1), place + 1
                logits = self.model(token, mask, place, cache).logits
            texts = self.tokenizer.batch_decode(written, skip_special_tokens=True)
            for row, i in enumerate(part):
                answers[i] = texts[row * n : row * n + n]
        return answers


def search(policy: Policy, roots: list[Node], rng: random.Random) -> list[list[Node]]:
    """1. Search: grow a tree below each root, side by side; return the ends of each one's episodes.

    A dive begins at the root and expands one node below another until its branch is over. Nothing
    is simulated beyond the tree, and only ends are counted. Source: the paper, section 3.1.
    """
    ends: dict[Node, list[Node]] = {root: [] for root in roots}
    for _ in range(DIVES):
        fringe = roots
        while fringe := [below for node in fringe if (below := select(node, rng))]:
            answers = policy.answer([node.chat() for node in fringe], 48, WIDTH)
            for node, replies in zip(fringe, answers, strict=True):
                node.children = [node.step(reply, DEPTH) for reply in dict.fromkeys(replies)]
                for end in [child for child in node.children if child.over]:
                    ends[node.path[0]].append(end)
                    for above in end.path:
                        above.visits, above.total = above.visits + 1, above.total + end.reward
                for above in reversed(node.path):
                    above.over = all(child.over for child in above.children)
    return list(ends.values())


def select(node: Node, rng: random.Random) -> Node | None:
    """Return the node to expand, by the highest UCT from a node down; None if all there is over."""
    while node.children and not node.over:
        candidates = [child for child in node.children if not child.over]
        node = max(rng.sample(candidates, len(candidates)), key=Node.uct)
    return None if node.over else node


VERIFIER = """\
You check the work of an agent. Below are its task, what it has done so far, and its next action with what came of it.
Judge the next action only. Give your reason in a line, then your word in a line of its own:
Judgement: Good, if the action clearly helps towards the goal
Judgement: Bad, if it clearly harms, fails, or does not belong to the task
Judgement: Uncertain, if neither is clear"""


def first_errors(policy: Policy, pairs: list[Pair]) -> dict[int, int]:
    """2. Verdict: return the first step of each bad path that the policy itself calls bad, if there
    is one, by the number of the pair. Source: the paper, section 3.2.

    Steps that the good path shares are not asked about. Thoughts are not shown: deeds are judged.
    """
    asked = [(i, t) for i, (good, bad) in enumerate(pairs) for t in range(sum(map(is_, good, bad)), len(bad))]
    chats: list[Chat] = []
    for i, t in asked:
        start, *nodes = pairs[i][1][: t + 1]
        *log, step = [f"Action: {node.action}\nObservation: {node.observation}" for node in nodes]
        so_far = "\n".join(log) or "Nothing yet."
        text = f"{VERIFIER}\n\nTask:\n{start.observation}\n\nSo far:\n{so_far}\n\nNext:\n{step}"
        chats.append([{"role": "user", "content": text}])
    answers = policy.answer(chats, 120, greedy=True)
    return dict(reversed([each for each, (reply,) in zip(asked, answers, strict=True) if "Judgement: Bad" in reply]))


REFLECTIONS = "That was a mistake; let me choose another way.", "I see the error now and will fix it."


def splice(good: list[Node], bad: list[Node], error: int, rng: random.Random) -> Record | None:
    """3. Splice: return the bad path up to its first wrong step, a turn of reflection, and the good
    path from where it leaves what is kept. Source: the paper, section 3.2.

    The paper joins texts. Here the world plays the good steps after the bad ones, without detours,
    so that what the agent reads is true; None stands for a splice that no longer ends well.
    """
    rest = good[min(sum(map(is_, good, bad)), error + 1) :]
    start = bad[error].step(f"Thought: {rng.choice(REFLECTIONS)}\nAction: wait")
    end = play(start, [node.reply for node in rest])
    return (end.chat()[:-1], error + 1) if end.reward >= ALPHA else None


def play(start: Node, replies: list[str]) -> Node:
    """Return where replies lead, without those that make no difference: they would be learned."""
    end: partial[Node] = partial(reduce, lambda node, reply: node if node.reward else node.step(reply))
    for i in reversed(range(len(replies))):
        fewer = replies[:i] + replies[i + 1 :]
        replies = fewer if end(fewer, start).reward >= end(replies, start).reward else replies
    return end(replies, start)


def finetune(records: list[Record], rng: random.Random) -> Policy:
    """4. Fine-tuning: return the base model after training on records. The loss is the mean -log p
    of the tokens of trained replies. Source: the paper, section 3.3, without its general data.
    """
    policy = Policy()
    rows = sorted((encode(policy, record) for record in records), key=lambda row: len(row[0]))
    batches = [rows[at : at + BATCH] for at in range(0, len(rows), BATCH)] * EPOCHS
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=RATE, weight_decay=0.0)
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, len(batches) // 33, len(batches))
    for batch in rng.sample(batches, len(batches)):
        # Padding comes last, where a causal model does not see it.
        ids, labels = (pad_sequence(list(side), True, -100) for side in zip(*batch, strict=True))
        policy.model(ids.clamp(min=0), labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return policy


def encode(policy: Policy, record: Record) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the token ids of a record, and its labels: the same in trained replies, else -100."""
    chat, first = record
    ids = torch.tensor(policy.tokens(chat))
    labels = torch.full_like(ids, -100)
    for i in range(2 * first + 1, len(chat), 2):
        reply = slice(len(policy.tokens(chat[:i], add_generation_prompt=True)), len(policy.tokens(chat[: i + 1])))
        labels[reply] = ids[reply]
    return ids, labels


def evaluate(policy: Policy, roots: list[Node]) -> list[float]:
    """5. Evaluation: return the rewards of greedy episodes. Source: the paper, section 4."""
    nodes = list(roots)
    while playing := [i for i, node in enumerate(nodes) if not node.over]:
        answers = policy.answer([nodes[i].chat() for i in playing], 72, greedy=True)
        for i, (reply,) in zip(playing, answers, strict=True):
            nodes[i] = nodes[i].step(reply, 20)
    return [node.reward for node in nodes]


def gain(before: list[float], after: list[float]) -> str:
    """Return the mean gain with its 95 % interval, in percent, paired: each goal against itself."""
    gains = [100 * (new - old) for old, new in zip(before, after, strict=True)]
    half = 1.96 * stdev(gains) / math.sqrt(len(gains))
    return f"{fmean(gains):+.1f} ({fmean(gains) - half:+.1f} to {fmean(gains) + half:+.1f})"


def turn(base: Policy, world: TextCraft, instances: int, seed: int) -> Policy:
    """Return what one turn makes of the base model. In the paper, two more begin where it ends."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    pool = world.instances("renamed")  # the training goals, with other names for their items
    roots = [Node(world, world.reset(pool[rng.randrange(len(pool))])) for _ in range(instances)]
    trees = search(base, roots, rng)
    pairs, records = list[Pair](), list[Record]()
    for ends in trees:
        # Equations 3 to 5, with beta as a gap, which is what the paper's text says.
        good = sorted((end for end in ends if end.reward >= ALPHA), key=lambda end: len(end.path))[:2]
        bad = [end for end in ends if good and good[0].reward - end.reward > BETA]
        pairs += [(good[0].path, end.path) for end in rng.sample(bad, min(6, len(bad)))]
        records += [(play(end.path[0], [node.reply for node in end.path[1:]]).chat()[:-1], 1) for end in good]
    logging.info("search: %d episodes in %d trees; %d good paths", sum(map(len, trees)), instances, len(records))
    errors = first_errors(base, pairs)
    revisions = [record for i, t in errors.items() if (record := splice(*pairs[i], t, rng))]
    logging.info("verdict: a wrong step in %d of %d bad paths; splices: %d", len(errors), len(pairs), len(revisions))
    return finetune([*records, *revisions], rng)


def main() -> None:
    """Print what a turn gains, by seed. Without usage, a wrong argument is answered in one line."""
    parser = argparse.ArgumentParser(prog="wheel.py", usage=argparse.SUPPRESS, description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, nargs="+", default=[0], help="one or more")
    parser.add_argument("--instances", type=int, default=50, help="training goals that are searched (50)")
    parser.add_argument("--test", type=int, default=100, help="held-out goals (100)")
    parser.add_argument("--out", type=Path, help="folder in which to put the fine-tuned models")
    args = parser.parse_args()
    if args.instances < 1 or not 2 <= args.test <= 100:
        parser.error("--instances takes a number from 1 on, --test one from 2 to 100")
    _ = args.out and args.out.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s  %(message)s", datefmt="%H:%M:%S", stream=sys.stdout)
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)  # of so small a model, two wait for each other
    world, base = TextCraft(), Policy()
    test = [Node(world, world.reset(i)) for i in random.Random(0).sample(world.instances("test"), args.test)]
    before = evaluate(base, test)
    logging.info("base: %.1f %% of %d held-out goals", 100 * fmean(before), args.test)
    scores = []
    for seed in args.seed:
        policy = turn(base, world, args.instances, seed)
        scores.append(evaluate(policy, test))
        logging.info("seed %d: %.1f %%, %s", seed, 100 * fmean(scores[-1]), gain(before, scores[-1]))
        if args.out:
            policy.model.save_pretrained(args.out / f"seed-{seed}")
            policy.tokenizer.save_pretrained(args.out / f"seed-{seed}")
    logging.info("mean: %s", gain(before, [fmean(each) for each in zip(*scores, strict=True)]))


if __name__ == "__main__":
    try:
        main()
    except (KeyboardInterrupt, OSError) as fault:
        sys.exit(f"wheel.py: {str(fault) or 'interrupted'}")
