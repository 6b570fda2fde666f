"""Tasks whose answers stand in the context, in prompts of an exact number of tokens.

The kinds of RULER (Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language Models?", arXiv
2404.06654) are rebuilt from the paper's descriptions, in words of our own, and smaller, so that small models can do
them with the full cache. Beside them stand the retrieval of UUIDs, key-value recall, and questions about made-up
people. Essay text is the language reference that ships with CPython.

A prompt is filler with needles in it. Filler is cut to length, needles never are. Nothing but the kind, the length, the
depth, the seed and the tokenizer decides what a prompt is.
"""

import functools
import itertools
import pydoc_data.topics
import random
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from ckv_compile.errors import InputError

# fmt: off
_ADJECTIVES = (
    "amber", "brave", "calm", "clever", "dusty", "eager", "fancy", "gentle", "happy", "humble", "icy", "jolly",
    "lucky", "mighty", "narrow", "orange", "plain", "quiet", "rapid", "silver", "tiny", "velvet", "wild", "young",
)
_NOUNS = (
    "anchor", "badger", "candle", "drum", "engine", "falcon", "garden", "hammer", "island", "jacket", "kettle",
    "lantern", "mirror", "needle", "otter", "pencil", "rocket", "saddle", "tunnel", "umbrella", "violin", "walnut",
    "yogurt", "zebra",
)
_SEEN = (
    "apple", "bird", "boat", "book", "bottle", "bread", "bridge", "car", "chair", "clock", "cloud", "cup",
    "door", "farm", "fish", "flower", "glass", "hat", "horse", "house", "lamp", "leaf", "moon", "mountain",
    "paper", "ring", "road", "rock", "ship", "shirt", "shoe", "star", "stone", "table", "tower", "train", "tree",
    "window",
)
_JOBS = (
    "baker", "carpenter", "dentist", "farmer", "gardener", "lawyer", "nurse", "painter", "pilot", "plumber",
    "singer", "teacher",
)
_NAMES = (
    "Alice", "Bruno", "Clara", "David", "Elena", "Felix", "Greta", "Henry", "Irene", "Jonas", "Karen", "Louis",
    "Maria", "Nina", "Oscar", "Paula",
)
# fmt: on
_NOISE = (
    " The river is slow.",
    " The hills are far away.",
    " The wind comes from the west.",
    " We walk up and down again.",
    " The evening is long.",
)
_KEYS = 2  # of the tasks in which a needle has a key among others
_RECORDS = 3  # of UUIDs and people
_VALUES = 3  # of one key
_HOPS = 2  # of a chain of variables
_RARE = 1  # other words for each common one
_ZETA = 3.0  # how fast words become rarer by their rank
_LONGEST_SENTENCE = 200  # characters
_MARGIN = 8  # tokens of a reply beside its answers
_MARK = "\N{BLACK SQUARE}"  # stands in for the message when a chat is cut there


def score(answers: tuple[str, ...], reply: str) -> float:
    """The share of answers that a reply contains, in upper or lower case."""
    return sum(answer.lower() in reply.lower() for answer in answers) / len(answers)


OWN_LENGTH = 0
"""Stands for the length of a prompt where all have others."""


class Sample(NamedTuple):
    """What a model reads, in tokens: the same for every method."""

    context: list[int]  # with what the chat template puts before it
    question: list[int]  # with what the template puts behind it, and the beginning of the reply
    answers: tuple[str, ...]  # what the reply is to contain
    reply: int  # tokens to generate at most
    metric: Callable[[tuple[str, ...], str], float] = score  # of answers and reply, from 0 to 1

    def found(self, reply: str) -> bool:
        """Whether the score is full, whatever else a reply goes on to say."""
        return self.metric is score and score(self.answers, reply) == 1.0


class Prompt(NamedTuple):
    """A sample, and what tells it from others."""

    task: str
    length: int  # tokens of context and question, or OWN_LENGTH
    depth: float
    seed: int
    sample: Sample


