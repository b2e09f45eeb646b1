"""Requests: what each command is asked to do, checked when they are made; see rotor.options.

UsageError names an option that does not fit. That needs no torch, and recipes only where a request has one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from ..checkpoint.files import RECIPE
from ..checkpoint.rows import Level
from ..errors import MissingError, UsageError
from ..options import MAX_NUMBER, Count, DeviceOptions, MemoryOptions, Reported, check_options

if TYPE_CHECKING:
    from .recipe import Recipe
else:
    Recipe = object  # options are made of these classes before any recipe is read, whose import takes a while

Share = Annotated[float, Field(gt=0, lt=1)]
RemovalRate = Annotated[float, Field(ge=0, lt=1)]
HubId = Annotated[str, Field(pattern=r"^[\w.-]+/[\w.-]+$", max_length=200)]
Texts = Iterable[Path | str] | Path | str
ContextTokens = Annotated[int, Field(ge=1, le=1 << 32)]
CountOrZero = Annotated[int, Field(ge=0, le=MAX_NUMBER)]
Temperature = Annotated[float, Field(ge=0, le=100)]
Seed = Annotated[int, Field(ge=0, le=(1 << 63) - 1)]


@dataclass(frozen=True)
class CalibrationRequest(MemoryOptions, Reported):
    """Request of `rotor calibrate`.

    Args:
        model: Folder of the model (config.json and safetensors), which is only read; or a hub id.
        out: Run folder to write; it appears when everything is done.
        recipe: Name of a bundled recipe (see `rotor recipes`) or a YAML file.
        overrides: Override a recipe field (`rotor recipes --fields` has all of them); may be repeated.
        text: Text of your own (a UTF-8 file or a folder of them) to calibrate on and to measure accuracy on. Its
            documents are dealt to three splits that share none: calibration, search, report. May be repeated: each is a
            kind of text, and the smallest ratio of the kinds counts. Without it the recipe's tokens calibrate, and
            accuracy is measured on source of Python's standard library (evaluation.source=stdlib).
        revision: Branch, tag or commit of a hub id; the commit that it is now is kept in run.json.
        quick: A first look in minutes: few tokens to calibrate on and, in exports of this run, to measure accuracy on.
            Results are marked as quick.
        batch_tokens: Tokens in one forward pass of a calibration.
        overwrite: Replace a non-empty output folder.
        resume: Go on with an unfinished run (RUN.partial), after its last finished layer; the result is that of an
            uninterrupted one.
    """

    model: str | Path
    out: Path | str
    recipe: str | Recipe = "rotor"
    overrides: Iterable[str] = ()
    _: KW_ONLY
    text: Texts = ()
    revision: str | None = None
    quick: bool = False
    batch_tokens: Count = 2048
    overwrite: bool = False
    resume: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "overrides", tuple(self.overrides))
        _ = self.overridden_recipe

    @cached_property
    def overridden_recipe(self) -> Recipe:
        """The recipe with the text and the overrides; raises RecipeError as `load_recipe` does."""
        from .reading import load_recipe, quick_overrides, text_overrides

        quick = quick_overrides(load_recipe(self.recipe)) if self.quick else ()
        return load_recipe(self.recipe, (*quick, *text_overrides(self.text), *self.overrides))


@dataclass(frozen=True, kw_only=True)
class Goal:
    """The goal of an export: exactly one of them is given.

    Args:
        accuracy: Find the strongest compression that keeps this accuracy (a ratio to the model) on the search split.
        compression: Remove at least this share of the KV cache.
        removal_rate: Choose ranks by this removal rate of singular values.
    """

    accuracy: Share | None = None
    compression: Share | None = None
    removal_rate: RemovalRate | None = None

    def __post_init__(self) -> None:
        goals = {"--accuracy": self.accuracy, "--compression": self.compression, "--removal-rate": self.removal_rate}
        given = [name for name, value in goals.items() if value is not None]
        if len(given) != 1:
            raise UsageError(
                f"got {' and '.join(given) or 'no goal'}, expected one of {', '.join(goals)}.",
                "Example: --accuracy 0.99",
            )
        check_options(self)


@dataclass(frozen=True)
class ExportRequest(MemoryOptions, Goal, Reported):
    """Request of `rotor export`.

    Args:
        run: Run folder that `rotor calibrate` wrote; its tables gain the points that are measured.
        out: Checkpoint folder to write; it appears whole or not at all.
        overrides: Override a recipe field of the sections ranks, codes, exact, evaluation and search; may be repeated.
        measure: Measure accuracy. An export without it needs a compression or a removal rate; it neither loads the
            model nor reads text, and rotor.json and the card say so.
        quick: Measure accuracy on few tokens, to a coarser compression; results are marked as quick.
        cache: Store a cache policy, with which accuracy is measured: a bundled one (see `rotor recipes`), a YAML file,
            or FILE.py:CLASS. That needs all weights in memory.
        texts: Write into card, report and rotor.json what the uncompressed and the compressed model continue two long
            fixed prompts with. That needs all weights in memory.
        prompts: A prompt of your own, written as those of --texts are, with what both models make of it; may be
            repeated.
        without_weights: Write bases in place of weights, which are rewritten from the source's on loading, or by
            `rotor materialise`.
        base_model: Id on the hub of the source, which the card names as what this is made of; default: the id that the
            model was fetched by, or the folder's name. The licence is that of the source's card.
        context: Tokens of the sequences that are served, whose bytes count (default: the model's longest, at most
            32768); a layer with a window holds no more than that, so that its channels cost less. Below 4096 fewer of
            the newest tokens are kept exactly, a 32nd of the sequence.
        overwrite: Replace a non-empty output folder.
    """

    run: Path | str
    out: Path | str
    _: KW_ONLY
    overrides: Iterable[str] = ()
    measure: bool = True
    quick: bool = False
    cache: str | None = None
    texts: bool = False
    prompts: Iterable[str] = ()
    without_weights: bool = False
    base_model: HubId | None = None
    context: ContextTokens | None = None
    overwrite: bool = False

    def __post_init__(self) -> None:
        """Raises MissingError where the run is no folder; of what it holds only the recipe is read."""
        Goal.__post_init__(self)
        object.__setattr__(self, "overrides", tuple(self.overrides))
        if not self.measure and self.accuracy is not None:
            raise UsageError("--no-measure: an --accuracy is found by measuring.", "Give --compression in its place.")
        object.__setattr__(self, "prompts", tuple(self.prompts))
        if self.writes_texts and (self.cache is not None or not self.measure):
            other = "--cache" if self.measure else "--no-measure"
            asked = "--texts" if self.texts else "--prompt"
            raise UsageError(f"{asked} and {other}: expected one of them.", f"Leave {other} out.")
        run = Path(self.run)
        if not run.is_dir():
            raise MissingError(f"{run}: no such folder.", "Give a folder that `rotor calibrate` wrote.")
        if (run / RECIPE).is_file():
            from .reading import load_stored_recipe

            self.override(load_stored_recipe(run))

    @property
    def writes_texts(self) -> bool:
        """Tell whether both models continue prompts."""
        return self.texts or bool(self.prompts)

    def override(self, recipe: Recipe) -> Recipe:
        """The recipe of a run with what this export changes of it."""
        from .reading import context_overrides, override, quick_overrides
        from .recipe import EXPORT_SECTIONS

        quick = quick_overrides(recipe, ("evaluation", "search")) if self.quick else ()
        return override(recipe, (*quick, *context_overrides(recipe, self.context), *self.overrides), EXPORT_SECTIONS)


@dataclass(frozen=True)
class MaterialisationRequest(Reported):
    """Request of `rotor materialise`.

    Args:
        folder: What `rotor export --without-weights` wrote.
        out: Checkpoint folder to write; it appears whole or not at all.
        source: Source model of the checkpoint, if it is not where it was: a folder or a hub id.
        overwrite: Replace a non-empty output folder.
    """

    folder: Path | str
    out: Path | str
    _: KW_ONLY
    source: str | Path | None = None
    overwrite: bool = False


@dataclass(frozen=True, kw_only=True)
class ValidationOptions(MemoryOptions):
    """Options by which `rotor validate` checks a folder.

    Args:
        model: Source model, if it is not where it was; checkpoints without weights take them from it.
        run: Run folder, if it is not where it was.
        recipe: Recipe whose section evaluation says how accuracy is measured; default: the checkpoint's. No text is
            opened that only the checkpoint names.
        overrides: Override a field of the recipe's section evaluation; may be repeated.
        text: Text to measure accuracy on, as for `rotor calibrate`: a file or a folder; may be repeated.
        quick: Measure accuracy on few tokens; results are marked as quick.
        cache: How the cache is kept: none, a bundled policy (see `rotor recipes`), a YAML file, or FILE.py:CLASS of
            your own; default: the checkpoint's own.
        measure: Measure accuracy, which takes most of the time; without it numerics are compared on random tokens.
        tasks: Benchmarks to run on the uncompressed model and on the compressed ones: tasks of lm-eval, by name or
            YAML file; of each the first evaluation.lm_eval_limit documents (docs/accuracy.md). What they say is
            written to a new folder, FOLDER-tasks.
        lengths: Tokens of the documents of RULER's tasks, with the answer.
    """

    model: str | Path | None = None
    run: Path | str | None = None
    recipe: str | Recipe | None = None
    overrides: Iterable[str] = ()
    text: Texts = ()
    quick: bool = False
    cache: str | None = None
    measure: bool = True
    tasks: Sequence[str] = ()
    lengths: Sequence[int] = (4096,)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "overrides", tuple(self.overrides))

    @property
    def evaluation_overrides(self) -> tuple[str, ...]:
        """Everything that the request changes in the section evaluation."""
        from .reading import load_recipe, quick_overrides, text_overrides

        quick = quick_overrides(load_recipe("rotor"), ("evaluation",)) if self.quick else ()
        return (*quick, *text_overrides(self.text, ("evaluation",)), *self.overrides)


@dataclass(frozen=True)
class ValidationRequest(ValidationOptions, Reported):
    """Request of `rotor validate` for one folder.

    Args:
        folder: What `rotor export` wrote, or with `cache` an uncompressed model.
        shared: Empty at first, and the same for several folders: what those of one source share is measured once.
    """

    folder: str | Path
    _: KW_ONLY
    shared: dict[str, tuple[object, object]] = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True)
class StudyRequest(MemoryOptions, Reported):
    """Request of `rotor study`.

    Args:
        model: Folder of the model (config.json and safetensors), which is only read; or a hub id.
        out: Study folder; one with the same settings is continued.
        recipes: Names of bundled recipes or YAML files.
        overrides: Override a recipe field in all recipes; may be repeated.
        text: Text of your own to calibrate on and to measure accuracy on, as for `rotor calibrate`.
        parts: Some of curves, methods, match, long, context. methods, every cache policy and recipes at equal bytes,
            takes longest; match finds the bytes at which a recipe is as good as fp8, 4 bits, KIVI and KVTC; long asks
            questions behind prompts of 4K, 8K and 16K tokens, as far as the model has positions; context tells what is
            lost by position in rows of 8K. FILE.py:CLASS is a part of your own, or one of artifacts/studies/parts,
            which have the papers' figures in shape.
        sizes: Bytes of cache per token at which the parts methods, match, long and context measure recipes; by default
            sizes from 3.75 % to 50 % of the uncompressed cache.
        caches: Cache policies of your own for the part methods, as --cache takes them.
        context: Tokens of the sequences that are served, whose bytes choose the plans of models with windows, and below
            4096 how many tokens are exact, as in `rotor export` (default: the model's longest, at most 32768).
        quick: A first look: few tokens to calibrate on and to measure accuracy on; results are marked as quick.
        batch_tokens: Tokens in one forward pass of a calibration.
        plots: Draw the results, which needs matplotlib.
    """

    model: str | Path
    out: Path | str
    recipes: Sequence[str] = ("fdc", "rotor")
    overrides: Iterable[str] = ()
    _: KW_ONLY
    text: Texts = ()
    parts: Sequence[str] = ("curves",)
    sizes: Sequence[int] = ()
    caches: Sequence[str] = ()
    context: ContextTokens | None = None
    quick: bool = False
    batch_tokens: Count = 2048
    plots: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("recipes", "overrides", "parts", "sizes", "caches"):
            object.__setattr__(self, name, tuple(getattr(self, name)))

    @property
    def all_overrides(self) -> tuple[str, ...]:
        """Overrides of every recipe, those of --quick and of the text among them."""
        from .reading import load_recipe, quick_overrides, text_overrides

        quick = quick_overrides(load_recipe("rotor")) if self.quick else ()
        return (*quick, *text_overrides(self.text), *self.overrides)


@dataclass(frozen=True)
class InspectionRequest(DeviceOptions):
    """Request of `rotor inspect`.

    Args:
        model: Folder of the model (a config.json alone is enough), or a hub id, of which only the configuration is
            fetched.
        recipe: Name of a bundled recipe (see `rotor recipes`) or a YAML file.
        overrides: Override a recipe field (`rotor recipes --fields` has all of them); may be repeated.
        revision: Branch, tag or commit of a hub id.
        quick: Predict what calibrate, export and validate take with --quick.
        batch_tokens: Tokens in one forward pass of a calibration.
        context: Tokens of the sequences whose cache is counted (default: the model's longest, at most 32768).
    """

    model: str | Path
    recipe: str | Recipe = "rotor"
    overrides: Iterable[str] = ()
    _: KW_ONLY
    revision: str | None = None
    quick: bool = False
    batch_tokens: Count = 2048
    context: ContextTokens | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "overrides", tuple(self.overrides))
        _ = self.overridden_recipe

    @cached_property
    def overridden_recipe(self) -> Recipe:
        """The recipe with the overrides; raises RecipeError as `load_recipe` does."""
        from .reading import load_recipe, quick_overrides

        quick = quick_overrides(load_recipe(self.recipe)) if self.quick else ()
        return load_recipe(self.recipe, (*quick, *self.overrides))


@dataclass(frozen=True, kw_only=True)
class GenerationOptions(DeviceOptions):
    """Options by which `rotor generate` continues a prompt.

    Args:
        raw: Continue the prompt as it is, also where the model has a chat template.
        max_new_tokens: Tokens to generate.
        temperature: Temperature of sampling; 0, and anything below 0.001, is greedy.
        seed: Seed for sampling.
        cache: How the cache is kept: none, a bundled policy (see `rotor recipes`), a YAML file, or FILE.py:CLASS of
            your own; default: the checkpoint's own. One that is fitted to text is fitted to what the model writes.
        cache_file: A saved cache: as many of its tokens as begin the prompt are not read anew.
        save_cache: Save the cache to this file at the end, of the prompt and what was generated.
        cache_level: How tightly --save-cache packs: none, fast or small; the last two need the extra `store`.
        source: Source model of a checkpoint without weights, if it is not where it was: a folder or a hub id.
        parallel: sequence: split the prompt and its cache over the processes that torchrun started.
    """

    raw: bool = False
    max_new_tokens: Count = 64
    temperature: Temperature = 0.0
    seed: Seed = 0
    cache: str | None = None
    cache_file: Path | None = None
    save_cache: Path | None = None
    cache_level: Level = "none"
    source: str | None = None
    parallel: Literal["sequence"] | None = None


@dataclass(frozen=True)
class GenerationRequest(GenerationOptions, Reported):
    """Request of `rotor generate`.

    Args:
        folder: A compressed checkpoint, or any model's folder or hub id.
        prompt: Text to continue, or to answer.
        on_text: Gets the text as it is written, some words at a time.
    """

    folder: str | Path
    prompt: str
    _: KW_ONLY
    on_text: Callable[[str], None] | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class BenchRequest(DeviceOptions, Reported):
    """Request of `rotor bench`.

    Args:
        folder: A checkpoint that `rotor export` wrote.
        lengths: Cached tokens when decoding, as in 8192,32768. [32768; on a CPU 2048]
        prefill: Tokens of a prompt. [8192; on a CPU 512]
        batch: Sequences in a batch. [1,8; on a CPU 1]
        repetitions: Repetitions of each row of attention; whole models take a quarter of them.
        new_tokens: Tokens that whole models generate; 0 leaves them out.
        model: Source model, if it is not where it was.
        command: The command line, which is recorded.
    """

    folder: Path
    _: KW_ONLY
    lengths: Sequence[int] = ()
    prefill: Sequence[int] = ()
    batch: Sequence[int] = ()
    repetitions: Count = 20
    new_tokens: CountOrZero = 32
    model: Path | None = None
    command: str = field(default="", compare=False, repr=False)
