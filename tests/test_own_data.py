"""Data of one's own: what is read, how it is split, and what is said about files that are wrong."""

import h5py
import numpy as np
import pyarrow
import pytest
import torch
from PIL import Image
from pyarrow import parquet

from mcvae.data import DataError, Splits, Standardization, check_source, load_data

ROWS = np.array([[0.5, -1.0], [1.5, 2.0], [2.5, 0.25], [3.5, 7.0], [4.5, 9.0], [5.5, 1.0]])


def everything(data: Splits) -> torch.Tensor:
    return torch.cat([data.train, data.validation, data.test])


def sorted_rows(values) -> list[list[float]]:
    return sorted(torch.as_tensor(values, dtype=torch.float32).flatten(1).tolist())


def save(path, array):
    match path.suffix:
        case ".npy":
            np.save(path, array)
        case ".npz":
            np.savez(path, x=array)
        case ".pt":
            torch.save(torch.from_numpy(array), path)
        case ".csv":
            np.savetxt(path, array, delimiter=",", header="first,second", comments="")
        case ".tsv":
            np.savetxt(path, array, delimiter="\t")
        case ".parquet":
            parquet.write_table(pyarrow.table({"first": array[:, 0], "second": array[:, 1]}), path)
        case ".h5ad":
            with h5py.File(path, "w") as file:
                file["X"] = array


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".pt", ".csv", ".tsv", ".parquet", ".h5ad"])
def test_every_format_gives_the_same_rows(suffix, tmp_path):
    path = tmp_path / f"rows{suffix}"
    save(path, ROWS)
    data = load_data(str(path), validation=2, test=1)
    with pytest.raises(
        ValueError, match="between 0 and 5 of 6 data, got 6. Choose another --data.validation or --data"
    ):
        load_data(str(path), test=6)
    assert (data.kind, data.shape) == ("real", (2,))
    assert [len(data.train), len(data.validation), len(data.test)] == [3, 2, 1]
    assert sorted_rows(everything(data)) == sorted_rows(ROWS)
    if suffix in (".csv", ".parquet"):
        assert data.columns == ["first", "second"]


def test_a_split_depends_on_its_seed_only(tmp_path):
    save(tmp_path / "rows.npy", np.arange(200.0).reshape(100, 2) + 0.5)
    path = str(tmp_path / "rows.npy")
    first, again, other = (load_data(path, split_seed=seed) for seed in (0, 0, 1))
    assert torch.equal(first.test, again.test)
    assert torch.equal(first.train, again.train)
    assert not torch.equal(first.test, other.test)
    assert first.fingerprint() == again.fingerprint() != other.fingerprint()
    assert torch.equal(load_data(path, validation=3).test, first.test)  # whatever becomes of the others


def test_splits_in_a_file_are_respected(tmp_path):
    parts = {"train": ROWS[:3], "validation": ROWS[3:4], "test": ROWS[4:]}
    np.savez(tmp_path / "parts.npz", **parts)
    torch.save({name: torch.from_numpy(part) for name, part in parts.items()}, tmp_path / "parts.pt")
    lines = [f"{a},{b},{split}" for split, part in parts.items() for a, b in part]
    (tmp_path / "parts.csv").write_text("\n".join(["a,b,split", *lines[::-1]]))
    for name in ("parts.npz", "parts.pt", "parts.csv"):
        data = load_data(str(tmp_path / name))
        for split, part in parts.items():
            assert sorted_rows(data.split(split)) == sorted_rows(part), name


