"""`long`: tasks of long prompts, of the source, of recipes and of caches in use.

A prompt is read once for each cache, as an engine reads it, and its questions are asked of that cache one by one.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from transformers.cache_utils import DynamicCache

from ....checkpoint.families import attention_shape
from ....checkpoint.sizes import exact_bytes_of_sequence, kv_bytes_of_sequence
from ....errors import UnsupportedModelError
from ....models.hardware import fast_products, matmul_rate
from ....models.sequences import bounded_seq_len
from ....policies import FP8, KIVI, PerToken, Policy, cache_policy
from ....policies.quantiser import Quantiser
from ....search.evaluation.cached import LONGEST_STEP
from ..caches import mean_sequence_bytes, sequence_bytes
from ..long_prompts import TASKS, LongPrompt, Question, long_prompt
from ..part import CsvRow, Part, Table, Task, number

if TYPE_CHECKING:
    from ..context import StudyContext
    from ..store import StudyStore

LENGTHS = (4096, 8192, 16384)
"""Tokens of prompts, as far as the model has positions; its longest one, where it has fewer."""

QUICK_LENGTHS = 2
"""Number of LENGTHS with --quick."""

PROMPTS = 2
"""Prompts of each length."""

QUESTION_TOKENS = 128
"""Room for a question and its answer behind a prompt."""

SHARES = (0.2, 0.12)
"""Shares of the uncompressed bytes at which recipes are measured where no list of bytes is given."""

SOURCE = "uncompressed"


@dataclass(frozen=True)
class TaskScore:
    """Means over a task's questions. exact: share whose every token was the most likely one. probability: of the right
    answer, the product of its tokens'."""

    exact: float
    probability: float
    questions: int


@dataclass(frozen=True)
class LongRecord:
    """A cache at one length of prompts; `skipped` says why nothing was measured.

    tokens: of each prompt. kv_bytes_per_token: of a sequence of these, exact tokens counted. scores: by task.
    """

    name: str
    tokens: int
    skipped: str = ""
    kv_bytes_per_token: float = 0.0
    scores: dict[str, TaskScore] = field(default_factory=dict)

    @property
    def mean_probability(self) -> float:
        """The mean of all tasks."""
        return sum(score.probability for score in self.scores.values()) / len(self.scores)

    @property
    def mean_exact(self) -> float:
        return sum(score.exact for score in self.scores.values()) / len(self.scores)


def in_use(head_dim: int) -> dict[str, Quantiser | None]:
    """The caches that recipes stand beside, by name; None is the uncompressed one."""
    return {
        SOURCE: None,
        "fp8, one scale": FP8("tensor"),
        "KIVI-4": KIVI(4, 32, 128),
        "4 bits a token and head": PerToken(4, head_dim),
    }


class Long(Part):
    """Records: each cache at each length of prompts."""

    name = "long"
    csv = "long.csv"

    def tasks(self, study: StudyContext) -> Iterator[Task]:
        study.check_in_memory()
        shape = attention_shape(study.checkpoint.config)
        caches: dict[str, Callable[[str, int], LongRecord]] = {
            name: partial(_of_policy, study, policy)
            for name, policy in in_use(max(one.head_dim for one in shape.sizes)).items()
        }
        for recipe in study.inputs.recipes:
            for size in study.inputs.sizes or [round(share * study.mean_bytes) for share in SHARES]:
                caches[f"{recipe}, {size} bytes"] = partial(_of_recipe, study, recipe, size)
        lengths = lengths_of(study)
        left = [f"{self.name}/{name}, {tokens} tokens" for tokens in lengths for name in caches]
        if set(left) - study.store.records.keys():
            study.progress.message(cost_in_words(study, lengths, len(caches)))
        for tokens in lengths:
            for name, measure in caches.items():
                yield Task(f"{self.name}/{name}, {tokens} tokens", partial(measure, name, tokens))

    def tables(self, store: StudyStore) -> Iterator[Table]:
        records = long_records(store)
        title, text = "Long prompts", f"{PROMPTS} prompts of each length, read once; probability of the right answers "
        text += "(share of questions answered exactly), by task."
        for tokens in dict.fromkeys(record.tokens for record in records):
            rows = [_cells(record) for record in records if record.tokens == tokens]
            yield Table([f"{tokens:,} tokens", "bytes", "mean", *TASKS], rows, title, text)
            title = text = ""

    def rows(self, store: StudyStore) -> Iterable[CsvRow]:
        for record in long_records(store):
            plain = {key: value for key, value in asdict(record).items() if key != "scores"}
            for task, score in record.scores.items():
                yield {"part": self.name, **plain, "task": task, **asdict(score)}


def long_records(store: StudyStore) -> list[LongRecord]:
    """The records of the part, in order of arrival."""
    records = []
    for stored in store.part(Long.name).values():
        scores = {task: TaskScore(**score) for task, score in stored["scores"].items()}
        records.append(LongRecord(**{**stored, "scores": scores}))
    return records


