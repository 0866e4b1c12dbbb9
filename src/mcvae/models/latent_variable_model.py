"""p(x, z) = p(z) p(x | z) with an amortised q(z | x), from any encoder and decoder."""

import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from inspect import signature
from typing import Any, Literal, NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.distributions import Distribution, Independent, Normal
from torch.fx import GraphModule

from mcvae.core.bridge import Bridge
from mcvae.core.capturing import refuse_own_gradients, without_trace
from mcvae.core.estimator import AnnealedEstimator
from mcvae.core.evidence import Evidence, estimate_log_evidence
from mcvae.core.paths import GeometricPath, Path
from mcvae.core.randomness import draw, seeded_generator
from mcvae.core.scores import value_and_score
from mcvae.models.mode import eval_mode
from mcvae.runs.method import method_named, parse_key

__all__ = ["LatentVariableModel", "Latents", "standard_normal_prior"]


class Latents(NamedTuple):
    """q(z | x) of data, as numbers."""

    mean: Tensor
    """`[B, D]`."""
    scale: Tensor
    """Standard deviations, `[B, D]`."""


class LatentVariableModel(nn.Module):
    """A latent variable model made of two ordinary networks that return distributions.

    `encode`, `reconstruct`, `simulate` and `score` evaluate it in eval mode, and leave it in the mode it was in.

    Args:
        encoder: `x [B, ...] -> Distribution` over latents with batch `[B]` and event `[D]`.
        decoder: `z [N, D] -> Distribution` over data with batch `[N]` and the event shape of one datum. It sees plain
            rows: samples and batch are flattened for it.
        prior: a Distribution over one latent (batch `[]`, event `[D]`), or a module or function without arguments
            that returns one (a learned prior, a flow of zuko), which moves with the model to another device or type.
            Standard normal by default.
        latent_dim: D, which a standard normal prior does not know; only `simulate` and `objective` need it.
        data_shape: of one datum, for a model of x given conditions y (C numbers). Its data are rows `[B, size + C]`:
            flattened x, then y. The encoder sees such rows, the decoder latents with y behind them, `[N, D + C]`.
        examples: conditions `[M, C]` that `simulate` draws from, with `data_shape`.

    >>> def encoder(x):
    ...     return Independent(Normal(x, torch.ones_like(x)), 1)
    >>> def decoder(z):
    ...     return Independent(Normal(z, torch.ones_like(z)), 1)
    >>> model = LatentVariableModel(encoder, decoder)
    >>> model.bridge(torch.zeros(5, 2)).sample(3).log_p.shape
    torch.Size([3, 5])
    """

    def __init__(
        self,
        encoder: Callable[[Tensor], Distribution],
        decoder: Callable[[Tensor], Distribution],
        prior: Distribution | Callable[[], Distribution] | None = None,
        *,
        latent_dim: int | None = None,
        data_shape: tuple[int, ...] | None = None,
        examples: Tensor | None = None,
    ):
        super().__init__()
        self.encoder, self.decoder, self.prior = encoder, decoder, prior
        self._latent_dim, self.data_shape = latent_dim, data_shape
        if (data_shape is None) != (examples is None):
            raise ValueError("a conditional model needs both data_shape and examples of its conditions.")
        self.register_buffer("examples", examples)
        self.compiled: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None

    examples: Tensor | None
    """Conditions that `simulate` draws from."""

    def apart(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Data `[B, ...]` and conditions `[B, C]` of rows that hold both; None for a model without conditions."""
        if self.data_shape is None or self.examples is None:
            return x, None
        size = math.prod(self.data_shape)
        if x.shape[1:] != (size + self.examples.shape[1],):
            raise ValueError(
                f"expected rows of {size} values and {self.examples.shape[1]} conditions, got {list(x.shape)}."
            )
        return x[:, :size].reshape(len(x), *self.data_shape), x[:, size:]

    def decode(self, z: Tensor, y: Tensor | None = None) -> Distribution:
        """p(x | z, y) for latents `[N, D]` and conditions `[N, C]`."""
        z = _like_weights(z, self.decoder)
        return self.decoder(z if y is None else torch.cat([z, y.to(z)], -1))

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the compiled function, which belongs to this model's weights: copies compile their own."""
        return {**self.__dict__, "compiled": None}

    @property
    def latent_dim(self) -> int | None:
        """D, if it was given or the prior has it; otherwise None."""
        if self._latent_dim is not None or self.prior is None:
            return self._latent_dim
        return self.prior_like(torch.empty(0)).event_shape[0]

    def objective(
        self, method: str | Callable[..., AnnealedEstimator], x: Tensor | None = None, **options: Any
    ) -> AnnealedEstimator:
        """The estimator of a method such as "l-mcvae-sigmoid-k5", sized for this model; see `mcvae methods`.

        Args:
            method: its key, or a recipe such as `mcvae.recipes.cmcd`.
            x: data, which models that do not know their latent dimension encode to find out, and whose size amortised
                methods such as "mcd-k5" ask for.
            options: of the recipe, such as num_steps.

        >>> import mcvae
        >>> from mcvae.models import build_model
        >>> model = build_model((4,), 2, kind="real", network="mlp", likelihood="student-t")
        >>> model.objective("l-mcvae-k3").num_steps
        3
        >>> model.objective(mcvae.recipes.cmcd, torch.zeros(5, 4), num_steps=3).num_steps
        3
        """
        latent_dim = self.latent_dim
        if latent_dim is None and x is not None:
            with torch.no_grad(), eval_mode(self):
                latent_dim = self.encoder(x[:1]).event_shape[0]
        if latent_dim is None:
            raise ValueError("this model does not know its latent dimension: build it with latent_dim=..., or give x.")
        context_dim = 0 if x is None else x[0].numel()
        if not isinstance(method, str):
            sizes = {"latent_dim": latent_dim, "context_dim": context_dim}
            asked = signature(method).parameters
            return method(**{name: size for name, size in sizes.items() if name in asked} | options)
        if options:
            raise TypeError(f"options are for recipes; the key {method!r} says everything. Got {', '.join(options)}.")
        config = parse_key(method)
        return method_named(config.name).build(config, latent_dim, context_dim)

    def encode(self, x: Tensor) -> "Latents":
        """Mean and scale of q(z | x) for data `[B, ...]`, `[B, D]` each; of a flow, from 256 samples.

        >>> from mcvae.models import build_model
        >>> model = build_model((4,), 2, kind="real", network="mlp", likelihood="student-t")
        >>> model.encode(torch.zeros(3, 4)).mean.shape
        torch.Size([3, 2])
        """
        with torch.no_grad(), eval_mode(self):
            q = self.encoder(x)
            try:
                return Latents(q.mean, q.stddev)
            except NotImplementedError:  # a flow
                z = draw(q, (256,), seeded_generator("encode", device=x.device))
                return Latents(z.mean(0), z.std(0))

    def reconstruct(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """Mean of p(x | z) at the mean of q(z | x), or at latents `[B, D]` of your own, `[B, ...]`."""
        with torch.no_grad(), eval_mode(self):
            mean: Tensor = self.decode(self.encode(x).mean if z is None else z, self.apart(x)[1]).mean
        return mean

    def score(self, x: Tensor, *, generator: Generator | None = None, **options: Any) -> Evidence:
        """log p(x) of every datum with its error, by annealed importance sampling: low ones are unusual.

        For many data use `mcvae.evaluate`, which works in batches.

        Args:
            x: data `[B, ...]`.
            generator: source of all randomness.
            options: of `mcvae.estimate_log_evidence`, such as num_steps or num_samples.
        """
        with eval_mode(self):
            bridge = self.bridge(x)
            return estimate_log_evidence(
                bridge.log_joint, bridge.initial, context=bridge.context, generator=generator, **options
            )

    def bridge(
        self,
        x: Tensor,
        *,
        path: Path | None = None,
        memory: Literal["normal", "low"] = "normal",
        compile: bool = False,
        kl_weight: float = 1.0,
    ) -> Bridge:
        """The bridge from q(z | x) to p(x, z) for a batch of data `[B, ...]`; x is the context.

        Args:
            x: the data.
            path: geometric by default.
            memory: "low" trades time for memory in long chains; see `Bridge`.
            compile: let `torch.compile` build the value and score of the joint, once for each shape of batch. It takes
                half a minute, gains for some networks and loses for others; where it fails, a warning says so.
            kl_weight: β, for training: the joint is p(z) p(x | z)^(1/β), and β times its ELBO is the β-VAE's.
        """
        if compile and memory == "low":
            raise ValueError(
                'compile=True and memory="low" exclude each other: torch cannot recompute inside torch.func.'
            )
        if compile and kl_weight != 1:
            raise ValueError("compile=True and a kl_weight exclude each other; train without one of them.")
        if not isinstance(x, Tensor):
            raise TypeError(f"x must be a tensor [B, ...], got {type(x).__name__}. Use torch.as_tensor(x).")
        self.apart(x)  # raises for rows without conditions before the encoder sees them
        path = path if path is not None else GeometricPath()
        log_joint = _CompiledJoint(self, x) if compile else partial(self.log_joint, x, kl_weight=kl_weight)
        initial = self.encoder(x)
        if not isinstance(initial, Distribution):
            raise TypeError(
                "the encoder must return a torch.distributions.Distribution over latents, got "
                f"{type(initial).__name__}. Wrap its output, for example Independent(Normal(mean, scale), 1)."
            )
        bridge = Bridge(initial, log_joint, path, x.reshape(len(x), -1), memory)
        if bridge.initial.batch_shape != (len(x),):
            raise ValueError(
                f"the encoder must return one distribution per datum, batch shape [{len(x)}], got "
                f"{list(bridge.initial.batch_shape)}."
            )
        return bridge

    def log_joint(self, x: Tensor, z: Tensor, kl_weight: float = 1.0) -> Tensor:
        """log p(x, z) for data `[B, ...]` and latents `[S, B, D]`, as `[S, B]`; see `bridge` for another weight."""
        num_samples, batch, _ = z.shape
        x, y = self.apart(x)
        given = None if y is None else y.expand(num_samples, *y.shape).flatten(0, 1)
        likelihood = self.decode(z.flatten(0, 1), given)
        if not isinstance(likelihood, Distribution):
            raise TypeError(
                "the decoder must return a torch.distributions.Distribution over data, got "
                f"{type(likelihood).__name__}. Wrap its output, for example Independent(Bernoulli(logits=output), 1)."
            )
        rows = x if num_samples == 1 else x.expand(num_samples, *x.shape).flatten(0, 1)
        try:
            log_likelihood: Tensor = likelihood.log_prob(rows)
        except (ValueError, RuntimeError) as error:
            over = likelihood.batch_shape + likelihood.event_shape
            if over == rows.shape:
                raise
            raise ValueError(
                f"the decoder must return a distribution over data {list(rows.shape[1:])}, got one of shape "
                f"{list(over)} for {len(rows)} latents. Change the size of its output."
            ) from error
        if log_likelihood.shape != (num_samples * batch,):
            raise ValueError(
                f"the decoder must return one distribution per latent row, so that log_prob(x) has shape "
                f"[{num_samples * batch}], got {list(log_likelihood.shape)}. Wrap it in "
                f"torch.distributions.Independent(distribution, {x.dim() - 1})."
            )
        log_prior: Tensor = self.prior_like(z).log_prob(z) if self.prior is not None else _log_standard_normal(z)
        if log_prior.shape != (num_samples, batch):
            raise ValueError(
                f"the prior must be over one latent, batch shape [] and event shape [{z.shape[-1]}], so that "
                f"log_prob(z) has shape {[num_samples, batch]}, got {list(log_prior.shape)}. Wrap it in "
                "torch.distributions.Independent(distribution, 1)."
            )
        log_likelihood = log_likelihood.reshape(num_samples, batch)
        return log_prior + (log_likelihood if kl_weight == 1 else log_likelihood / kl_weight)

    def simulate(
        self, num_data: int, latent_dim: int | None = None, *, generator: Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Draw `(x [N, ...], z [N, D])` from the model; z is an exact posterior sample given x.

        Conditions are drawn from the model's examples of them, and stand behind x.

        Args:
            num_data: N.
            latent_dim: D; needed only if neither model nor prior knows it.
            generator: source of all randomness.
        """
        latent_dim = self.latent_dim if latent_dim is None else latent_dim
        if latent_dim is None:
            raise ValueError(
                "simulate needs latent_dim, because this model was built without latent_dim or a prior that knows it."
            )
        like = next(self.parameters(), torch.empty(0)).new_empty(latent_dim)
        with torch.no_grad(), eval_mode(self):
            z = draw(self.prior_like(like), (num_data,), generator)
            if self.examples is None:
                return draw(self.decode(z), (), generator), z
            chosen = torch.randint(len(self.examples), (num_data,), generator=generator, device=z.device)
            y = self.examples[chosen]
            return torch.cat([draw(self.decode(z, y), (), generator).flatten(1), y], 1), z

    def prior_like(self, like: Tensor) -> Distribution:
        """p(z), for latents like `[..., D]`."""
        if self.prior is None:
            return standard_normal_prior(like)
        return self.prior if isinstance(self.prior, Distribution) else self.prior()


class _CompiledJoint:
    """log p(x, ·) with its score from one compiled function, shared by all batches of a model."""

    def __init__(self, model: LatentVariableModel, x: Tensor):
        self.model, self.x = model, x

    def __call__(self, z: Tensor) -> Tensor:
        return self.model.log_joint(self.x, z)

    def value_and_score(self, z: Tensor) -> tuple[Tensor, Tensor]:
        model = self.model
        if model.compiled is None:
            model.compiled = torch.compile(partial(_differentiated, model), backend=_inductor)
        try:
            with without_trace():
                return model.compiled(self.x, z)
        except Exception as error:  # whatever a compiler may raise
            cause = getattr(error, "inner_exception", error)  # what torch.compile wraps
            reason = (str(cause).strip().splitlines() or [""])[0]
            message = f"the model could not be compiled ({type(cause).__name__}: {reason}); continuing without."
            warnings.warn(message, stacklevel=2)
            model.compiled = partial(_by_autograd, model)
            return model.compiled(self.x, z)


def _inductor(module: GraphModule, example: Sequence[Tensor]) -> Any:
    from torch._inductor.compile_fx import compile_fx

    refuse_own_gradients(module)
    return compile_fx(module, example)


def _by_autograd(model: LatentVariableModel, x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    value, score = value_and_score(partial(model.log_joint, x), z)
    assert score is not None
    return value, score


def _differentiated(model: LatentVariableModel, x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """Value and score as a function whose own derivative is an ordinary first one, which compilers understand."""

    def total(z: Tensor) -> tuple[Tensor, Tensor]:
        value = model.log_joint(x, z)
        return value.sum(), value

    score, value = torch.func.grad(total, has_aux=True)(z)
    return value, score


def _like_weights(z: Tensor, decoder: Callable[[Tensor], Distribution]) -> Tensor:
    """Latents in the type of a decoder in half precision; chains stay in single, or they would forget small steps."""
    weight = next(decoder.parameters(), None) if isinstance(decoder, nn.Module) else None
    return z if weight is None or weight.dtype not in (torch.float16, torch.bfloat16) else z.to(weight.dtype)


def _log_standard_normal(z: Tensor) -> Tensor:
    """log N(z; 0, I_D) in three operators, where the distribution needs twelve."""
    return -0.5 * (z.square().sum(-1) + z.shape[-1] * math.log(2 * math.pi))


def standard_normal_prior(like: Tensor) -> Distribution:
    """p(z) = N(0, I_D) for latents like `[..., D]`."""
    zero = like.new_zeros(like.shape[-1])
    return Independent(Normal(zero, torch.ones_like(zero)), 1)