@pytest.mark.parametrize(
    ("array", "kind", "shape"),
    [
        (np.full((5, 4, 3), 7, np.uint8), "pixels", (1, 4, 3)),
        (np.full((5, 3, 4, 6), 7, np.uint8), "pixels", (3, 4, 6)),
        (np.full((5, 4, 6, 3), 7, np.uint8), "pixels", (3, 4, 6)),
        (np.full((5, 9), 7, np.uint8), "counts", (9,)),
        (np.full((5, 9), 7, np.int64), "counts", (9,)),
        (np.full((5, 9), 7.0), "counts", (9,)),
        (np.full((5, 9), True), "counts", (9,)),
        (np.full((5, 9), -7), "real", (9,)),
        (np.full((5, 9), 0.5), "real", (9,)),
        (np.full((5, 1, 4, 4), 0.5), "real", (1, 4, 4)),
    ],
)
def test_the_values_say_what_they_are(array, kind, shape, tmp_path):
    np.save(tmp_path / "x.npy", array)
    data = load_data(str(tmp_path / "x.npy"))
    assert (data.kind, data.shape) == (kind, shape)


def test_a_person_may_say_what_they_are(tmp_path):
    np.save(tmp_path / "x.npy", np.full((5, 9), 7))
    assert load_data(str(tmp_path / "x.npy"), kind="real").kind == "real"
    np.save(tmp_path / "x.npy", np.full((5, 4, 4), 300))
    with pytest.raises(DataError, match="x.npy, row 0.*whole numbers from 0 to 255"):
        load_data(str(tmp_path / "x.npy"), kind="pixels")
    np.save(tmp_path / "x.npy", ROWS)
    with pytest.raises(DataError, match=r"x.npy, row 0 .*, column 0: expected a count"):
        load_data(str(tmp_path / "x.npy"), kind="counts")


def photographs(folder, number=6, size=(10, 8), mode="L", suffix=".png"):
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(number):
        colour = 20 * index + 10
        Image.new(mode, size, colour if mode == "L" else (colour, 0, 255)).save(folder / f"{index}{suffix}")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MCVAE_DATA", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_folder_of_images_is_read_from_its_files_and_then_from_the_cache(tmp_path, cache, monkeypatch):
    photographs(tmp_path / "photos" / "cats", 3)
    photographs(tmp_path / "photos" / "dogs", 3)
    data = load_data(str(tmp_path / "photos"))
    assert data.shape == (1, 8, 10)
    assert sorted(everything(data)[:, 0, 0, 0].tolist()) == [10, 10, 30, 30, 50, 50]
    assert not [path for path in (tmp_path / "photos").rglob("*") if path.suffix == ".npz"]  # it is not ours
    changed = tmp_path / "photos" / "dogs" / "0.png"
    Image.new("L", (10, 8), 99).save(changed)
    assert 99 in everything(load_data(str(tmp_path / "photos")))[:, 0, 0, 0].tolist()


def test_images_are_resized_and_cropped_on_request(tmp_path, cache):
    wide = np.zeros((20, 60), np.uint8)
    wide[:, 20:40] = 200  # what the crop keeps
    (tmp_path / "photos").mkdir()
    for index in range(4):
        Image.fromarray(wide).save(tmp_path / "photos" / f"{index}.png")
    photographs(tmp_path / "photos" / "more", 1, (40, 40), "RGB", ".jpg")
    with pytest.raises(DataError, match="one size.*0.png has 60×20 pixels.*0.jpg has 40×40.*--data.size 64"):
        load_data(str(tmp_path / "photos"))
    data = load_data(str(tmp_path / "photos"), size=10)
    assert data.shape == (3, 10, 10)  # one is in colour
    greys = [image for image in everything(data) if image[2, 5, 5] == 200]
    assert len(greys) == 4
    assert all((image[:, :, 1:-1] == 200).all() for image in greys)


def test_only_a_folder_of_images_has_a_size(tmp_path):
    np.save(tmp_path / "x.npy", ROWS)
    for name in (str(tmp_path / "x.npy"), "digits"):
        with pytest.raises(ValueError, match="--data.size is for a folder of images"):
            load_data(name, size=8)


