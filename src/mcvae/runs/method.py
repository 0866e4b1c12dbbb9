"""Methods: one entry each says how a key such as l-mcvae-sigmoid-k5 is read, shown, drawn, priced and built."""

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from mcvae.core.estimator import AnnealedEstimator

__all__ = [
    "METHODS",
    "Choice",
    "Method",
    "MethodConfig",
    "Number",
    "key_of",
    "label_of",
    "method_named",
    "parse_key",
    "said_by",
    "settled",
]


@dataclass
class MethodConfig:
    """The bound that is trained on; `mcvae methods` lists them.

    Args:
        name: such as vae, iwae, l-mcvae or a-mcvae; or a whole key, such as l-mcvae-sigmoid-k5 or iwae-50.
        num_steps: Monte Carlo steps K (l-mcvae, a-mcvae, uha).
        num_samples: chains or importance samples per image; the method's own choice if not given.
        schedule: temperatures of the steps.
        step_size: where step sizes start, or what they are if fixed.
        step_sizes: the paper's adaptive rule (adaptive), learned through the bound, or fixed.
    """

    name: str = "l-mcvae"
    num_steps: int = 5
    num_samples: int | None = None
    schedule: Literal["linear", "sigmoid", "learned"] = "linear"
    step_size: float = 0.01
    step_sizes: Literal["adaptive", "learned", "fixed"] = "adaptive"


class Number(NamedTuple):
    """A piece of a key with a number in it, such as k5.

    Args:
        field: of `MethodConfig`.
        prefix: what stands before the number.
        label: how people read it, such as "K = {}".
        always: whether a key names it even if it is the method's own choice.
    """

    field: str
    prefix: str
    label: str
    always: bool = False

    def read(self, text: str) -> tuple[Any, str] | None:
        """The value, and how people read it; None if the text is something else."""
        found = re.fullmatch(rf"{self.prefix}(\d+(?:\.\d+)?)", text)
        if found is None:
            return None
        value = float(found[1]) if "." in found[1] else int(found[1])
        return value, f", {self.label.format(found[1])}"

    def write(self, value: Any) -> str:
        """The piece of a key for a value."""
        return f"{self.prefix}{value}"


class Choice(NamedTuple):
    """A piece of a key that is one of some words, such as sigmoid.

    Args:
        field: of `MethodConfig`.
        words: the words, each with how people read it.
    """

    field: str
    words: dict[str, str]
    always: bool = False

    def read(self, text: str) -> tuple[Any, str] | None:
        """See `Number.read`."""
        return (text, f" {self.words[text]}") if text in self.words else None

    def write(self, value: Any) -> str:
        """See `Number.write`."""
        return str(value)


Builder = Callable[[MethodConfig, int], "AnnealedEstimator"]
"""`(settings, latent_dim) -> estimator`; imports torch when it is called, not before."""


@dataclass(frozen=True)
class Method:
    """A method, for training, sweeps, tables, figures and folder names.

    Args:
        title: in tables and figures.
        description: one line for `mcvae methods`.
        colour: in figures; those of Okabe and Ito, for colour-blind readers.
        marker: in figures, as matplotlib names it.
        build: the estimator; None for what only tables know, such as exact maximum likelihood.
        pieces: what may follow the name in a key, in this order.
        num_samples: chains or samples per datum if nothing is said.
        flow: the flow that q needs, if the method is defined by one.
        notes: words that the keys of experiments end with, and how people read them.
    """

    title: str
    description: str
    colour: str
    marker: str
    build: Builder | None = None
    pieces: tuple[Number | Choice, ...] = ()
    num_samples: int = 1
    flow: Literal["realnvp", "nsf"] | None = None
    notes: tuple[tuple[str, str], ...] = ()

    @property
    def annealed(self) -> bool:
        """Whether it has K steps."""
        return any(piece.field == "num_steps" for piece in self.pieces)

    def cost(self, config: MethodConfig) -> int:
        """Model evaluations per datum and optimiser step: S (K + 1)."""
        return (config.num_samples or self.num_samples) * ((config.num_steps if self.annealed else 0) + 1)