class _Text(NamedTuple):
    """A task before it is cut to a length."""

    intro: str
    needles: list[str]  # the first one stands at the depth, the others at equal distances behind it, and around
    filler: Iterator[str]  # without an end
    question: str
    reply: str  # how the reply begins
    answers: tuple[str, ...]
    between: str = ""  # what the reply says between two answers


def make(kind: str, tokenizer: Any, length: int, depth: float, seed: int) -> Sample:
    """Make one prompt.

    Args:
        kind: one of `KINDS`.
        tokenizer: a Hugging Face tokenizer; its chat template is used if it has one.
        length: tokens of context and question together, exactly.
        depth: where the needle stands in the context, from 0 (its beginning) to 1 (its end), as near as a sentence
            or record begins. Word counts have no needle, and look the same at every depth.
        seed: of names, numbers and order.

    Raises:
        InputError: for an unknown kind, a depth outside 0..1, or a length that the needles do not fit in.
    """
    if kind not in KINDS:
        raise InputError(f"task {kind!r}: choose one of {', '.join(KINDS)}")
    if not 0.0 <= depth <= 1.0:
        raise InputError(f"depth={depth!r} is where the needle stands, from 0 (the beginning) to 1 (the end)")
    text = KINDS[kind](random.Random(f"{kind} {seed}"))
    head, tail = around_message(tokenizer)
    intro = tokenizer(head + text.intro, add_special_tokens=not head).input_ids
    question = tokens_of(tokenizer, text.question + tail + text.reply)
    needles = [tokens_of(tokenizer, needle) for needle in text.needles]
    room = length - len(intro) - len(question) - sum(map(len, needles))
    if room < 0:
        raise InputError(f"length={length}: a prompt of the task {kind!r} has at least {length - room} tokens")
    pieces: list[list[int]] = []
    missing = room
    while missing:
        pieces.append(tokens_of(tokenizer, next(text.filler))[:missing])
        missing -= len(pieces[-1])
    places = [(depth + i / len(needles)) % 1.0 if i else depth for i in range(len(needles))]
    return Sample(
        context=intro + _inserted(pieces, needles, places),
        question=question,
        answers=text.answers,
        reply=sum(len(tokens_of(tokenizer, f" {answer}")) for answer in text.answers)
        + len(tokens_of(tokenizer, text.between))
        + _MARGIN,
    )


def prompts(
    kinds: Sequence[str],
    tokenizer: Any,
    *,
    lengths: Sequence[int],
    depths: Sequence[float],
    samples: int,
    seed: int = 0,
) -> list[Prompt]:
    """Make the prompts of several kinds.

    Args:
        kinds: of `KINDS`.
        tokenizer: a Hugging Face tokenizer.
        lengths: tokens of the prompts.
        depths: where the needle stands; the samples take them in turn.
        samples: prompts of every kind and length.
        seed: of the first of them; the others follow.

    Raises:
        InputError: for a kind that does not exist, or a length that its needles do not fit in.
    """
    return [
        Prompt(kind, length, depth, seed + i, make(kind, tokenizer, length, depth, seed + i))
        for kind in kinds
        for length in lengths
        for i, depth in zip(range(samples), itertools.cycle(depths))
    ]