def test_folders_of_splits_are_respected(tmp_path, cache):
    for split, number in {"train": 4, "val": 2, "test": 3}.items():
        photographs(tmp_path / "photos" / split, number)
    data = load_data(str(tmp_path / "photos"))
    assert [len(data.train), len(data.validation), len(data.test)] == [4, 2, 3]
    assert data.test[:, 0, 0, 0].tolist() == [10, 30, 50]


def wrong_files(folder):
    """Name of a file, what writes it, and what must be said."""
    finite = ROWS.copy()
    finite[3, 1] = np.nan
    return {
        "nan.npy": (lambda p: np.save(p, finite), r"nan.npy, row 3 .*column 1 is not a finite number"),
        "nan.csv": (lambda p: save(p, finite), r"nan.csv, line 5, column 'second' is not a finite number"),
        "inf.pt": (lambda p: save(p, np.full((4, 2), np.inf)), "inf.pt, row 0"),
        "word.csv": (
            lambda p: p.write_text("a,b\n1,2\n3,\n"),
            "word.csv, line 3, column 'b': expected a number, got ''",
        ),
        "comma.csv": (
            lambda p: p.write_text("a;b\n1,5;2,5\n"),
            "comma.csv, line 2, column 'a': expected a number, got '1,5'. Write decimals with a point",
        ),
        "ragged.csv": (lambda p: p.write_text("1,2\n3,4\n5\n"), "ragged.csv, line 3: expected 2 values.*got 1"),
        "twice.csv": (lambda p: p.write_text("a,a\n1,2\n"), "two columns called 'a'"),
        "names.csv": (lambda p: p.write_text("a,b\n"), "no line of numbers"),
        "split.csv": (lambda p: p.write_text("a,split\n1,train\n2,other\n"), "split.csv, line 3.*got 'other'"),
        "binary.csv": (lambda p: p.write_bytes(b"\xff\xfe\x00"), "binary.csv is not a text table"),
        "short.csv": (lambda p: p.write_text("1,2\n3,4\n"), "at least 3 rows"),
        "empty.csv": (lambda p: p.touch(), "empty.csv is empty"),
        "empty.npy": (lambda p: p.touch(), "empty.npy is empty"),
        "none.npy": (lambda p: np.save(p, ROWS[:0]), r"none.npy: .*got an array of shape \[0, 2\]"),
        "flat.npy": (lambda p: np.save(p, ROWS[0]), r"flat.npy: expected rows .*shape \[2\]"),
        "text.npy": (lambda p: np.save(p, np.array([["a"]])), "text.npy: expected numbers"),
        "object.npy": (lambda p: np.save(p, np.array([{}])), "object.npy cannot be read.*objects are never read"),
        "cut.npz": (lambda p: p.write_bytes(b"PK\3\4rest"), "cut.npz cannot be read"),
        "odd.npz": (lambda p: np.savez(p, a=ROWS, b=ROWS), "odd.npz holds the arrays a, b"),
        "mixed.npz": (
            lambda p: np.savez(p, train=ROWS, test=ROWS[:, :1]),
            "one shape.*train have .2., those of test .1.",
        ),
        "code.pt": (lambda p: torch.save({"x": "word"}, p), "code.pt.*tensor"),
        "module.pt": (lambda p: torch.save(torch.nn.Linear(1, 1), p), "module.pt.*damaged, or holds Python objects"),
        "sparse.pt": (lambda p: torch.save(torch.eye(4).to_sparse(), p), "sparse.pt cannot be read.*Sparse"),
        "large.npy": (lambda p: np.save(p, np.full((4, 2), 2**31)), "large.npy, row 0 .*column 0: expected a count"),
        "huge.npy": (lambda p: np.save(p, 1e39 * ROWS), "huge.npy, row 0 .*column 0 is not a finite number of 32 bits"),
        "date.parquet": (
            lambda p: parquet.write_table(pyarrow.table({"a": ROWS[:, 0], "b": np.arange(6).astype("M8[D]")}), p),
            "date.parquet, row 0 .*column 'b': expected a number, got '1970-01-01",
        ),
        "html.parquet": (lambda p: p.write_text("<html>"), "html.parquet cannot be read as Parquet"),
        "html.h5ad": (lambda p: p.write_text("<html>"), "html.h5ad cannot be read"),
        "photos": (lambda p: (photographs(p, 3), (p / "2.png").write_bytes(b"no")), "photos/2.png"),
        "damaged": (lambda p: (photographs(p, 3, (99, 99)), cut(p / "1.png")), "damaged/1.png"),
        "nothing": (lambda p: p.mkdir(), "nothing has no images"),
        "unlearned": (lambda p: photographs(p / "test"), "none called train"),
    }