_SCHEDULE = Choice("schedule", {"linear": "fixed", "sigmoid": "sigmoidal", "learned": "learned"})
_STEPS = Number("num_steps", "k", "K = {}", always=True)
_SAMPLES = Number("num_samples", "n", "{} samples")
_ANNEALED = (_SCHEDULE, _STEPS, _SAMPLES)


def _sampled(recipe: str, num_samples: int) -> Builder:
    """Build with a recipe that does not anneal."""

    def build(config: MethodConfig, latent_dim: int) -> "AnnealedEstimator":
        from mcvae.core import recipes

        built: AnnealedEstimator = getattr(recipes, recipe)(config.num_samples or num_samples)
        return built

    return build


def _annealed(recipe: str, num_samples: int, target: float) -> Builder:
    """Build with a recipe that anneals, its own number of samples and its acceptance ρ."""

    def build(config: MethodConfig, latent_dim: int) -> "AnnealedEstimator":
        from mcvae.core import recipes, schedules, step_sizes

        steps: step_sizes.StepSizes
        if config.step_sizes == "adaptive":
            steps = step_sizes.ScoreScaled(config.num_steps, latent_dim, config.step_size, target=target)
        else:
            kinds = {"fixed": step_sizes.Fixed, "learned": step_sizes.Learned}
            steps = kinds[config.step_sizes](config.num_steps, config.step_size)
        spacing = {
            "linear": schedules.LinearSchedule,
            "sigmoid": schedules.SigmoidSchedule,
            "learned": schedules.LearnedSchedule,
        }
        built: AnnealedEstimator = getattr(recipes, recipe)(
            config.num_steps,
            latent_dim,
            schedule=spacing[config.schedule],
            step_sizes=steps,
            num_samples=config.num_samples or num_samples,
        )
        return built

    return build


METHODS = {
    "vae": Method(
        "VAE", "ELBO with one Gaussian sample (Kingma and Welling)", "#000000", "s", _sampled("vae", 1), (_SAMPLES,)
    ),
    "iwae": Method(
        "IWAE",
        "importance-weighted bound, --method.num_samples (Burda et al.)",
        "#E69F00",
        "^",
        _sampled("iwae", 10),
        (Number("num_samples", "", "K = {}", always=True),),
        num_samples=10,
    ),
    "l-mcvae": Method(
        "L-MCVAE",
        "K unadjusted Langevin steps, reparameterised (the paper's Algorithm 1)",
        "#0072B2",
        "o",
        _annealed("l_mcvae", 1, 0.9),
        _ANNEALED,
        notes=(("learned", "learned backward kernels"),),
    ),
    "a-mcvae": Method(
        "A-MCVAE",
        "K MALA steps, REINFORCE with control variates (the paper's Algorithm 2)",
        "#D55E00",
        "v",
        _annealed("a_mcvae", 5, 0.8),
        _ANNEALED,
        num_samples=5,
        notes=(("cv", "control variate"), ("pathwise", "pathwise")),
    ),
    "uha": Method(
        "UHA",
        "K underdamped Hamiltonian steps without accept/reject",
        "#CC79A7",
        "P",
        _annealed("uha", 1, 0.9),
        _ANNEALED,
    ),
    "realnvp": Method(
        "VAE with RealNVP",
        "ELBO with a RealNVP flow for q",
        "#009E73",
        "D",
        _sampled("vae", 1),
        (_SAMPLES,),
        flow="realnvp",
    ),
    "mle": Method("exact maximum likelihood", "what no bound can do better than", "#999999", "x"),
}
"""Every method by the name that its keys begin with, in the order that tables show them."""