def tokens_of(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a part of a prompt."""
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids


def around_message(tokenizer: Any) -> tuple[str, str]:
    """What a chat of one message of the user has before and behind the message; nothing and a line without a chat."""
    if not tokenizer.chat_template:
        return "", "\n"
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": _MARK}], tokenize=False, add_generation_prompt=True
    )
    head, _, tail = chat.partition(_MARK)
    return head, tail


def _inserted(pieces: list[list[int]], needles: list[list[int]], places: list[float]) -> list[int]:
    """Put each needle in front of the piece of filler that begins nearest to its place."""
    starts = [0, *itertools.accumulate(map(len, pieces[:-1]))]  # not behind the last piece, which is cut
    length = sum(map(len, pieces))
    before: dict[int, list[int]] = {}
    for place, needle in sorted(zip(places, needles, strict=True), key=lambda pair: pair[0]):
        nearest = min(range(len(starts)), key=lambda i: abs(starts[i] - place * length))
        before.setdefault(nearest, []).extend(needle)
    return [token for i, piece in enumerate(pieces or [[]]) for token in (*before.get(i, ()), *piece)]


def _words(rng: random.Random) -> Iterator[str]:
    """Made-up words, each of them once."""
    seen = set()
    while True:
        word = "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(3))
        if word not in seen:
            seen.add(word)
            yield word


def _things(rng: random.Random, count: int) -> list[str]:
    """Names of different things, such as "brave otter"."""
    pairs = zip(rng.sample(_ADJECTIVES, count), rng.sample(_NOUNS, count), strict=True)
    return [" ".join(pair) for pair in pairs]


def _number(rng: random.Random) -> str:
    return str(rng.randrange(10**4, 10**5))


@functools.cache
def _sentences() -> list[str]:
    """Those of the language reference, without grammars and tables, in which no needle could stand."""
    text = " ".join("\n".join(pydoc_data.topics.topics.values()).split())
    return [f" {sentence}" for sentence in re.split(r"(?<=[.:;])\s", text) if len(sentence) <= _LONGEST_SENTENCE]


def _essay(rng: random.Random) -> Iterator[str]:
    """Sentences in their order, from any of them on."""
    sentences = _sentences()
    start = rng.randrange(len(sentences))
    return itertools.cycle(sentences[start:] + sentences[:start])


_SECRETS = "Some secret numbers are hidden in this text. Remember them.\n"


def _secret(thing: str, number: str) -> str:
    return f" The secret number of the {thing} is {number}."


def _needle(rng: random.Random, filler: Iterator[str], needles: int = 1) -> _Text:
    things = _things(rng, needles)
    numbers = [_number(rng) for _ in things]
    return _Text(
        intro=_SECRETS,
        needles=[_secret(thing, number) for thing, number in zip(things, numbers, strict=True)],
        filler=filler,
        question=f"\nWhat is the secret number of the {things[0]} in this text?",
        reply=f"The secret number of the {things[0]} is",
        answers=(numbers[0],),
    )


def _needle_in_noise(rng: random.Random) -> _Text:
    return _needle(rng, itertools.cycle(_NOISE))


def _needle_in_essay(rng: random.Random) -> _Text:
    return _needle(rng, _essay(rng))


def _multi_key(rng: random.Random) -> _Text:
    return _needle(rng, _essay(rng), _KEYS)


def _multi_value(rng: random.Random) -> _Text:
    """Several values of one key, in one sentence: a small model does not collect them from a whole text."""
    (thing,) = _things(rng, 1)
    numbers = tuple(_number(rng) for _ in range(_VALUES))
    listed = f"{', '.join(numbers[:-1])} and {numbers[-1]}"
    return _Text(
        intro=_SECRETS,
        needles=[f" The {_VALUES} secret numbers of the {thing} are {listed}."],
        filler=_essay(rng),
        question=f"\nWhat are the {_VALUES} secret numbers of the {thing} in this text?",
        reply=f"The {_VALUES} secret numbers of the {thing} are",
        answers=numbers,
        between="".join(f"\n{i}." for i in range(_VALUES)),
    )


def _multi_query(rng: random.Random) -> _Text:
    things = _things(rng, _KEYS)
    numbers = [_number(rng) for _ in things]
    asked = "".join(f"\n{i}. What is the secret number of the {thing}?" for i, thing in enumerate(things, start=1))
    return _Text(
        intro=_SECRETS,
        needles=[_secret(thing, number) for thing, number in zip(things, numbers, strict=True)],
        filler=_essay(rng),
        question=f"\nAnswer all questions about this text.{asked}",
        reply=f"1. The secret number of the {things[0]} is",
        answers=tuple(numbers),
        between="".join(f".\n2. The secret number of the {thing} is" for thing in things[1:]),
    )


def _variables(rng: random.Random) -> _Text:
    """Variable tracking: a value goes to a variable, and from each on to the next.

    The statements of a chain stand together: a small model does not follow one that is spread over a text.
    """
    names = ["".join(rng.choices("ABCDEFGHKLMNPRSTUVWXYZ", k=3)) for _ in range(_HOPS + 1)]
    value = _number(rng)
    steps = [f" {source} goes to {name}." for source, name in itertools.pairwise(names)]
    return _Text(
        intro="Follow where values go in this text.\n",
        needles=["".join([f" The value {value} goes to {names[0]}.", *steps])],
        filler=itertools.cycle(_NOISE),
        question=f"\nWhere does the value {value} go in this text, and where does it go from there?",
        reply=f"The value {value} goes to",
        answers=tuple(names),
        between="".join(f".{step}" for step in steps),
    )


def _common_words(rng: random.Random) -> _Text:
    """One word comes again and again, the others now and then."""
    common, *others = rng.sample(_SEEN, len(_SEEN))

    def filler() -> Iterator[str]:
        while True:
            block = [common, *(rng.choice(others) for _ in range(_RARE))]
            yield from rng.sample(block, len(block))

    return _counted(common, filler())


def _frequent_words(rng: random.Random) -> _Text:
    """The word of rank i comes i**-3 times as often as the first: a Zeta distribution."""
    words = rng.sample(_SEEN, len(_SEEN))
    weights = [rank**-_ZETA for rank in range(1, len(words) + 1)]

    def filler() -> Iterator[str]:
        while True:
            yield from rng.choices(words, weights)

    return _counted(words[0], filler())


def _counted(most: str, words: Iterator[str]) -> _Text:
    return _Text(
        intro="Count how often I saw each thing.\n",
        needles=[],
        filler=(f" I saw the {word}." for word in words),
        question="\nWhich thing did I see most often?",
        reply="I saw the",
        answers=(most,),
    )


def _records(rng: random.Random, records: Iterator[tuple[str, str]], count: int) -> _Text:
    """Lines of a key and its value, the first one of which is asked: by how the reply begins, and nowhere else."""
    pairs = list(itertools.islice(records, count))
    key, value = pairs[0]
    return _Text(
        intro="Remember the keys and their values in this text.\n",
        needles=[f"\n{key}: {value}\n" for key, value in pairs],
        filler=_essay(rng),
        question="\nSay one of the keys and its value again.",
        reply=f"{key}:",
        answers=(value,),
    )


def _uuid(rng: random.Random) -> _Text:
    ids = (str(uuid.UUID(int=rng.getrandbits(128), version=4)) for _ in itertools.repeat(None))
    return _records(rng, zip(ids, ids, strict=True), _RECORDS)


def _recall(rng: random.Random) -> _Text:
    """Few-shot recall: the records are the examples of what comes behind the key that is asked."""
    words = _words(rng)
    return _records(rng, zip(words, words, strict=True), _KEYS)


def _documents(rng: random.Random) -> _Text:
    """Questions about one of several people who do not exist."""
    towns = (word.capitalize() for word in itertools.islice(_words(rng), _RECORDS))
    people = list(zip(rng.sample(_NAMES, _RECORDS), towns, rng.sample(_JOBS, _RECORDS), strict=True))
    name, town, _ = people[0]
    return _Text(
        intro="Read these documents.",
        needles=[f"\n\n{name} was born in {town}. {name} works as a {job}.\n\n" for name, town, job in people],
        filler=_essay(rng),
        question=f"\n\nIn which town was {name} born?",
        reply=f"{name} was born in",
        answers=(town,),
    )


KINDS: dict[str, Callable[[random.Random], _Text]] = {
    "needle": _needle_in_noise,
    "needle-essay": _needle_in_essay,
    "multi-key": _multi_key,
    "multi-value": _multi_value,
    "multi-query": _multi_query,
    "variables": _variables,
    "common-words": _common_words,
    "frequent-words": _frequent_words,
    "uuid": _uuid,
    "recall": _recall,
    "documents": _documents,
}
"""The kinds of tasks, by name."""
