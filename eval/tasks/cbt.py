"""Children's Book Test (Hill et al. 2016): which of ten words is missing in the sentence after twenty others.

The candidate is chosen by the likelihood of itself and the rest of the sentence (Radford et al. 2019, section 3.2).
"""

from pathlib import Path

from multihop.common.errors import UserError
from multihop.eval.tasks.detokenize import detokenize
from multihop.eval.tasks.task import Example
from multihop.eval.tasks.text_files import read_text

BLANK = "XXXXX"
_CONTEXT_SENTENCES = 20


def read_cbt(path: Path) -> tuple[Example, ...]:
    """Return the questions of an official file, such as cbtest_CN_test_2500ex.txt, as examples of kind choice.

    A question is 20 numbered sentences and a numbered 21st with a blank, then, separated by tabs, the answer, nothing,
    and the candidates separated by `|`; a blank line follows. The text is de-tokenized as GPT-2's was.

    Raises:
        UserError: the file is missing, empty, or a line is not in this format.
    """
    examples: list[Example] = []
    sentences: list[str] = []
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            if sentences:
                raise _unexpected(path, number, f"sentence {len(sentences) + 1} of a question", line)
            continue
        index, _, content = line.strip("\r ").partition(" ")
        if index != str(len(sentences) + 1):
            raise _unexpected(path, number, f"a line that begins with {len(sentences) + 1} and a space", line)
        if len(sentences) < _CONTEXT_SENTENCES:
            sentences.append(content)
            continue
        fields = content.split("\t")
        candidates = fields[3].split("|") if len(fields) == 4 else []
        if len(candidates) < 2 or BLANK not in fields[0] or fields[1] not in candidates:
            raise _unexpected(
                path, number, f"a sentence with {BLANK}, its answer, nothing, and candidates with it among them", line
            )
        examples.append(_example(sentences, fields[0], candidates, fields[1]))
        sentences = []
    if sentences:
        raise UserError(f"{path} ends after sentence {len(sentences)} of a question; get the official file again")
    return tuple(examples)


def _example(sentences: list[str], question: str, candidates: list[str], answer: str) -> Example:
    before, _, after = question.partition(BLANK)
    context = " ".join(detokenize(sentence, "penn") for sentence in [*sentences, before])
    return Example(
        texts=(context, *(detokenize(each + after.replace(BLANK, each), "penn") for each in candidates)),
        targets=(float(candidates.index(answer)),),
    )


def _unexpected(path: Path, number: int, expected: str, line: str) -> UserError:
    return UserError(f"{path}, line {number}: expected {expected}, got {line[:80]!r}; get the official file again")
