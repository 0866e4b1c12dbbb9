"""Models of other libraries: their evidence against quadrature, and their parts against their own numbers."""

import math
import warnings
from types import SimpleNamespace

import arviz
import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

import mcvae
from mcvae.adapters.from_pyro import from_pyro
from mcvae.adapters.from_pythae import from_pythae
from mcvae.adapters.from_scvi import from_scvi
from mcvae.adapters.to_arviz import to_arviz

EFFECTS = torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0], dtype=torch.float64)
ERRORS = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0], dtype=torch.float64)


def centred(effects, errors):
    mu = pyro.sample("mu", dist.Normal(torch.tensor(0.0), 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(torch.tensor(5.0)))
    with pyro.plate("schools", 8):
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        pyro.sample("y", dist.Normal(theta, errors), obs=effects)


def non_centred(effects, errors):
    mu = pyro.sample("mu", dist.Normal(torch.tensor(0.0), 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(torch.tensor(5.0)))
    with pyro.plate("schools", 8):
        eta = pyro.sample("eta", dist.Normal(torch.tensor(0.0), 1.0))
        pyro.sample("y", dist.Normal(mu + tau * eta, errors), obs=effects)


def evidence_by_quadrature() -> float:
    """Effects and mu integrate out exactly: y ~ N(0, diag(σ² + τ²) + 25); tau by quadrature of log τ."""
    log_tau = torch.linspace(-25, 15, 20_001)
    tau = log_tau.exp()
    noise = (ERRORS.square() + tau[:, None].square()).diag_embed()
    marginal = torch.distributions.MultivariateNormal(torch.zeros(8), noise + 25.0)
    log_integrand = marginal.log_prob(EFFECTS) + torch.distributions.HalfCauchy(5.0).log_prob(tau) + log_tau
    return float(log_integrand.logsumexp(0) + math.log(float(log_tau[1] - log_tau[0])))


@pytest.mark.slow
@pytest.mark.parametrize(("model", "num_steps"), [(non_centred, 64), (centred, 256)])
def test_the_evidence_of_eight_schools_is_that_of_quadrature(model, num_steps):
    posterior = from_pyro(model, EFFECTS, ERRORS)
    evidence = mcvae.estimate_log_evidence(
        posterior.log_joint,
        posterior.initial,
        num_steps=num_steps,
        num_samples=256,
        generator=torch.Generator().manual_seed(0),
    )
    error = abs(float(evidence.log_evidence) - evidence_by_quadrature())
    assert error < 4 * float(evidence.standard_error), evidence.verdict()
    assert float(evidence.standard_error) < 0.3
    assert error < abs(float(evidence.log_evidence) - evidence_by_quadrature() - math.log(5))  # a lost constant is seen
    samples = posterior.constrained(evidence.posterior(200, generator=torch.Generator().manual_seed(1)))
    assert (samples["tau"] > 0).all()
    assert abs(float(samples["mu"].mean()) - 4.4) < 1.5  # the literature's posterior mean


def test_unconstrained_latents_carry_their_jacobian():
    """Gamma(2, 1) prior and an exponential datum 1: evidence E[s e^-s] = 2/8; by quadrature of log s."""

    def model(x):
        scale = pyro.sample("scale", dist.Gamma(torch.tensor(2.0), 1.0))
        pyro.sample("x", dist.Exponential(scale), obs=x)

    posterior = from_pyro(model, torch.tensor(1.0))
    z = torch.linspace(-20, 10, 30_001)
    total = posterior.log_joint(z.reshape(-1, 1, 1)).logsumexp(0) + math.log(float(z[1] - z[0]))
    assert abs(float(total) - math.log(0.25)) < 1e-6
    assert torch.allclose(posterior.constrained(torch.zeros(1, 1, 1))["scale"], torch.ones(1))
    assert posterior.bridge().sample(5).log_p.shape == (5, 1)


@pytest.mark.slow
def test_a_simplex_and_a_vector_are_put_back_in_their_shapes():
    def model():
        share = pyro.sample("share", dist.Dirichlet(torch.ones(3)))
        pyro.sample("loading", dist.Normal(torch.zeros(2, 3), 1.0).to_event(2))
        pyro.sample(
            "x", dist.Categorical(share).expand([10]).to_event(1), obs=torch.tensor([0] * 5 + [1] * 3 + [2] * 2)
        )

    posterior = from_pyro(model)
    samples = posterior.constrained(torch.randn(4, 1, 2 + 6))
    assert samples["share"].shape == (4, 3)
    assert torch.allclose(samples["share"].sum(1), torch.ones(4))
    assert samples["loading"].shape == (4, 2, 3)
    e = mcvae.estimate_log_evidence(
        posterior.log_joint, posterior.initial, num_steps=16, generator=torch.Generator().manual_seed(0)
    )
    arrangements = math.factorial(10) // (math.factorial(5) * math.factorial(3) * math.factorial(2))
    exact = -math.log(math.comb(12, 2) * arrangements)  # a uniform simplex makes all 66 counts equally likely
    assert abs(float(e.log_evidence) - exact) < 4 * float(e.standard_error) + 1e-3


def test_a_latent_whose_support_depends_on_others_is_refused():
    """Bounds of one draw would cut off what lies beyond: log p(4) was -8.0 or -10.6 by the seed, instead of -3.88."""

    def model(x):
        largest = pyro.sample("largest", dist.Gamma(torch.tensor(2.0), 1.0))
        level = pyro.sample("level", dist.Uniform(torch.tensor(0.0), largest))
        pyro.sample("x", dist.Normal(level, 0.5), obs=x)

    with pytest.raises(ValueError, match="support of the Pyro model's latent 'level' depends on other latents"):
        from_pyro(model, torch.tensor(4.0), num_draws=2)


def test_what_pyro_cannot_give_is_refused():
    def discrete():
        pyro.sample("coin", dist.Bernoulli(0.5))

    with pytest.raises(ValueError, match="discrete latent 'coin'"):
        from_pyro(discrete)
    with pytest.raises(ValueError, match="no latents"):
        from_pyro(lambda: pyro.sample("x", dist.Normal(0.0, 1.0), obs=torch.tensor(1.0)))
    with pytest.raises(TypeError, match="get_posterior"):
        from_pyro(centred, EFFECTS, ERRORS, guide=lambda: None)


@pytest.mark.slow
def test_chains_start_from_a_trained_guide():
    pyro.clear_param_store()
    guide = pyro.infer.autoguide.AutoMultivariateNormal(non_centred)
    svi = pyro.infer.SVI(non_centred, guide, pyro.optim.Adam({"lr": 0.02}), pyro.infer.Trace_ELBO())
    for _ in range(300):
        svi.step(EFFECTS, ERRORS)
    posterior = from_pyro(non_centred, EFFECTS, ERRORS, guide=guide, num_draws=2)
    e = mcvae.estimate_log_evidence(
        posterior.log_joint, posterior.initial, num_steps=32, generator=torch.Generator().manual_seed(0)
    )
    assert abs(float(e.log_evidence) - evidence_by_quadrature()) < 4 * float(e.standard_error)


def test_arviz_reads_posterior_samples_and_keeps_the_evidence():
    initial = torch.distributions.Independent(torch.distributions.Normal(torch.zeros(1, 2), 2.0), 1)
    evidence = mcvae.estimate_log_evidence(
        lambda z: -0.5 * (z - 1).square().sum(-1), initial, num_steps=8, generator=torch.Generator().manual_seed(0)
    )
    data = to_arviz(evidence, 400, generator=torch.Generator().manual_seed(1))
    assert data.posterior["z"].shape == (1, 400, 1, 2)
    summary = arviz.summary(data, kind="stats")
    assert np.allclose(summary["mean"], 1, atol=0.3)
    assert data.posterior.attrs["log_evidence"] == evidence.log_evidence.tolist()
    named = to_arviz(evidence, named={"theta": torch.ones(5, 3)})
    assert list(named.posterior.data_vars) == ["theta"]


class _Part(nn.Module):
    """The interface of pythae's encoders and decoders: outputs by name."""

    def __init__(self, network, *names):
        super().__init__()
        self.network, self.names = network, names

    def forward(self, x):
        return dict(zip(self.names, self.network(x).chunk(len(self.names), -1), strict=True))


def pythae_like(loss):
    """A module with what `from_pythae` uses of `pythae.models.VAE`."""
    model = nn.Module()
    model.encoder = _Part(nn.Linear(4, 4), "embedding", "log_covariance")
    last = nn.Sigmoid() if loss == "bce" else nn.Identity()
    model.decoder = _Part(nn.Sequential(nn.Linear(2, 4), last), "reconstruction")
    model.latent_dim, model.model_config = 2, SimpleNamespace(reconstruction_loss=loss)
    return model


@pytest.mark.parametrize("loss", ["mse", "bce"])
def test_a_model_like_those_of_pythae_has_the_likelihood_of_its_loss(loss):
    theirs = pythae_like(loss)
    model = from_pythae(theirs)
    x = torch.rand(3, 4).round() if loss == "bce" else torch.randn(3, 4)
    z = torch.randn(3, 2)
    output = theirs.decoder(z)["reconstruction"]
    if loss == "mse":
        expected = -0.5 * ((x - output) ** 2).sum(1) - 2 * math.log(2 * math.pi)
    else:
        expected = -nn.functional.binary_cross_entropy(output, x, reduction="none").sum(1)
    assert torch.allclose(model.decoder(z).log_prob(x), expected)
    assert torch.allclose(model.encode(x).scale, (0.5 * theirs.encoder(x)["log_covariance"]).exp())
    assert model.simulate(2)[0].shape == (2, 4)
    if loss == "mse":  # linear and Gaussian: the evidence is known
        weight, bias = (p.detach() for p in theirs.decoder.network[0].parameters())
        truth = torch.distributions.MultivariateNormal(bias, weight @ weight.T + torch.eye(4)).log_prob(x)
        e = model.score(x, num_steps=16, generator=torch.Generator().manual_seed(0))
        assert ((e.log_evidence - truth).abs() < 5 * e.standard_error + 1e-3).all()


def test_what_is_not_pythae_is_refused():
    with pytest.raises(TypeError, match="expected a model of pythae, which has encoder"):
        from_pythae(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="reconstruction_loss mse or bce, got 'l1'"):
        from_pythae(pythae_like("l1"))


class _Genes(torch.distributions.Poisson):
    """Like scvi's distributions: samples are drawn in inference mode."""

    @torch.inference_mode()
    def sample(self, sample_shape=torch.Size()):  # noqa: B008
        return super().sample(sample_shape)


class _ScviModule(nn.Module):
    """What `from_scvi` uses of `scvi.module.VAE`: counts Poisson(library × softmax(W z + the batch's shift))."""

    use_size_factor_key = False

    def __init__(self, n_latent, n_genes, *, use_observed_lib_size, latent_distribution="normal"):
        super().__init__()
        self.n_latent, self.use_observed_lib_size = n_latent, use_observed_lib_size
        self.weight = nn.Parameter(torch.randn(n_genes, n_latent))
        self.shift = nn.Parameter(torch.randn(2, n_genes))
        self.dropout = nn.Dropout(0.5)  # a module in training mode would be random
        self.library_log_means, self.library_log_vars = torch.tensor([[2.0, 3.0]]), torch.tensor([[0.25, 0.5]])
        simplex = latent_distribution == "ln"
        self.z_encoder = SimpleNamespace(z_transformation=nn.Softmax(-1) if simplex else nn.Identity())

    def _get_inference_input(self, tensors):
        return {"x": tensors["X"], "batch_index": tensors["batch"]}

    def inference(self, x, batch_index):
        qz = torch.distributions.Normal(self.dropout(x.log1p() @ self.weight) / 10, 1.0)
        library, ql = x.sum(1, keepdim=True).log(), None
        if not self.use_observed_lib_size:
            ql = torch.distributions.Normal(library, 0.5)
        return {"z": qz.rsample(), "qz": qz, "ql": ql, "library": library}

    def _get_generative_input(self, tensors, inference_outputs):
        return {"z": inference_outputs["z"], "library": inference_outputs["library"], "batch_index": tensors["batch"]}

    def generative(self, z, library, batch_index):
        scale = (z @ self.weight.T + self.shift[batch_index[:, 0]]).softmax(-1)
        return {"px": _Genes(library.exp() * scale, validate_args=False)}

    def _compute_local_library_params(self, batch_index):
        return self.library_log_means[0, batch_index], self.library_log_vars[0, batch_index]


class _Scvi:
    """What `from_scvi` uses of `scvi.model.SCVI`: minibatches by name, of which empty ones are left out."""

    is_trained = True

    def __init__(self, module, counts, batch):
        self.module, self.counts, self.batch = module, counts, batch

    def _validate_anndata(self, adata):
        return adata if adata is not None else self.counts

    def _make_data_loader(self, adata, indices, batch_size):
        rows = torch.arange(len(adata)) if indices is None else torch.tensor(indices)
        for some in rows.split(2):
            yield {"X": adata[some], "batch": self.batch[some], "extra_continuous_covs": torch.zeros(len(some), 0)}


def scvi_like(**settings):
    torch.manual_seed(0)
    module = _ScviModule(1 if not settings["use_observed_lib_size"] else 2, 4, **settings)
    counts = torch.tensor([[3.0, 0.0, 5.0, 1.0], [0.0, 12.0, 2.0, 4.0], [1.0, 0.0, 0.0, 0.0]])
    return _Scvi(module, counts, torch.tensor([[0], [1], [1]]))


@pytest.mark.parametrize(
    "settings",
    [
        {"use_observed_lib_size": True},
        {"use_observed_lib_size": True, "latent_distribution": "ln"},
        {"use_observed_lib_size": False},
    ],
    ids=["observed-library", "simplex", "latent-library"],
)
def test_a_model_like_those_of_scvi_has_the_evidence_of_quadrature(settings):
    theirs = scvi_like(**settings)
    model, cells = from_scvi(theirs)
    axis = torch.linspace(-7, 7, 401)
    cell = 2 * math.log(float(axis[1] - axis[0]))
    grid = torch.cartesian_prod(axis, axis)
    prior = torch.distributions.Normal(0.0, 1.0).log_prob(grid).sum(1)
    module, truth = theirs.module, []
    for x, batch in zip(theirs.counts, theirs.batch, strict=True):
        z, library = grid, x.sum().log()
        if not settings["use_observed_lib_size"]:  # the library is 2 + 0.5 l, or 3 + √0.5 l in the second batch
            z, library = grid[:, :1], (2 + 0.5 * grid[:, 1:]) if batch == 0 else (3 + 0.5**0.5 * grid[:, 1:])
        if "latent_distribution" in settings:
            z = z.softmax(-1)
        rate = library.exp() * (z @ module.weight.T + module.shift[batch]).softmax(-1)
        likelihood = torch.distributions.Poisson(rate).log_prob(x).sum(1)
        truth.append(float((prior + likelihood).detach().logsumexp(0) + cell))
    e = model.score(cells, num_steps=32, generator=torch.Generator().manual_seed(0))
    error = e.log_evidence - torch.tensor(truth)
    assert (error.abs() < 5 * e.standard_error + 1e-3).all(), e.verdict()
    assert (e.standard_error < 0.2).all()
    swapped = e.log_evidence[[1, 0, 2]] - torch.tensor(truth)
    assert (swapped.abs() > 5 * e.standard_error)[:2].all()  # a cell with the conditions of another is seen


def test_cells_of_scvi_are_evaluated_with_a_verdict_and_leave_the_stream_alone():
    theirs = scvi_like(use_observed_lib_size=True)
    model, cells = from_scvi(theirs, indices=[2, 0])
    assert torch.equal(cells[:, :4], theirs.counts[[2, 0]])
    before = torch.get_rng_state()
    found = mcvae.evaluate(model, cells, simulated=8)
    assert torch.equal(torch.get_rng_state(), before)
    assert found.summary["verdict"].startswith("converged")
    x, z = model.simulate(5, generator=torch.Generator().manual_seed(0))
    assert x.shape == (5, 4 + 2)
    assert z.shape == (5, 2)


def test_what_scvi_cannot_give_is_refused():
    with pytest.raises(TypeError, match="whose module has inference; got Linear"):
        from_scvi(nn.Linear(2, 2))
    theirs = scvi_like(use_observed_lib_size=True)
    theirs.counts[1] = 0
    with pytest.raises(ValueError, match="cell 1 has no counts"):
        from_scvi(theirs, indices=[0, 1])
    theirs.is_trained = False
    with pytest.raises(ValueError, match="not trained"):
        from_scvi(theirs)


@pytest.mark.slow
@pytest.mark.parametrize(("n_latent", "observed"), [(2, True), (1, False)])
def test_a_trained_model_of_scvi_itself_has_the_evidence_of_quadrature(n_latent, observed):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scvi = pytest.importorskip("scvi", reason="the extra scvi is not installed")
        import anndata

        torch.set_default_dtype(torch.float32)  # scvi knows no other
        scvi.settings.seed = 0
        random = np.random.default_rng(0)
        mean = np.exp(0.7 * random.normal(size=(400, 2)) @ random.normal(size=(2, 30)) + 0.5)
        data = anndata.AnnData(random.poisson(random.gamma(2, mean / 2)).astype(np.float32))
        data.obs["donor"], data.obs["age"] = random.integers(0, 2, 400).astype(str), random.normal(size=400)
        scvi.model.SCVI.setup_anndata(data, batch_key="donor", continuous_covariate_keys=["age"])
        theirs = scvi.model.SCVI(data, n_latent=n_latent, gene_likelihood="nb", use_observed_lib_size=observed)
        theirs.train(max_epochs=20, accelerator="cpu", enable_progress_bar=False, logger=False)
        importance = theirs.get_marginal_ll(indices=list(range(8)), n_mc_samples=2000, return_mean=False)
        model, cells = from_scvi(theirs, indices=range(8))
        batch = next(iter(theirs._make_data_loader(adata=data, indices=list(range(8)), batch_size=8)))
        with torch.no_grad():
            found, _, losses = theirs.module.forward(batch, inference_kwargs={"n_samples": 5})
    # quadrature is of our joint: that it is scvi's, and q, too, is seen at points of its own
    normal, z, log_scale = torch.distributions.Normal, found["z"], 0.0
    joint = normal(0.0, 1.0).log_prob(z).sum(-1) - losses.reconstruction_loss["reconstruction_loss"]
    q = found["qz"].log_prob(z).sum(-1)
    if not observed:
        mean, variance = theirs.module._compute_local_library_params(batch["batch"])
        joint = joint + normal(mean, variance.sqrt()).log_prob(found["library"]).sum(-1)
        q = q + found["ql"].log_prob(found["library"]).sum(-1)
        z = torch.cat([z, (found["library"] - mean) / variance.sqrt()], -1)
        log_scale = variance.sqrt().log().squeeze(-1)
    with torch.no_grad():
        torch.testing.assert_close(model.log_joint(cells, z) - log_scale, joint, rtol=0, atol=1e-3)
        torch.testing.assert_close(model.encoder(cells).log_prob(z) - log_scale, q, rtol=0, atol=1e-4)
    axis = torch.linspace(-7, 7, 281)
    grid = torch.cartesian_prod(axis, axis)[:, None]
    cell = 2 * math.log(float(axis[1] - axis[0]))
    with torch.no_grad():
        truth = torch.cat([model.log_joint(row[None], grid).double().logsumexp(0) + cell for row in cells])
    e = model.score(cells, num_steps=64, generator=torch.Generator().manual_seed(0))
    assert ((e.log_evidence - truth).abs() < 5 * e.standard_error + 1e-3).all(), e.verdict()
    if observed:  # q is good then, and the density is that of scvi's own number
        assert ((importance - truth).abs() < 0.3).all()


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["mse", "bce"])
def test_a_trained_model_of_pythae_itself_is_evaluated(loss, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pythae = pytest.importorskip("pythae.models", reason="the extra pythae is not installed")
        torch.manual_seed(0)
        theirs = pythae.VAE(pythae.VAEConfig(input_dim=(1, 2, 3), latent_dim=2, reconstruction_loss=loss))
        x = torch.rand(64, 1, 2, 3).round()
        optimizer = torch.optim.Adam(theirs.parameters(), 1e-3)
        for _ in range(50):
            optimizer.zero_grad()
            theirs({"data": x}).loss.backward()
            optimizer.step()
        model = from_pythae(theirs)
        torch.manual_seed(1)
        loss_of_theirs = torch.stack([theirs({"data": x}).loss.detach() for _ in range(200)])
    bound = model.objective("vae")
    ours = torch.stack(
        [-bound(model.bridge(x), generator=torch.Generator().manual_seed(i)).bound.mean() for i in range(200)]
    )
    constant = 0.5 * 6 * math.log(2 * math.pi) if loss == "mse" else 0.0
    difference = ours.detach().mean() - constant - loss_of_theirs.mean()
    spread = (ours.var() + loss_of_theirs.var()).div(200).sqrt()
    assert abs(float(difference)) < 5 * float(spread)
    e = model.score(x[:4], num_steps=32, generator=torch.Generator().manual_seed(0))
    axis = torch.linspace(-7, 7, 281)
    grid = torch.cartesian_prod(axis, axis)[:, None]
    with torch.no_grad():
        truth = torch.cat([model.log_joint(row[None], grid).double().logsumexp(0) for row in x[:4]])
    truth += 2 * math.log(float(axis[1] - axis[0]))
    assert ((e.log_evidence - truth).abs() < 5 * e.standard_error + 1e-3).all()