def cut(path):
    path.write_bytes(path.read_bytes()[:-30])


@pytest.mark.parametrize("name", wrong_files(None))
def test_a_wrong_file_is_named_with_its_row(name, tmp_path, cache):
    write, message = wrong_files(tmp_path)[name]
    write(tmp_path / name)
    with pytest.raises(DataError, match=message):
        load_data(str(tmp_path / name))


def test_what_a_model_is_conditioned_on_must_be_there(tmp_path, cache):
    np.save(tmp_path / "x.npy", ROWS)
    with pytest.raises(DataError, match=r"no array 'age'.* it holds one array without a name"):
        load_data(str(tmp_path / "x.npy"), condition=["age"])
    photographs(tmp_path / "photos", 3)
    with pytest.raises(DataError, match=r"--data.condition \[folder\], got 'age'"):
        load_data(str(tmp_path / "photos"), condition=["age"])
    path = tmp_path / "x.csv"
    for cell in ("", "nan", "inf"):
        path.write_text("a,age\n" + "1,2.5\n" * 8 + f"1,{cell}\n")
        with pytest.raises(DataError, match="x.csv, line 10: 'age', which the model is conditioned on, is missing"):
            load_data(str(path), condition=["age"])
    parquet.write_table(pyarrow.table({"a": ROWS[:, 0], "y": ["u", "v", None, "u", "v", "u"]}), tmp_path / "x.parquet")
    with pytest.raises(DataError, match="x.parquet, row 2 .*'y', which .* is missing"):
        load_data(str(tmp_path / "x.parquet"), condition=["y"])
    for categories in ([b"p", b"q"], [1, 2]):
        with h5py.File(tmp_path / "x.h5ad", "w") as file:
            file["X"] = np.ones((4, 3))
            file["obs/y/codes"], file["obs/y/categories"] = [0, 1, -1, 0], categories
        with pytest.raises(DataError, match="x.h5ad, row 2 .*'y', which .* is missing"):
            load_data(str(tmp_path / "x.h5ad"), condition=["y"])


def test_other_labels_are_other_data(tmp_path):
    for name, label in {"one": 0, "other": 1}.items():
        np.savez(tmp_path / name, x=ROWS, label=np.array([0, 1, 0, 1, 0, label]))
    one, other = (load_data(str(tmp_path / f"{name}.npz"), condition=["label"]) for name in ("one", "other"))
    assert one.fingerprint() != other.fingerprint()


def test_names_of_rows_are_not_modelled(tmp_path):
    """As `DataFrame.to_csv`, R's `write.csv` and `DataFrame.to_parquet` add them."""
    (tmp_path / "x.csv").write_text(",a,b\n" + "".join(f"{row},{a},{b}\n" for row, (a, b) in enumerate(ROWS)))
    index = pyarrow.table({"a": ROWS[:, 0], "b": ROWS[:, 1], "__index_level_0__": np.arange(6)})
    parquet.write_table(index, tmp_path / "x.parquet")
    for name in ("x.csv", "x.parquet"):
        data = load_data(str(tmp_path / name))
        assert data.columns == ["a", "b"]
        assert sorted_rows(everything(data)) == sorted_rows(ROWS)


