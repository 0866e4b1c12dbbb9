"""The evidence of a Pyro model: eight schools, whose truth is -31.311 by quadrature. Needs the extra pyro."""

import pyro
import pyro.distributions as dist
import torch

import mcvae
from mcvae.adapters.from_pyro import from_pyro

EFFECTS = torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
ERRORS = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])


def eight_schools(effects: torch.Tensor, errors: torch.Tensor) -> None:
    """Non-centred, as Pyro's own example."""
    mu = pyro.sample("mu", dist.Normal(torch.tensor(0.0), 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(torch.tensor(5.0)))
    with pyro.plate("schools", len(effects)):
        eta = pyro.sample("eta", dist.Normal(torch.tensor(0.0), 1.0))
        pyro.sample("y", dist.Normal(mu + tau * eta, errors), obs=effects)


if __name__ == "__main__":
    posterior = from_pyro(eight_schools, EFFECTS, ERRORS)
    evidence = mcvae.estimate_log_evidence(
        posterior.log_joint, posterior.initial, num_steps=32, generator=torch.Generator().manual_seed(0)
    )
    print(
        f"log evidence {evidence.log_evidence.item():.2f} ± {evidence.standard_error.item():.2f}: {evidence.verdict()}"
    )
    samples = posterior.constrained(evidence.posterior(500))
    print(f"mean of mu {samples['mu'].mean():.1f}, of tau {samples['tau'].mean():.1f}")
