"""Prompts of RULER and LongBench, read from files of JSON lines that their authors' scripts wrote.

A line of **RULER** (Hsieh et al., 2024, arXiv 2404.06654) is what its `prepare.py` writes:

    {"index": 0, "input": "...", "outputs": ["..."], "length": 4096, "answer_prefix": "..."}

`input` is the whole prompt, whose last line is the question; `answer_prefix`, which older files do not have, is how the
reply begins. The score is the share of `outputs` that the reply contains; in question answering, where these are ways
to say the same, it is 1 for any of them. That is a file whose name, or that of its folder, begins with "qa".

A line of **LongBench** (Bai et al., 2023, arXiv 2308.14508) is:

    {"input": "...", "context": "...", "answers": ["..."], "length": 5000, "dataset": "hotpotqa",
     "all_classes": null, "language": "en", "_id": "..."}

`input` is the question and may be empty; what is asked then follows from `dataset`. The score is the best over
`answers`: F1 of words in question answering, ROUGE-L in summaries, the right class or number, or the likeness of code.
Prompts are in words of our own, so that scores can be compared with each other, and not with published ones.
"""

import difflib
import json
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ckv_compile.errors import InputError
from ckv_compile.evaluation.tasks import OWN_LENGTH, Prompt, Sample, around_message, score, tokens_of

Metric = Callable[[tuple[str, ...], str], float]

_RULER_REPLY = 128  # tokens, of its longest task
_RULER = ("input", "outputs")
_LONGBENCH = ("input", "context", "answers", "dataset")


def any_of(answers: tuple[str, ...], reply: str) -> float:
    """Whether a reply contains one of the answers, in upper or lower case."""
    return float(any(answer.lower() in reply.lower() for answer in answers))


def f1(answers: tuple[str, ...], reply: str) -> float:
    """The best F1 of the words of a reply and of an answer, without case, punctuation and articles (as in SQuAD)."""
    return max(_f1(_words(answer), _words(reply)) for answer in answers)


def rouge_l(answers: tuple[str, ...], reply: str) -> float:
    """The best ROUGE-L of a reply: the F1 by its longest common subsequence of words with an answer (Lin, 2004)."""
    return max(_rouge_l(answer.lower().split(), reply.lower().split()) for answer in answers)


def first_class(answers: tuple[str, ...], reply: str) -> float:
    """Whether the first line of a reply names the class."""
    first = reply.strip().partition("\n")[0].lower()
    return float(any(answer.lower() in first for answer in answers))


def numbers(answers: tuple[str, ...], reply: str) -> float:
    """The share of the numbers in a reply that are the right one."""
    right = {number for answer in answers for number in re.findall(r"\d+", answer)}
    found = re.findall(r"\d+", reply)
    return sum(number in right for number in found) / len(found) if found else 0.0


def code_likeness(answers: tuple[str, ...], reply: str) -> float:
    """How alike the first line of code in a reply is to the answer, from 0 to 1."""
    lines = [
        line for line in reply.strip().splitlines() if line.strip() and not line.lstrip().startswith(("#", "//", "`"))
    ]
    return max(
        difflib.SequenceMatcher(None, answer.strip(), lines[0].strip() if lines else "").ratio() for answer in answers
    )


def _words(text: str) -> list[str]:
    plain = text.lower().translate(str.maketrans("", "", string.punctuation))
    return [word for word in plain.split() if word not in ("a", "an", "the")]


def _f1(answer: Sequence[str], reply: Sequence[str]) -> float:
    common = sum((Counter(answer) & Counter(reply)).values())
    return 2 * common / (len(answer) + len(reply)) if common else 0.0


def _rouge_l(answer: Sequence[str], reply: Sequence[str]) -> float:
    row = [0] * (len(reply) + 1)  # of the longest common subsequence, for the answer until each of its words
    for word in answer:
        before = row
        row = [0]
        for i, other in enumerate(reply):
            row.append(before[i] + 1 if word == other else max(before[i + 1], row[i]))
    return 2 * row[-1] / (len(answer) + len(reply)) if row[-1] else 0.0