def test_images_of_16_bits_keep_their_greys(tmp_path, cache):
    (tmp_path / "photos").mkdir()
    for index in range(4):
        Image.fromarray(np.full((4, 4), 257 * 50 * index, np.uint16)).save(tmp_path / "photos" / f"{index}.png")
    data = load_data(str(tmp_path / "photos"))
    assert data.shape == (1, 4, 4)
    assert sorted(everything(data)[:, 0, 0, 0].tolist()) == [0, 50, 100, 150]


def test_photographs_stand_as_the_camera_was_held(tmp_path, cache):
    (tmp_path / "photos").mkdir()
    lying = Image.fromarray(np.array([[10, 20, 30], [40, 50, 60]], np.uint8))
    exif = lying.getexif()
    exif[0x0112] = 6  # turn it clockwise
    for index in range(3):
        lying.save(tmp_path / "photos" / f"{index}.png", exif=exif)
    data = load_data(str(tmp_path / "photos"))
    assert data.train[0, 0].tolist() == [[40, 10], [50, 20], [60, 30]]


def test_sparse_counts_and_their_layer_are_read(tmp_path):
    """Compressed rows as anndata writes them; the layer of counts is preferred to a normalised X."""
    path = tmp_path / "cells.h5ad"
    with h5py.File(path, "w") as file:
        file["X"] = np.full((4, 3), 0.5)
        counts = file.create_group("layers/counts")
        counts.attrs.update({"encoding-type": "csr_matrix", "shape": (4, 3)})
        counts["data"], counts["indices"], counts["indptr"] = [5.0, 2.0, 9.0], [2, 0, 1], [0, 1, 2, 2, 3]
        file.create_group("var").attrs["_index"] = "_index"
        file["var"]["_index"] = np.array([b"a", b"b", b"c"])
    data = load_data(str(path), validation=1, test=1)
    assert (data.kind, data.columns) == ("counts", ["a", "b", "c"])
    assert sorted_rows(everything(data)) == [[0, 0, 0], [0, 0, 5], [0, 9, 0], [2, 0, 0]]
    with h5py.File(path, "a") as file:
        file["layers/counts"].attrs["encoding-type"] = "coo"
    with pytest.raises(DataError, match="got coo"):
        load_data(str(path))


def test_names_and_paths_are_told_apart(tmp_path):
    check_source("mnist")
    with pytest.raises(ValueError, match="Did you mean 'mnist'"):
        check_source("mnits")
    with pytest.raises(FileNotFoundError, match="nowhere.npy does not exist"):
        check_source("nowhere.npy")
    (tmp_path / "x.xls").touch()
    with pytest.raises(ValueError, match=r"x.xls cannot be read: expected a folder of images, or a file that ends in"):
        check_source(str(tmp_path / "x.xls"))


def test_standardised_training_data_have_mean_0_and_scale_1_and_return():
    data = (torch.randn(50, 3) * torch.tensor([1.0, 20.0, 0.0]) + 5).float()
    standardize = Standardization.of(data)
    values = standardize(data, torch.Generator())
    assert values.mean(0).abs().max() < 1e-5
    assert (values.std(0, correction=0) - torch.tensor([1.0, 1.0, 0.0])).abs().max() < 1e-5
    assert torch.allclose(standardize.undone(values), data.to(values), atol=1e-4)


def test_a_part_of_celeba_will_do_and_says_so(tmp_path):
    for split, number in {"train": 4, "validation": 2, "test": 1}.items():
        photographs(tmp_path / "celeba-7" / split, number, (178, 218), "RGB", ".jpg")
    for root in (tmp_path, tmp_path / "celeba-7"):
        data = load_data("celeba", root)
        assert data.shape == (3, 64, 64)
        assert [len(data.train), len(data.validation), len(data.test)] == [4, 2, 1]
        assert data.note.startswith("these are 7 of the 202,599 images of CelebA: results are not comparable")
