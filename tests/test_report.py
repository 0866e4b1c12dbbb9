"""The page over runs and reproductions: what it says, what it survives, and how a real browser sees it."""

import csv
import json
import os
import random
import shutil
import subprocess
import sys

import pytest
import yaml
from PIL import Image

from mcvae.cli import main
from mcvae.report.charts import Series, chart
from mcvae.report.comparison import answers
from mcvae.report.groups import groups
from mcvae.report.page import write_page
from mcvae.runs.discovery import find
from mcvae.runs.plain import RunError

HOSTILE = "<script>alert(1)</script>'\"&amp;"
METHODS = {"vae": (0, 1, -24.0), "iwae": (0, 10, -23.0), "l-mcvae": (5, 1, -23.6)}


def make_run(folder, method="vae", *, steps=None, samples=None, shift=0.0, name="digits", evaluate=True, images=40):
    """A run folder as `mcvae train` and `mcvae evaluate` leave it."""
    usual_steps, usual_samples, level = METHODS[method]
    steps, samples, level = steps or usual_steps, samples or usual_samples, level + shift
    source = random.Random(0)
    (folder / "pictures").mkdir(parents=True)
    for picture in ("samples", "reconstructions", "worst"):
        Image.new("L", (60, 60), 90).save(folder / "pictures" / f"{picture}.png")
    config = {
        "data": {"name": name, "transform": "binarize", "batch_size": 50},
        "model": {"likelihood": "bernoulli"},
        "method": {"name": method, "num_steps": steps, "num_samples": samples, "schedule": "linear"},
        "run": {"seed": 0, "epochs": 12},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    columns = ["epoch", "train_bound", "val_bound", "val_nll", "acceptance", "step_size", "acceptances", "step_sizes"]
    with open(folder / "metrics.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*columns, "seconds"])
        for epoch in range(1, 13):
            bound = level - 9 / epoch
            chain = [0.9, 0.1, "0.9 " * steps, "0.1 " * steps] if steps else ["", "", "", ""]
            writer.writerow([epoch, bound, bound - 0.2, -bound if epoch % 4 == 0 else "", *chain, epoch * (1 + steps)])
    evaluation = {
        **dict.fromkeys(("importance", "iwae_10", "pareto_k", "sandwich")),
        "num_images": images,
        "split": "test",
        "num_steps": 8,
        "num_samples": 64,
        "start": "encoder",
        "bound": level,
        "bound_se": 0.2,
        "nll": -level - 0.4,
        "nll_se": 0.2,
        "gap": 0.4,
        "gap_se": 0.02,
        "nll_interval": [-level - 0.8, -level],
        "nll_se_chains": 0.01,
        "ess": 60.0,
        "acceptance": 0.8,
        "nonfinite": 0,
        "rate": 5.0,
        "distortion": 19.0,
        "active_units": 16,
        "latent_dim": 16,
        "verdict": "converged",
        "weights": {"edges": [-1.0, 0.0, 1.0, 2.0], "counts": [10, 70, 20]},
    }
    result = {
        "status": "finished",
        "data": name,
        "transform": "binarize",
        "likelihood": "bernoulli",
        "batch_size": 50,
        "method": method,
        "num_steps": steps,
        "num_samples": samples,
        "schedule": "linear",
        "seed": 0,
        "evaluations": samples * (steps + 1),
        "epochs": 12,
        "seconds": 12.0 * (1 + steps),
        "versions": {"mcvae": "0.1.0", "torch": "2.13.0"},
    }
    (folder / "result.json").write_text(json.dumps(result | ({"evaluation": evaluation} if evaluate else {})))
    if evaluate:
        with open(folder / "evaluation.csv", "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["image", "log_likelihood", "ess", "pareto_k", "bound"])
            for index in range(images):
                own = source.gauss(0, 5)
                noise = source.gauss(0, 0.05)
                writer.writerow([index, level + 0.4 + own + noise, source.uniform(50, 64), 0.3, level + own - noise])
    return folder


def make_reproduction(folder):
    """A folder as the reproductions of the paper's experiments leave it."""
    folder.mkdir(parents=True)
    columns = "experiment dataset method seed epoch metric value standard_error paper paper_deviation protocol"
    with open(folder / "records.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*columns.split(), "evaluations", "seconds"])
        for seed in range(3):
            for method, value, cost in (("vae", 91.0, 1), ("l-mcvae-k5", 90.0, 6), ("l-mcvae-k10", 89.0, 11)):
                for epoch in (10, 30):
                    paper = (89.9, 0.1) if method == "l-mcvae-k5" and epoch == 30 else ("", "")
                    shown = value + seed / 10 - epoch / 100
                    writer.writerow(
                        ["images", "mnist", method, seed, epoch, "nll", shown, 0.2, *paper, "clean", cost, 60]
                    )
    picture = '<svg xmlns="http://www.w3.org/2000/svg" width="900" height="60"><script>alert(2)</script></svg>'
    (folder / "figure.svg").write_text(picture)
    (folder / "provenance.json").write_text(json.dumps({"command": "mcvae reproduce images", "seconds": 60}))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("report")
    make_run(root / "runs" / "vae")
    make_run(root / "runs" / "iwae", "iwae")
    make_run(root / "runs" / "l-mcvae-k5", "l-mcvae")
    make_run(root / "runs" / "l-mcvae-k10", "l-mcvae", steps=10, shift=0.2)
    make_run(root / "runs" / HOSTILE.replace("/", "∕"), "vae", name=HOSTILE, evaluate=False)
    make_reproduction(root / "images")
    return root


@pytest.fixture(scope="module")
def page(folder):
    return write_page([str(folder)], folder / "new" / "report.html")


def test_the_answer_comes_first_with_its_error_and_cost(folder):
    (answer,) = answers(groups(find([str(folder / "runs" / name) for name in ("vae", "iwae", "l-mcvae-k5")]).runs))
    assert answer.headline == "digits: iwae-10 explains the 40 test images best, with NLL 22.60 ± 0.20 nats."
    difference, error = (float(part) for part in answer.details.split("It is ")[2].split(" nats")[0].split(" ± "))
    assert abs(difference - 1.0) < 0.03  # than the VAE, image by image
    assert error < 0.03
    assert "12 s and 10 model evaluations per datum and step; vae took 12 s and 1." in answer.details


def test_differences_within_the_noise_are_said_to_be(tmp_path):
    make_run(tmp_path / "a", "vae", images=40)
    make_run(tmp_path / "b", "iwae", shift=-1.1, images=40)
    for name in ("a", "b"):
        (tmp_path / name / "evaluation.csv").unlink()  # no images to pair: errors over images are all there is
    (answer,) = answers(groups(find([str(tmp_path)]).runs))
    assert "0.10 ± 0.28 nats better than iwae-10, which is within the noise" in answer.details


def test_other_images_are_not_compared(tmp_path):
    make_run(tmp_path / "a", "vae", images=40)
    make_run(tmp_path / "b", "iwae", images=30)
    assert ["No other method" in answer.details for answer in answers(groups(find([str(tmp_path)]).runs))] == [
        True,
        True,
    ]


def test_other_data_of_the_same_name_are_not_compared(tmp_path):
    """Two files called data.csv, or one that is split or conditioned otherwise: as many rows, but others."""
    for method, condition in (("vae", []), ("iwae", ["age"])):
        file = make_run(tmp_path / method, method, name="data") / "config.yaml"
        config = yaml.safe_load(file.read_text())
        config["data"] |= {"fingerprint": f"print-of-{method}", "condition": condition}
        file.write_text(yaml.safe_dump(config))
    found = groups(find([str(tmp_path)]).runs)
    assert all("No other method" in answer.details for answer in answers(found))
    assert sorted(group.label for group in found) == [
        "iwae-10 (condition age, fingerprint print-of-iwae)",
        "vae (no condition, fingerprint print-of-vae)",
    ]


def test_the_page_has_everything(page, folder):
    text = page.read_text()
    for words in (
        "iwae-10 explains the 40 test images best",
        "Bound on validation data",
        "Step size by transition",
        "Every transition of runs/l-mcvae-k5",
        "Held-out bound by K",
        "Held-out NLL by evaluations per datum",
        "Held-out NLL by seconds",
        "Weights of the chains",
        "Effective sample size",
        "Pareto k̂",
        "Explained worst, the worst first",
        "images, mnist: l-mcvae-k10 has the lowest NLL, 88.80 ± 0.10.",
        "89.90 ± 0.10",
        "mcvae reproduce images",
        "torch 2.13.0",
        "To cite this page",
    ):
        assert words in text, words
    assert 20_000 < len(text) < 3_000_000
    assert [path.name for path in (folder / "new").iterdir()] == ["report.html"]  # no temporary file stays


def test_what_users_wrote_is_text(page):
    text = page.read_text()
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(1)" in text
    assert text.count("<script") == 1


def test_the_page_is_made_without_torch(page, folder):
    program = (
        "import sys; from mcvae.cli import main; "
        f"main(['report', {str(folder)!r}, '--out', {str(folder / 'again.html')!r}]); "
        "print([name for name in ('torch', 'lightning', 'mcvae.training.run') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_missing_pieces_become_sentences(tmp_path):
    run = make_run(tmp_path / "run", "l-mcvae", evaluate=False)
    for name in ("result.json", "metrics.csv"):
        (run / name).unlink()
    shutil.rmtree(run / "pictures")
    text = write_page([str(run)], tmp_path / "page.html").read_text()
    for words in ("Nothing has been evaluated yet", "Not finished", "No pictures were found", "two values of K"):
        assert words in text
    reproduction = make_reproduction(tmp_path / "reproduction")
    for name in ("figure.svg", "provenance.json"):
        (reproduction / name).unlink()
    assert "89.90 ± 0.10" in write_page([str(reproduction)], tmp_path / "page.html").read_text()


@pytest.mark.parametrize("change", [{"nll": float("inf"), "nll_se": float("nan")}, {"bound": None, "ess": None}, None])
def test_a_model_that_diverged_is_shown_as_such(change, folder, tmp_path):
    for name in ("vae", "iwae"):
        shutil.copytree(folder / "runs" / name, tmp_path / name)
    make_run(tmp_path / "broken", "l-mcvae")
    path = tmp_path / "broken" / "result.json"
    result = json.loads(path.read_text())
    result["evaluation"] = {"verdict": "not converged"} if change is None else result["evaluation"] | change
    path.write_text(json.dumps(result))
    text = write_page([str(tmp_path)], tmp_path / "page.html").read_text()
    assert "not finite" in text
    assert "iwae-10 explains the 40 test images best" in text
    assert "nan" not in text.split("<main")[1].split("data:image")[0]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("result.json", "{", "result.json is not valid JSON"),
        ("result.json", "[]", "must hold a JSON object"),
        ("result.json", "{}", "result.json lacks data, method, num_samples, num_steps"),
        ("result.json", '{"data": 3, "method": "vae", "num_steps": 0, "num_samples": 1}', "data must be str, got '3'"),
        ("config.yaml", "a: [", "config.yaml is not valid YAML"),
        ("config.yaml", "a: &a {b: *a}", "config.yaml is not valid YAML: Circular"),
        ("config.yaml", "\x00", "config.yaml is not valid YAML"),
        ("metrics.csv", "epoch,seconds\n1,2,3\n", "metrics.csv, line 2, does not have as many fields"),
        ("evaluation.csv", "image,bound\n1\n", "evaluation.csv, line 2"),
    ],
)
def test_a_damaged_file_is_named_and_the_others_are_shown(name, content, message, tmp_path, capsys):
    run = make_run(tmp_path / "runs" / "damaged")
    (run / name).write_text(content)
    page = tmp_path / "page.html"
    if name.endswith("csv"):  # the run is shown without it
        assert main(["report", str(run), "--out", str(page)]) == 0
    else:
        assert main(["report", str(run), "--out", str(page)]) == 1
        assert message in capsys.readouterr().err
        assert not page.exists()
    make_run(tmp_path / "runs" / "sound", "iwae")
    for command in (["report", str(tmp_path / "runs"), "--out", str(page)], ["compare", str(tmp_path / "runs")]):
        assert main(command) == 0
        assert f"left out: {run / name}" in (error := capsys.readouterr().err)
        assert message in error
    assert "iwae-10" in page.read_text()
    assert message.split(":")[0].split("'")[0] in page.read_text()


def test_nothing_to_report_is_an_error(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 1
    assert "is not a run folder" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "nowhere")]) == 1
    assert "does not exist" in capsys.readouterr().err
    assert main(["report", str(make_run(tmp_path / "run")), "--out", str(tmp_path)]) == 1
    assert "is a folder; give a file" in capsys.readouterr().err


def test_folders_are_searched_but_not_for_ever(tmp_path):
    deep = tmp_path.joinpath(*"abcd")
    make_run(deep / "run")
    with pytest.raises(FileNotFoundError, match="up to 4 folders below"):
        find([str(tmp_path)])
    found = find([str(tmp_path / "a"), str(tmp_path / "a" / "b")])  # twice the same
    assert [run.name for run in found.runs] == ["run"]


def test_parts_of_a_reproduction_are_shown_when_asked_for(tmp_path):
    make_reproduction(tmp_path / "quick-clean" / "images")
    part = make_run(tmp_path / "quick-clean" / "cells" / "vae-s0")
    shutil.copy(tmp_path / "quick-clean" / "images" / "records.csv", part)
    runs, reproductions, _ = find([str(tmp_path)])
    assert ([run.name for run in runs], [found.name for found in reproductions]) == ([], ["images"])
    runs, reproductions, _ = find([str(tmp_path / "quick-clean" / "cells")])
    assert ([run.name for run in runs], reproductions) == (["vae-s0"], [])


def test_many_long_runs_still_make_a_page():
    names = [f"run {index}" for index in range(40)]
    epochs = [float(epoch) for epoch in range(5000)]
    found = chart("x", "epoch", "y", [Series(name, index, epochs, epochs) for index, name in enumerate(names)])
    assert max(len(points) for points in found.points) <= 150
    assert found.points[0][-1][2] == "run 0 · epoch 4999 · y 4999"  # the last one is kept


# A real browser. In CI its absence is a failure.


@pytest.fixture(scope="module")
def browser():
    names = (
        "chromium",
        "chromium-browser",
        "google-chrome",
        "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    )
    executable = next(filter(None, map(shutil.which, names)), None)
    if executable is None:
        if os.environ.get("CI"):
            pytest.fail("the page is tested in a browser: apt-get install chromium, or install Google Chrome")
        pytest.skip("chromium is not installed")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def opened(browser, page):
    """Open the page from disk; at the end nothing was complained about and nothing was fetched."""
    complaints, requests, contexts = [], [], []

    def open_page(width=1440, **options):
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        contexts.append(context)
        tab = context.new_page()
        tab.on("console", lambda message: complaints.append(message.text))
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.on("dialog", lambda dialog: complaints.append("a script of the data ran"))
        tab.on("request", lambda request: requests.append(request.url))
        tab.goto(page.as_uri())
        return tab

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []
    assert [url for url in requests if not url.startswith(("file:", "data:"))] == []
    assert sum(url.startswith("file:") for url in requests) == len(contexts)


@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_overflows(opened, width, scheme):
    tab = opened(width, color_scheme=scheme)
    tab.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    assert tab.evaluate("document.documentElement.scrollWidth") == width
    outside = """(width) => [...document.querySelectorAll('main *')]
        .filter((e) => !e.closest('.scroll, pre, .chart svg') && e.getBoundingClientRect().right > width + 1)
        .map((e) => e.outerHTML.slice(0, 80))"""
    assert tab.evaluate(outside, width) == []
    ground = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(255, 255, 255)") == (scheme == "light")


def test_columns_sort_both_ways_and_by_keyboard(opened):
    tab = opened()
    names = "[...document.querySelectorAll('#table tbody th')].map((e) => e.textContent.trim().split('/').pop())"
    button = tab.locator("#table thead button", has_text="seconds")
    button.click()
    assert tab.evaluate(names)[-1] == "l-mcvae-k10"
    assert tab.locator("#table th[aria-sort=ascending]").inner_text().startswith("seconds")
    button.focus()
    tab.keyboard.press("Enter")
    assert tab.evaluate(names)[0] == "l-mcvae-k10"
    tab.locator("#table thead button", has_text="NLL").first.click()
    assert tab.evaluate(names)[0] == "iwae"
    assert "alert" in tab.evaluate(names)[-1]  # not evaluated: last, whichever way
    tab.locator("#table thead button", has_text="NLL").first.click()
    assert "alert" in tab.evaluate(names)[-1]


def test_charts_show_values_to_pointer_and_keyboard(opened):
    tab = opened()
    figure, tip = tab.locator(".chart[data-points*='iwae']").first, tab.locator("#tip")
    assert tip.is_hidden()
    figure.scroll_into_view_if_needed()
    box = figure.locator("svg").first.bounding_box()
    tab.mouse.move(box["x"] + box["width"] * 0.95, box["y"] + box["height"] * 0.3)
    assert tip.is_visible()
    assert "epoch 12" in tip.inner_text()
    tab.mouse.move(0, 0)
    assert tip.is_hidden()
    figure.focus()
    tab.keyboard.press("Home")
    first = tip.inner_text()
    tab.keyboard.press("ArrowRight")
    second = tip.inner_text()
    tab.keyboard.press("ArrowDown")
    other = tip.inner_text()
    assert ("epoch 1 " in first, "epoch 2 " in second, "epoch 2 " in other) == (True, True, True)
    assert other.split(" · ")[0] != second.split(" · ")[0]
    tab.keyboard.press("Escape")
    assert tip.is_hidden()


def test_hostile_names_are_shown_and_not_run(opened):
    tab = opened()
    assert tab.locator("#table tbody th", has_text="<script>alert(1)").count() == 1
    assert tab.locator("script").count() == 1


def test_paper_shows_what_is_folded_on_the_screen(opened):
    tab = opened()
    tab.emulate_media(media="print")
    tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert tab.locator("details:not([open])").count() == 0
    assert tab.locator("nav").is_hidden()
    assert tab.locator("pre", has_text="binarize").first.is_visible()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_the_demonstration_tells_both_sides_and_its_page_opens_with_one_picture(tmp_path, monkeypatch, capsys):
    import torch

    from mcvae.experiments import demonstration, toy_posterior
    from mcvae.runs.config import EvaluationSettings

    torch.set_default_dtype(torch.float32)  # as for a user
    brief = EvaluationSettings(num_steps=4, num_samples=4, spacing="linear", compare_iwae=False)
    monkeypatch.setattr(demonstration, "EVALUATION", brief)
    small = {"num_updates": 5, "num_steps": 2, "num_data": 100, "batches": 2}
    monkeypatch.setitem(toy_posterior.SIZES, "quick", small)
    assert main(["demo", "--epochs", "1", "--folder", str(tmp_path / "demo")]) == 0
    told = capsys.readouterr().out
    for words in ("a ring", "energy distance", "8 × 8 digits", "explains the 300 test images best", "docs/choosing.md"):
        assert words in told
    page = (tmp_path / "demo" / "report.html").read_text()
    start = page.index("<main")
    opening = page.index('<section class="story"')
    assert start < opening < page.index('<img src="data:image/png') < page.index('<section class="answer"')


def test_what_the_demonstration_says_about_digits_follows_from_the_numbers():
    from mcvae.report.story import _on_digits

    iwae, chain = ("iwae-6", (0.5, 0.04)), ("a-mcvae-k5", (0.3, 0.04))
    assert "samples are enough" in _on_digits(dict([iwae, chain]))
    assert "chains win" in _on_digits(dict([chain, iwae]))
    assert "A-MCVAE, K = 5: +0.30 ± 0.04" in _on_digits(dict([iwae, chain]))


def test_half_a_demonstration_is_refused(tmp_path):
    from mcvae.report.story import tell_story
    from mcvae.runs.discovery import Found

    with pytest.raises(RunError, match="does not hold a whole demonstration"):
        tell_story(Found([], [], []), tmp_path)