def method_named(name: str) -> Method:
    """The method that a key, or a name alone, belongs to."""
    known = [each for each in METHODS if name == each or name.startswith(f"{each}-")]
    if not known:
        trained = [each for each, method in METHODS.items() if method.build is not None]
        close = difflib.get_close_matches(re.sub(r"-(k?\d.*)", "", name.lower()), trained, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(
            f"unknown method {name!r}; known: {', '.join(trained)}, alone or as in iwae-10, l-mcvae-sigmoid-k5, "
            f"a-mcvae-k3-n5.{hint}"
        )
    return METHODS[max(known, key=len)]


class _Key(NamedTuple):
    """A key taken apart."""

    name: str
    method: Method
    said: dict[str, Any]
    """Fields of `MethodConfig` that the key names."""
    label: str
    rest: list[str]
    """Words that no piece has read."""


def _read(key: str) -> _Key:
    method = method_named(key)
    name = next(name for name, known in METHODS.items() if known is method)
    said, label, rest = dict[str, Any](), method.title, [word for word in key.removeprefix(name).split("-") if word]
    for piece in method.pieces:
        if rest and (found := piece.read(rest[0])) is not None:
            said[piece.field], label, rest = found[0], label + found[1], rest[1:]
    return _Key(name, method, said, label, rest)


def parse_key(key: str) -> MethodConfig:
    """The settings that a key stands for.

    >>> parse_key("a-mcvae-sigmoid-k3").num_steps, parse_key("iwae-50").num_samples
    (3, 50)
    """
    found = _read(key)
    if found.rest or found.method.build is None or found.said.get("num_samples") == 0:
        shape = "".join([found.name, *(f"[-{_example(piece)}]" for piece in found.method.pieces)])
        raise ValueError(f"unknown method {key!r}; keys of {found.name} look like {shape}.")
    return MethodConfig(found.name, **found.said)


def said_by(key: str) -> dict[str, Any]:
    """The fields of `MethodConfig` that a key names, with their values.

    >>> said_by("iwae-50")
    {'name': 'iwae', 'num_samples': 50}
    """
    return {"name": parse_key(key).name} | _read(key).said


def _example(piece: Number | Choice) -> str:
    return "|".join(piece.words) if isinstance(piece, Choice) else f"{piece.prefix}5"


def key_of(config: MethodConfig) -> str:
    """The key of settings: the shortest that `parse_key` reads back.

    >>> key_of(MethodConfig("a-mcvae", 3, schedule="sigmoid")), key_of(MethodConfig("iwae"))
    ('a-mcvae-sigmoid-k3', 'iwae-10')
    """
    method, words = method_named(config.name), [config.name]
    own = MethodConfig(config.name, num_samples=method.num_samples)
    for piece in method.pieces:
        value = getattr(config, piece.field)
        value = getattr(own, piece.field) if value is None else value
        if piece.always or value != getattr(own, piece.field):
            words.append(piece.write(value))
    return "-".join(words)


def settled(config: MethodConfig) -> MethodConfig:
    """The settings with a whole key, given as the name, taken apart; a setting that contradicts it is an error.

    >>> settled(MethodConfig("l-mcvae-sigmoid-k3")).schedule
    'sigmoid'
    """
    key = config.name
    for field, said in said_by(key).items():
        given = getattr(config, field)
        if field != "name" and given not in (getattr(MethodConfig(), field), said):
            raise ValueError(f"--method.{field} is {given}, but the method {key} says {said}.")
        config = replace(config, **{field: said})
    return config


def label_of(key: str) -> str:
    """A key in the paper's words; what it does not know is shown as it is.

    >>> label_of("l-mcvae-sigmoid-k5"), label_of("iwae-10"), label_of("a-mcvae-k5-n5-cv")
    ('L-MCVAE sigmoidal, K = 5', 'IWAE, K = 10', 'A-MCVAE, K = 5, 5 samples, control variate')
    >>> label_of("vae-learning_rate=1e-3")
    'VAE, learning_rate=1e-3'
    """
    base, *varied = re.split(r"-(?=\w+=)", key)
    try:
        found = _read(base)
    except ValueError:
        return key
    notes = dict(found.method.notes)
    return ", ".join([found.label, *(notes.get(word, word) for word in found.rest), *varied])
