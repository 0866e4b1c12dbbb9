"""Methods. One entry each says how its keys, such as l-mcvae-sigmoid-k5, are read and shown, and how it is built."""

import difflib
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from mcvae.runs.builders import Builder, annealed, sampled

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
    """The bound to train on; `mcvae methods` lists them. The method chooses settings that are not given.

    Args:
        name: such as vae, iwae, l-mcvae or cmcd; or a whole key, such as l-mcvae-sigmoid-k5 or iwae-50.
        num_steps: Monte Carlo steps K of methods that anneal.
        num_samples: chains or importance samples per datum.
        bound: how samples make a bound: elbo averages log-weights, iwae averages weights, renyi is between them.
        alpha: order of the renyi bound, between 0 (iwae) and 1 (elbo).
        schedule: temperatures of the steps.
        step_size: where step sizes start, or what they are if fixed.
        step_sizes: the paper's adaptive rule (adaptive), learned through the bound, learned in units of q's scales
            (relative), or fixed.
        backward: backward kernels of l-mcvae: the reversal of the move, or a learned Gaussian.
        damping: share of the momentum that survives a move of uha; friction, where it starts, of ldvi and cmcd-ud.
        control_variate: of a-mcvae: predicted and stopped need one chain, leave-one-out, the paper's, at least two.
        gradient: of vae and iwae: pathwise, or with less variance where it is unbiased.
    """

    name: str = "l-mcvae"
    num_steps: int = 5
    num_samples: int | None = None
    bound: Literal["elbo", "iwae", "renyi"] | None = None
    alpha: float = 0.5
    schedule: Literal["linear", "sigmoid", "learned"] | None = None
    step_size: float | None = None
    step_sizes: Literal["adaptive", "learned", "relative", "fixed"] | None = None
    backward: Literal["reversal", "learned"] | None = None
    damping: float | None = None
    control_variate: Literal["predicted", "stopped", "leave-one-out", "none"] | None = None
    gradient: Literal["pathwise", "sticking-the-landing", "doubly-reparameterised"] | None = None


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

    @property
    def example(self) -> str:
        """How the piece looks."""
        return self.write(5)


class Choice(NamedTuple):
    """A piece of a key that is one word of several, such as sigmoid.

    Args:
        field: of `MethodConfig`.
        words: the words, each with what it adds to the label.
    """

    field: str
    words: dict[str, str]
    always: bool = False

    def read(self, text: str) -> tuple[Any, str] | None:
        """See `Number.read`."""
        return (text, self.words[text]) if text in self.words else None

    def write(self, value: Any) -> str:
        """See `Number.write`."""
        return str(value)

    @property
    def example(self) -> str:
        """See `Number.example`."""
        return "|".join(self.words)


@dataclass(frozen=True)
class Method:
    """A method, for training, sweeps, tables, figures and folder names.

    Args:
        title: in tables and figures.
        description: one line for `mcvae methods`.
        colour: in figures; those of Okabe and Ito, for colour-blind readers.
        marker: in figures, as matplotlib names it.
        builder: of the estimator; None for what appears in tables only, such as exact maximum likelihood.
        pieces: what may follow the name in a key, in this order.
        own: the method's own choice of settings: the values of fields of `MethodConfig` that are not given. Those that
            are neither here nor in `pieces` have no meaning for the method, and are refused.
        flow: the flow that q needs, if the method is defined by one.
        notes: words that the keys of experiments end with, and how people read them.
    """

    title: str
    description: str
    colour: str
    marker: str
    builder: Builder | None = None
    pieces: tuple[Number | Choice, ...] = ()
    own: dict[str, Any] = field(default_factory=dict)
    flow: Literal["realnvp", "nsf"] | None = None
    notes: tuple[tuple[str, str], ...] = ()

    @property
    def annealed(self) -> bool:
        """Whether it has K steps."""
        return any(piece.field == "num_steps" for piece in self.pieces)

    def whole(self, config: MethodConfig) -> MethodConfig:
        """The settings, with the method's defaults for those that are None."""
        own: dict[str, Any] = {"num_samples": 1, "bound": "elbo"} | self.own
        return replace(config, **{name: value for name, value in own.items() if getattr(config, name) is None})

    def cost(self, config: MethodConfig) -> int:
        """Model evaluations per datum and optimiser step: S (K + 1)."""
        return (self.whole(config).num_samples or 1) * ((config.num_steps if self.annealed else 0) + 1)

    def build(self, config: MethodConfig, latent_dim: int, context_dim: int = 0) -> "AnnealedEstimator":
        """The estimator; networks in it are amortised over data of size `context_dim`."""
        if self.builder is None:
            raise ValueError(f"{self.title} is not trained on a bound.")
        return self.builder(self.whole(config), latent_dim, context_dim)


