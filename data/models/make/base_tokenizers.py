"""The tokenizers of base models.

Of TextCraft: words are the things of a crafting world, an item is one token, whatever its name.
Lossless for ordinary text: what is not in the vocabulary falls back to bytes. Only the ids in
observations (`minecraft:oak_logs`) are read as the names they stand for (`minecraft: oak logs`), so
that both are one word.

Of the world `reasoning`: tags and digits are tokens of their own, and an invented name has the same
tokens wherever it occurs. Words and syllables come from byte-pair encoding, trained on what the
model will read. A space belongs to the lower-case word next to it, never to a name, so that copying
a name means copying its tokens.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

PAD, END = "<|pad|>", "<|end|>"
ROLES = ("system", "user", "assistant")
SPECIALS = (PAD, END, *(f"<|{role}|>" for role in ROLES))
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

# Keywords, numbers and punctuation cut a text; what lies between two cuts is one token if the
# vocabulary has it.
_CRAFTING_CUTS = (
    r"\n+(?:Thought:|Action:|Observation:|Judgement:|Goal: craft|craft)?",
    r"; lacking(?: nothing\.)?",
    r",? ?\b\d+\b",
    r" ?\b(?:craft|using|get|takes|needs|inventory|Got|Crafted|Good|Bad|Uncertain|minecraft:)(?!\w)",
    r" ?(?:Could not find(?: enough items to craft| a valid recipe for)?|Could not execute|Wrong item format)",
    r"(?:Thought|Action|Observation|Judgement|Reason|Inventory|Goal):",
    r"[,.;:()\[\]=']",
)
_MOST_WORDS = 4000
"""The most phrases that become tokens, the most frequent first."""
_QUESTION_CUTS = (
    r"\n*</?(?:think|search|python|result|answer)>",
    r"\\boxed\{",
    r"\d",
    r"[A-Z][a-z]*",
    r" ?[a-z]+ ?",
    r"\n *",
)


def build_tokenizer(texts: Iterable[str], *, wholes: Sequence[str] = ()) -> Any:
    """Return a fast tokenizer whose vocabulary is bytes, special tokens and the phrases of the
    given texts.

    Args:
        texts: what the model will read and write; every phrase in them becomes one token.
        wholes: texts that recur word for word in every conversation, such as instructions: one
            token each.
    """
    normalizer = normalizers.Sequence(
        [normalizers.Replace(a, b) for a, b in (("minecraft:", "minecraft: "), ("_", " "), ("[", "[ "))]
    )
    literals = [re.escape(normalizer.normalize_str(text)).replace(r"\ ", " ") for text in wholes]
    pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("|".join([*literals, *_CRAFTING_CUTS])), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    counts = Counter(
        phrase
        for text in [*wholes, *texts]
        for phrase, _ in pre_tokenizer.pre_tokenize_str(normalizer.normalize_str(text))
        if len(phrase) > 1
    )
    words = sorted(counts, key=lambda word: (-counts[word], word))[:_MOST_WORDS]
    entries = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *words]
    tokenizer = Tokenizer(
        models.BPE(vocab={entry: index for index, entry in enumerate(entries)}, merges=[], ignore_merges=True)
    )
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer
    return finished(tokenizer)


def build_question_tokenizer(texts: Iterable[str], *, whole: str, vocabulary: int) -> Any:
    """Return a fast tokenizer trained on texts.

    Args:
        whole: a text that begins every conversation, such as the instruction: one token.
        vocabulary: how many tokens there are besides that one.
    """
    literal = re.escape(whole).replace(r"\ ", " ")
    cuts = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("|".join([literal, *_QUESTION_CUTS])), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = cuts
    learner.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=list(SPECIALS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    learned = json.loads(learner.to_str())["model"]
    ((entry, _),) = cuts.pre_tokenize_str(whole)
    tokenizer = Tokenizer(
        models.BPE(
            vocab={**learned["vocab"], entry: len(learned["vocab"])},
            merges=[tuple(pair) for pair in learned["merges"]],
            ignore_merges=True,
        )
    )
    tokenizer.pre_tokenizer = cuts
    return finished(tokenizer)


def finished(tokenizer: Tokenizer) -> Any:
    """Return a byte-level tokenizer as a fast tokenizer of Transformers, with special tokens and
    the chat template.
    """
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END)
    fast.chat_template = CHAT_TEMPLATE
    return fast