_QA = "Answer the question from the text above, in a few words.\nQuestion: {input}"
_SUMMARY = "Write a summary of the text above."
_DATASETS: dict[str, tuple[Metric, str, str, int]] = {  # metric, what is asked, how the reply begins, its tokens
    **dict.fromkeys(
        ("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "triviaqa"),
        (f1, _QA, "Answer:", 64),
    ),
    "gov_report": (rouge_l, _SUMMARY, "Summary:", 512),
    "multi_news": (rouge_l, _SUMMARY, "Summary:", 512),
    "qmsum": (rouge_l, "Answer the question about the meeting above.\nQuestion: {input}", "Answer:", 512),
    "samsum": (rouge_l, "Write a summary of the last dialogue, as above.\n{input}", "Summary:", 128),
    "trec": (first_class, "Say the type of the last question, as above.\n{input}", "Type:", 64),
    "passage_count": (numbers, "How many different paragraphs are above? Say the number.", "Number:", 32),
    "passage_retrieval_en": (numbers, "Which paragraph is this a summary of?\n{input}", "Paragraph", 32),
    "lcc": (code_likeness, "Write the next line of the code.", "", 64),
    "repobench-p": (code_likeness, "Write the next line of the code.\n{input}", "", 64),
}


def prompts_of(path: Path, tokenizer: Any, samples: int) -> list[Prompt]:
    """Read the first prompts of a file.

    Args:
        path: JSON lines of RULER or LongBench.
        tokenizer: a Hugging Face tokenizer; its chat template is used if it has one.
        samples: prompts, at most.

    Raises:
        InputError: for a line that is of neither, or a data set of LongBench without a metric here.
        OSError: if the file cannot be read.
    """
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    found = []
    for i, line in enumerate(lines[:samples]):
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(f"{path}, line {i + 1}: no JSON ({error})") from error
        make = next(
            (make for names, make in ((_LONGBENCH, _longbench), (_RULER, _ruler)) if {*names} <= {*record}), None
        )
        if make is None:
            raise InputError(
                f"{path}, line {i + 1} has {', '.join(record)}: a line of RULER has {', '.join(_RULER)}, one of "
                f"LongBench {', '.join(_LONGBENCH)}"
            )
        task, sample = make(path, tokenizer, record)
        found.append(Prompt(task, OWN_LENGTH, 0.0, i, sample))
    return found


def _ruler(path: Path, tokenizer: Any, record: dict[str, Any]) -> tuple[str, Sample]:
    task = path.parent.name if path.stem in ("validation", "test") else path.stem
    context, line, question = record["input"].rpartition("\n")
    metric = any_of if task.startswith("qa") else score
    answers = tuple(map(str, record["outputs"]))
    return task, _sample(
        tokenizer, context, line + question, record.get("answer_prefix", ""), answers, metric, _RULER_REPLY
    )


def _longbench(path: Path, tokenizer: Any, record: dict[str, Any]) -> tuple[str, Sample]:
    dataset = record["dataset"].removesuffix("_e")
    if dataset not in _DATASETS:
        raise InputError(f"{path}: dataset {record['dataset']!r} has no metric here; there are {', '.join(_DATASETS)}")
    metric, asked, reply, tokens = _DATASETS[dataset]
    question = "\n\n" + asked.replace("{input}", record["input"])
    return dataset, _sample(tokenizer, record["context"], question, reply, tuple(record["answers"]), metric, tokens)


def _sample(
    tokenizer: Any, context: str, question: str, reply: str, answers: tuple[str, ...], metric: Metric, tokens: int
) -> Sample:
    head, tail = around_message(tokenizer)
    return Sample(
        context=tokenizer(head + context, add_special_tokens=not head).input_ids,
        question=tokens_of(tokenizer, question + tail + reply),
        answers=answers,
        reply=tokens,
        metric=metric,
    )