_SCHEDULE = Choice("schedule", {"linear": " fixed", "sigmoid": " sigmoidal", "learned": " learned"})
_STEPS = Number("num_steps", "k", "K = {}", always=True)
_SAMPLES = Number("num_samples", "n", "{} samples")
_BOUND = Choice("bound", {"elbo": ", ELBO", "iwae": ", IWAE bound", "renyi": ", Rényi bound"})
_BACKWARD = Choice("backward", {"reversal": "", "learned": ", learned backward kernels"})
_ANNEALED = (_SCHEDULE, _STEPS, _SAMPLES, _BOUND)
_ADAPTIVE = {"schedule": "linear", "step_sizes": "adaptive", "step_size": 0.01}
_LEARNED = {"schedule": "learned", "step_sizes": "relative", "step_size": 0.05}


METHODS = {
    "vae": Method(
        "VAE",
        "ELBO with one Gaussian sample (Kingma and Welling)",
        "#000000",
        "s",
        sampled,
        (_SAMPLES, _BOUND),
        {"gradient": "pathwise"},
    ),
    "iwae": Method(
        "IWAE",
        "importance-weighted bound, --method.num_samples (Burda et al.)",
        "#E69F00",
        "^",
        sampled,
        (Number("num_samples", "", "K = {}", always=True),),
        {"num_samples": 10, "bound": "iwae", "gradient": "pathwise"},
    ),
    "l-mcvae": Method(
        "L-MCVAE",
        "K unadjusted Langevin steps, reparameterised (the paper's Algorithm 1)",
        "#0072B2",
        "o",
        annealed("l_mcvae"),
        (*_ANNEALED, _BACKWARD),
        _ADAPTIVE | {"backward": "reversal"},
    ),
    "a-mcvae": Method(
        "A-MCVAE",
        "K MALA steps, REINFORCE with a control variate (the paper's Algorithm 2, with one chain)",
        "#D55E00",
        "v",
        annealed("a_mcvae", 0.8),
        _ANNEALED,
        _ADAPTIVE | {"control_variate": "predicted"},
        notes=(("cv", "leave one out"), ("stopped", "stopped control variate"), ("pathwise", "pathwise")),
    ),
    "uha": Method(
        "UHA",
        "K underdamped Hamiltonian steps without accept/reject",
        "#CC79A7",
        "P",
        annealed("uha"),
        _ANNEALED,
        _ADAPTIVE | {"step_size": 0.1, "damping": 0.9},
    ),
    "mcd": Method(
        "MCD",
        "K Langevin steps whose reversal is corrected by a network (Doucet et al., 2022)",
        "#56B4E9",
        "<",
        annealed("mcd"),
        _ANNEALED,
        _LEARNED,
    ),
    "cmcd": Method(
        "CMCD",
        "K Langevin steps controlled by a network in both directions (Vargas et al., 2024)",
        "#0B3C5D",
        ">",
        annealed("cmcd"),
        _ANNEALED,
        _LEARNED,
    ),
    "dbs": Method(
        "DBS",
        "K Langevin steps with a network in each direction (Richter and Berner, 2024)",
        "#7A6C00",
        "p",
        annealed("dbs"),
        _ANNEALED,
        _LEARNED,
    ),
    "ldvi": Method(
        "LDVI",
        "K underdamped steps whose reversal is corrected by a network (Geffner and Domke, 2023)",
        "#8E3B6F",
        "h",
        annealed("ldvi"),
        _ANNEALED,
        _LEARNED | {"step_size": 0.2, "damping": 1.0},
    ),
    "cmcd-ud": Method(
        "CMCD-UD",
        "K underdamped steps controlled by a network in both directions (Vargas et al., 2024)",
        "#5D3A9B",
        "X",
        annealed("cmcd_ud"),
        _ANNEALED,
        _LEARNED | {"step_size": 0.2, "damping": 1.0},
    ),
    "realnvp": Method(
        "VAE with RealNVP",
        "ELBO with a RealNVP flow for q",
        "#009E73",
        "D",
        sampled,
        (_SAMPLES, _BOUND),
        {"gradient": "pathwise"},
        flow="realnvp",
    ),
    "mle": Method("exact maximum likelihood", "what no bound can do better than", "#999999", "x"),
}
"""Every method by the name that its keys begin with, in the order that tables show them."""


def method_named(key: str) -> Method:
    """The method that a key, or a name alone, belongs to."""
    return METHODS[_name_in(key)]