def lengths_of(study: StudyContext) -> list[int]:
    """Tokens of the prompts of this model."""
    config = study.checkpoint.config
    most = bounded_seq_len(LENGTHS[-1] + QUESTION_TOKENS, config) - QUESTION_TOKENS
    lengths = LENGTHS[:QUICK_LENGTHS] if study.request.quick else LENGTHS
    return [tokens for tokens in lengths if tokens <= most] or [most]


def cost_in_words(study: StudyContext, lengths: Sequence[int], caches: int) -> str:
    """Tokens that all caches read, and the time that their matrix products take at the rate measured here.

    Attention of a token to half of its prompt takes 4 operations for each of these and each number of its queries.
    """
    shape = attention_shape(study.checkpoint.config)
    weights = study.checkpoint.total_bytes() / study.checkpoint.dtype.itemsize
    queries = sum(layer.num_heads * layer.head_dim for layer in shape.layers)
    operations = sum(n * (2 * weights + 2 * n * queries) for n in lengths) * PROMPTS * caches
    minutes = operations / matmul_rate(study.devices.device, study.devices.dtype) / 60
    each = ", ".join(f"{n:,}" for n in lengths)
    return f"long: {caches} caches read {PROMPTS} prompts of each of {each} tokens, about {minutes:.1f} min here"


def _of_policy(study: StudyContext, policy: Quantiser | None, name: str, tokens: int) -> LongRecord:
    network = study.network
    shape = attention_shape(study.checkpoint.config)
    if policy is None:
        size = sequence_bytes(shape, study.cache_dtype, tokens, None) / tokens
    else:
        policy = policy.beyond_windows()
        size = mean_sequence_bytes(shape, study.cache_dtype, tokens, policy)
    try:
        with network.uncompressed():
            return LongRecord(name, tokens, "", size, measure(study, tokens, policy))
    except UnsupportedModelError as error:
        return LongRecord(name, tokens, skipped=error.message)


def _of_recipe(study: StudyContext, recipe: str, size: int, name: str, tokens: int) -> LongRecord:
    """The mildest plan of at most so many bytes a token, in the mean over a sequence of the served context.

    Tokens that are kept exactly come on top.
    """
    evaluator, plan = study.plan_of(recipe, size)
    if isinstance(plan, str):
        return LongRecord(name, tokens, skipped=plan)
    evaluator.compress(plan)
    shape, itemsize = study.network.shape, study.cache_dtype.itemsize
    kept = exact_bytes_of_sequence([evaluator.recipe.exact.tokens] * shape.num_layers, shape, itemsize, tokens)
    rows = kv_bytes_of_sequence(plan.row_bytes(itemsize), shape, tokens)
    return LongRecord(name, tokens, "", (rows + kept) / tokens, measure(study, tokens))


def measure(study: StudyContext, tokens: int, policy: Policy | None = None) -> dict[str, TaskScore]:
    """Score the study's network as it is, compressed or not, by task."""
    spec = study.evaluation
    prompts = [long_prompt(study.evaluation_context, tokens, PROMPTS * spec.seed + i) for i in range(PROMPTS)]
    answered: dict[str, list[tuple[bool, float]]] = {task: [] for task in TASKS}
    with study.progress.task("long", PROMPTS * tokens, "tokens") as advance:
        for prompt in prompts:
            for question, score in zip(prompt.questions, answers(study, prompt, policy), strict=True):
                answered[question.task].append(score)
            advance(tokens)
    return {
        task: TaskScore(
            sum(exact for exact, _ in scores) / len(scores),
            round(sum(math.exp(log_probability) for _, log_probability in scores) / len(scores), 6),
            len(scores),
        )
        for task, scores in answered.items()
    }


@torch.inference_mode()
def answers(study: StudyContext, prompt: LongPrompt, policy: Policy | None = None) -> list[tuple[bool, float]]:
    """Score the answers: whether all tokens of each are the most likely ones, and its log-probability in nats."""
    network = study.network
    model, device = network.model, network.device
    step = (policy.longest_step if policy is not None else None) or LONGEST_STEP
    with cache_policy(model, policy), fast_products(device):
        cache = DynamicCache(config=network.config)
        network.decoder(input_ids=torch.tensor([prompt.tokens], device=device), past_key_values=cache, use_cache=True)

        def ask(question: Question) -> tuple[bool, float]:
            copied = copy.deepcopy(cache)
            read = torch.tensor([[*question.asked, *question.answer[:-1]]], device=device)
            parts = [
                model(part, past_key_values=copied, use_cache=True).logits[0].float() for part in read.split(step, 1)
            ]
            logits = torch.cat(parts)[len(question.asked) - 1 :].log_softmax(-1)
            labels = torch.tensor(question.answer, device=device)
            exact = bool((logits.argmax(-1) == labels).all())
            return exact, float(logits.gather(-1, labels[:, None]).sum())

        return [ask(question) for question in prompt.questions]


def _cells(record: LongRecord) -> list[str]:
    if record.skipped:
        return [record.name, f"not measured: {record.skipped}"]
    scores = [f"{number(s.probability, 3)} ({number(s.exact, 2)})" for s in record.scores.values()]
    mean = f"{number(record.mean_probability, 3)} ({number(record.mean_exact, 2)})"
    return [record.name, number(record.kv_bytes_per_token, 0), mean, *scores]