def _name_in(key: str) -> str:
    known = [name for name in METHODS if key == name or key.startswith(f"{name}-")]
    if not known:
        trained = [name for name, method in METHODS.items() if method.builder is not None]
        close = difflib.get_close_matches(re.sub(r"-(k?\d.*)", "", key.lower()), trained, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(
            f"unknown method {key!r}; known: {', '.join(trained)}, alone or as in iwae-10, l-mcvae-sigmoid-k5, "
            f"a-mcvae-k3-n5.{hint}"
        )
    return max(known, key=len)


class _Key(NamedTuple):
    """A parsed key."""

    method: Method
    said: dict[str, Any]
    """Fields of `MethodConfig` that the key names, `name` among them."""
    label: str
    rest: list[str]
    """Words of the key that no piece understands."""


def _read(key: str) -> _Key:
    name, method = _name_in(key), method_named(key)
    said: dict[str, Any] = {"name": name}
    label, rest = method.title, [word for word in key.removeprefix(name).split("-") if word]
    for piece in method.pieces:
        if rest and (found := piece.read(rest[0])) is not None:
            said[piece.field], label, rest = found[0], label + found[1], rest[1:]
    return _Key(method, said, label, rest)


def parse_key(key: str) -> MethodConfig:
    """The settings that a key stands for.

    >>> parse_key("a-mcvae-sigmoid-k3").num_steps, parse_key("iwae-50").num_samples
    (3, 50)
    """
    return MethodConfig(**said_by(key))


def said_by(key: str) -> dict[str, Any]:
    """The fields of `MethodConfig` that a key names, with their values. A ValueError says what is wrong with a key.

    >>> said_by("iwae-50")
    {'name': 'iwae', 'num_samples': 50}
    """
    found = _read(key)
    if found.rest or found.method.builder is None or found.said.get("num_samples") == 0:
        name = found.said["name"]
        shape = "".join([name, *(f"[-{piece.example}]" for piece in found.method.pieces)])
        raise ValueError(f"unknown method {key!r}; keys of {name} look like {shape}.")
    return found.said


def key_of(config: MethodConfig) -> str:
    """The shortest key that `parse_key` turns back into these settings.

    >>> key_of(MethodConfig("a-mcvae", 3, schedule="sigmoid")), key_of(MethodConfig("iwae"))
    ('a-mcvae-sigmoid-k3', 'iwae-10')
    """
    method, words = method_named(config.name), [config.name]
    config, own = method.whole(config), method.whole(MethodConfig(config.name))
    for piece in method.pieces:
        value = getattr(config, piece.field)
        if piece.always or value != getattr(own, piece.field):
            words.append(piece.write(value))
    return "-".join(words)


def settled(config: MethodConfig) -> MethodConfig:
    """Expand settings whose name is a whole key. Raise a ValueError if another setting contradicts the key.

    >>> settled(MethodConfig("l-mcvae-sigmoid-k3")).schedule
    'sigmoid'
    """
    key = config.name
    method, default, said = method_named(key), MethodConfig(), said_by(key)
    meant = {"num_steps", "num_samples", "bound", "alpha", *method.own, *(piece.field for piece in method.pieces)}
    for name, given in vars(config).items():
        if name == "name" or given == getattr(default, name):
            continue
        if name in said and given != said[name]:
            raise ValueError(f"--method.{name} is {given}, but the method {key} says {said[name]}.")
        if name not in meant:
            raise ValueError(f"--method.{name} {given} has no meaning for {said['name']}; leave it out.")
    config = replace(config, **said)
    whole = method.whole(config)
    if whole.num_samples == 1 and whole.bound not in ("elbo", method.own.get("bound")):
        raise ValueError(
            f"--method.bound {whole.bound} of one sample is the ELBO: give --method.num_samples 2 or more, or leave "
            "the bound out."
        )
    return config


def label_of(key: str) -> str:
    """A key in the paper's words; unknown parts are shown as they are.

    >>> label_of("l-mcvae-sigmoid-k5"), label_of("iwae-10"), label_of("a-mcvae-k5-n5-cv")
    ('L-MCVAE sigmoidal, K = 5', 'IWAE, K = 10', 'A-MCVAE, K = 5, 5 samples, leave one out')
    >>> label_of("vae-learning_rate=1e-3"), label_of("ais-mala-k8")
    ('VAE, learning_rate=1e-3', 'AIS-MALA, K = 8')
    """
    base, *varied = re.split(r"-(?=\w+=)", key)
    try:
        found = _read(base)
    except ValueError:  # perhaps a sampler of the benchmark of posteriors, which trains no model
        sampler = re.fullmatch(r"(vi|ula|ais-mala|smc)(?:-k(\d+))?", key)
        return key if not sampler else sampler[1].upper() + (f", K = {sampler[2]}" if sampler[2] else "")
    notes = dict(found.method.notes)
    return ", ".join([found.label, *(notes.get(word, word) for word in found.rest), *varied])
