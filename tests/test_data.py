"""Data sets in their published layouts, whole and damaged; transforms and batches as laws."""

import functools
import gzip
import hashlib
import http.server
import io
import os
import pickle
import struct
import tarfile
import threading
import zipfile

import numpy as np
import pooch
import pytest
import torch
from PIL import Image

from mcvae.data import (
    DATASETS,
    TRANSFORMS,
    Batches,
    DataError,
    Splits,
    cache,
    celeba,
    cifar10,
    idx,
    load_images,
    omniglot,
)
from mcvae.data.splits import hold_out
from support import generator

TRAIN, TEST = "train-images-idx3-ubyte", "t10k-images-idx3-ubyte"


def random_pixels(*shape, seed=0):
    return torch.randint(256, shape, generator=generator(seed), dtype=torch.uint8)


def rows(pixels):
    return [bytes(row) for row in pixels.flatten(1).numpy()]


def md5(content):
    return hashlib.md5(content).hexdigest()


def same(first, second):
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def idx_bytes(pixels, magic=2051):
    return struct.pack(">4I", magic, len(pixels), 28, 28) + pixels.numpy().tobytes()


@pytest.fixture
def mnist(tmp_path, monkeypatch):
    monkeypatch.setattr(idx, "_COUNTS", {TRAIN: 12, TEST: 5})
    monkeypatch.setattr(idx, "_UNPACKED", {})
    folder = tmp_path / "MNIST" / "raw"
    folder.mkdir(parents=True)
    (folder / TRAIN).write_bytes(idx_bytes(random_pixels(12, 1, 28, 28)))
    (folder / TEST).write_bytes(idx_bytes(random_pixels(5, 1, 28, 28, seed=1)))
    return folder


class Python2Pickler(pickle._Pickler):
    """Writes bytes as the strings of Python 2, which CIFAR-10 was published from."""

    dispatch = pickle._Pickler.dispatch | {bytes: lambda self, b: self.write(b"T" + struct.pack("<i", len(b)) + b)}


def python2_pickle(content):
    file = io.BytesIO()
    Python2Pickler(file, protocol=2).dump(content)
    return file.getvalue().replace(b"numpy._core.multiarray", b"numpy.core.multiarray")


def write_cifar10(root, monkeypatch, **contents):
    """Four images per file, or the given contents, and their checksums in the loader's table."""
    folder = root / "cifar-10-batches-py"
    folder.mkdir()
    for seed, name in enumerate(cifar10._MD5):
        data = random_pixels(4, 3072, seed=seed).numpy()
        content = contents.get(name, python2_pickle({b"batch_label": b"", b"labels": [1] * 4, b"data": data}))
        (folder / name).write_bytes(content)
        monkeypatch.setitem(cifar10._MD5, name, md5(content))
    return folder


@pytest.fixture
def omniglot_home(tmp_path, monkeypatch):
    home = tmp_path / "omniglot-py"
    for part, count in {"images_background": 6, "images_evaluation": 3}.items():
        monkeypatch.setitem(omniglot._COUNTS, part, count)
        for number in range(count):
            folder = home / part / "Greek" / f"character{number // 2:02}"
            folder.mkdir(parents=True, exist_ok=True)
            paper = np.full((105, 105), 255, np.uint8)
            paper[: 10 * (number + 1), :25] = 0
            Image.fromarray(paper).convert("1").save(folder / f"{number:04}.png")
    return home


@pytest.fixture
def celeba_home(tmp_path, monkeypatch):
    """Six faces of one colour with a frame that the crop removes; the partition is not sorted by split."""
    monkeypatch.setattr(celeba, "_COUNTS", {"train": 3, "validation": 2, "test": 1})
    home = tmp_path / "celeba"
    (home / "img_align_celeba").mkdir(parents=True)
    for number in range(6):
        photograph = np.full((218, 178, 3), 255, np.uint8)
        photograph[30:188, 10:168] = 16 * number + np.array([0, 40, 80])
        Image.fromarray(photograph).save(home / "img_align_celeba" / f"{number:06}.jpg", quality=95)
    (home / "list_eval_partition.txt").write_text("".join(f"{n:06}.jpg {c}\n" for n, c in enumerate("012001")))
    return home


@pytest.fixture
def no_conversion(monkeypatch):
    def fail(*args):
        raise AssertionError("converted again")

    return lambda: monkeypatch.setattr(cache, "_convert_all", fail)


# Splits


def test_digits_are_complete_and_split_for_ever():
    digits = load_images("digits")
    assert [len(digits.split(s)) for s in ("train", "validation", "test")] == [1297, 200, 300]
    assert digits.shape == (1, 8, 8)
    assert set(torch.cat([digits.train, digits.test]).unique().tolist()) == {round(k * 255 / 16) for k in range(17)}
    fingerprint = hashlib.sha256(b"".join(rows(digits.validation) + rows(digits.test))).hexdigest()
    assert fingerprint.startswith("6c1f67ea8925c3bf"), "another split: published results are no longer comparable"


def test_splits_are_disjoint_and_complete():
    kept, held_out = hold_out(torch.arange(1000), 300)
    assert sorted(torch.cat([kept, held_out]).tolist()) == list(range(1000))
    assert kept.diff().min() > 0
    assert held_out.sort().values.tolist() != list(range(300))
    assert set(hold_out(torch.arange(1000), 100)[1].tolist()) < set(held_out.tolist())


def test_test_images_do_not_depend_on_validation(mnist):
    everything = {row for name in (TRAIN, TEST) for row in rows(_parsed(mnist / name))}
    for validation in (0, 5):
        images = load_images("mnist", mnist.parents[1], validation=validation)
        assert len(images.validation) == validation
        assert rows(images.test) == rows(_parsed(mnist / TEST))
        splits = [set(rows(images.split(s))) for s in ("train", "validation", "test")]
        assert set.union(*splits) == everything
        assert sum(map(len, splits)) == len(everything) == 17


def _parsed(path):
    return torch.frombuffer(bytearray(path.read_bytes()[16:]), dtype=torch.uint8).reshape(-1, 1, 28, 28)


def test_names_are_checked(mnist):
    assert list(DATASETS) == ["digits", "mnist", "fashion-mnist", "omniglot", "cifar10", "celeba"]
    with pytest.raises(ValueError, match="digits, mnist, fashion-mnist.*Did you mean 'fashion-mnist'"):
        load_images("fashion_mnist")
    with pytest.raises(ValueError, match="train, validation, test; got 'valid'"):
        load_images("digits").split("valid")
    with pytest.raises(ValueError, match="between 0 and 11 of 12 data, got 12"):
        load_images("mnist", mnist.parents[1], validation=12)
    with pytest.raises(ValueError, match="uint8"):
        Splits("grey", *(torch.zeros(1, 2, 2, dtype=torch.uint8) for _ in range(3)))
    with pytest.raises(ValueError, match="same size and type"):
        Splits("mixed", torch.zeros(1, 2), torch.zeros(0, 2), torch.zeros(1, 2, dtype=torch.int32))


def test_the_root_may_come_from_the_environment(mnist, monkeypatch):
    monkeypatch.setenv("MCVAE_DATA", str(mnist.parents[1]))
    assert len(load_images("mnist", validation=2, download=False).train) == 10


# MNIST


def test_compressed_files_are_read_as_the_plain_ones(mnist):
    plain = load_images("mnist", mnist.parents[1], validation=2)
    for name in (TRAIN, TEST):
        (mnist / f"{name}.gz").write_bytes(gzip.compress((mnist / name).read_bytes()))
        (mnist / name).unlink()
    packed = load_images("mnist", mnist.parents[1], validation=2, download=False)
    assert same([plain.train, plain.validation, plain.test], [packed.train, packed.validation, packed.test])


def test_an_idx_file_with_changed_pixels_is_named_with_its_checksum(mnist, monkeypatch):
    content = (mnist / TRAIN).read_bytes()
    md5 = hashlib.md5(content).hexdigest()
    monkeypatch.setattr(idx, "_UNPACKED", {f"MNIST/raw/{TRAIN}": md5})
    load_images("mnist", mnist.parent.parent, validation=2)
    (mnist / TRAIN).write_bytes(content[:-4] + b"\0\1\2\3")
    with pytest.raises(DataError, match=f"{TRAIN} is damaged.*: expected md5 {md5}"):
        load_images("mnist", mnist.parent.parent, validation=2)


@pytest.mark.parametrize(
    "damage",
    [
        lambda good: good[:-1],
        lambda good: good + b"\0",
        lambda good: b"",
        lambda good: struct.pack(">I", 2049) + good[4:],
        lambda good: good[:8] + struct.pack(">2I", 14, 56) + good[16:],
        lambda good: good[:4] + struct.pack(">I", 11) + good[8 : -28 * 28],
    ],
    ids=["truncated", "too long", "empty", "wrong magic", "wrong rows", "fewer images"],
)
@pytest.mark.parametrize("compress", [False, True])
def test_damaged_idx_files_are_named(mnist, damage, compress):
    path = mnist / (TRAIN + ".gz" * compress)
    content = damage((mnist / TRAIN).read_bytes())
    (mnist / TRAIN).unlink()
    path.write_bytes(gzip.compress(content) if compress else content)
    with pytest.raises(DataError, match=rf"{path}.*2051, 12, 28, 28.*Delete it and run again"):
        load_images("mnist", mnist.parents[1])


@pytest.mark.parametrize("damage", [lambda z: z[:-20], lambda z: b"<html>", lambda z: z[:20] + b"\xff" * 20 + z[40:]])
def test_damaged_compression_is_named(mnist, damage):
    path = mnist / f"{TRAIN}.gz"
    path.write_bytes(damage(gzip.compress((mnist / TRAIN).read_bytes())))
    (mnist / TRAIN).unlink()
    with pytest.raises(DataError, match=rf"{path}.*md5 f68b3c.*Delete it"):
        load_images("mnist", mnist.parents[1])


# Downloads


@pytest.fixture
def server(tmp_path, monkeypatch):
    """Serves the folder `served` on this machine."""
    (tmp_path / "served").mkdir()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Handler, directory=tmp_path / "served")
    ) as httpd:
        thread = threading.Thread(target=httpd.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_port}/"
        httpd.shutdown()
        thread.join()


def test_downloads_are_checked_and_kept(mnist, server, tmp_path, monkeypatch):
    checksums = {}
    for name in (TRAIN, TEST):
        packed = gzip.compress((mnist / name).read_bytes())
        (tmp_path / "served" / f"{name}.gz").write_bytes(packed)
        checksums[name] = md5(packed)
    plain = load_images("mnist", tmp_path, validation=2)
    monkeypatch.setattr(idx, "_MNIST", idx._Source("MNIST/raw", server, checksums))
    root = tmp_path / "new"
    assert same([load_images("mnist", root, validation=2).train], [plain.train])
    assert same([load_images("mnist", root, validation=2, download=False).train], [plain.train])
    monkeypatch.setattr(idx, "_MNIST", idx._Source("MNIST/raw", server, {**checksums, TEST: "0" * 32}))
    with pytest.raises(DataError, match=rf"{TEST}.*{server}.*{'0' * 32}.*MCVAE_DATA.*--data.root"):
        load_images("mnist", tmp_path / "other")
    assert os.listdir(tmp_path / "other/MNIST/raw") == [f"{TRAIN}.gz"]


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "omniglot", "cifar10"])
@pytest.mark.parametrize("download", [True, False])
def test_without_network_the_advice_is_complete(name, download, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(pooch, "retrieve", fail)
    advice = rf"{tmp_path}.*https?://.*md5 [0-9a-f]{{32}}.*MCVAE_DATA.*--data.root"
    with pytest.raises(DataError, match=advice) as error:
        load_images(name, tmp_path, download=download)
    assert ("no route to host" in str(error.value)) is download


def test_an_unreadable_folder_is_a_data_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="MCVAE_DATA"):
        load_images("mnist", tmp_path / "file")


# CIFAR-10


def test_cifar10_is_read_by_channel(tmp_path, monkeypatch):
    write_cifar10(tmp_path, monkeypatch)
    images = load_images("cifar10", tmp_path, validation=0, download=False)
    assert [len(images.train), len(images.validation), len(images.test)] == [20, 0, 4]
    expected = torch.cat([random_pixels(4, 3072, seed=seed) for seed in range(5)])
    assert torch.equal(images.train, expected.reshape(20, 3, 32, 32))
    assert torch.equal(images.test.flatten(1), random_pixels(4, 3072, seed=5))


class Malice:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_pickle_cannot_run_code(tmp_path, monkeypatch):
    """Even one whose checksum is right; an ordinary unpickler makes the folder."""
    content = pickle.dumps(Malice(tmp_path / "harm"), protocol=2)
    write_cifar10(tmp_path, monkeypatch, data_batch_1=content)
    with pytest.raises(DataError, match="data_batch_1.*mkdir"):
        load_images("cifar10", tmp_path)
    assert not (tmp_path / "harm").exists()
    pickle.loads(content)
    assert (tmp_path / "harm").exists()


@pytest.mark.parametrize(
    "content",
    [b"", b"\x80\x02garbage", python2_pickle([1]), python2_pickle({b"data": np.zeros((2, 7), np.uint8)})],
    ids=["empty", "garbage", "a list", "wrong shape"],
)
def test_other_pickles_are_named(tmp_path, monkeypatch, content):
    write_cifar10(tmp_path, monkeypatch, data_batch_2=content)
    with pytest.raises(DataError, match="data_batch_2.*run again"):
        load_images("cifar10", tmp_path)


def test_cifar10_files_are_verified_before_they_are_read(tmp_path, monkeypatch):
    folder = write_cifar10(tmp_path, monkeypatch)
    (folder / "test_batch").write_bytes(pickle.dumps(Malice(tmp_path / "harm")))
    with pytest.raises(DataError, match=rf"test_batch.*expected md5 {cifar10._MD5['test_batch']}, got"):
        load_images("cifar10", tmp_path)
    (folder / "test_batch").unlink()
    with pytest.raises(DataError, match="test_batch, which does not exist"):
        load_images("cifar10", tmp_path)


def pack_cifar10(root, monkeypatch, source, extra=()):
    with tarfile.open(root / "cifar-10-python.tar.gz", "w:gz") as tar:
        tar.add(source, "cifar-10-batches-py")
        for name in extra:
            tar.addfile(tarfile.TarInfo(name))
    monkeypatch.setattr(cifar10, "_ARCHIVE_MD5", md5((root / "cifar-10-python.tar.gz").read_bytes()))


def test_an_archive_put_there_by_hand_is_unpacked(tmp_path, monkeypatch):
    root = tmp_path / "root"
    root.mkdir()
    pack_cifar10(root, monkeypatch, write_cifar10(tmp_path, monkeypatch))
    assert len(load_images("cifar10", root, validation=3, download=False).train) == 17
    assert sorted(os.listdir(root)) == ["cifar-10-batches-py", "cifar-10-python.tar.gz"]
    monkeypatch.setattr(cifar10, "_ARCHIVE_MD5", "0" * 32)
    (root / "cifar-10-batches-py").rename(tmp_path / "away")
    with pytest.raises(DataError, match=rf"cifar-10-python.tar.gz.*expected md5 {'0' * 32}"):
        load_images("cifar10", root)


@pytest.mark.parametrize("member", ["../escaped", "cifar-10-batches-py/../../escaped", "../../escaped"])
def test_no_member_of_an_archive_leaves_the_folder(tmp_path, monkeypatch, member):
    root = tmp_path / "root"
    root.mkdir()
    pack_cifar10(root, monkeypatch, write_cifar10(tmp_path, monkeypatch), extra=[member])
    with pytest.raises(DataError, match="cannot be unpacked.*outside"):
        load_images("cifar10", root)
    assert os.listdir(root) == ["cifar-10-python.tar.gz"]
    assert not (tmp_path / "escaped").exists()


# Omniglot and CelebA


def test_omniglot_is_averaged_inverted_and_kept(omniglot_home, no_conversion):
    images = load_images("omniglot", omniglot_home.parent, validation=0)
    assert [len(images.train), len(images.test), images.shape] == [6, 3, (1, 28, 28)]
    ink = torch.tensor([10.0 * 25 * (n + 1) for n in (0, 1, 2, 3, 4, 5, 0, 1, 2)]) / 105**2
    found = torch.cat([images.train, images.test]).double().mean((1, 2, 3)) / 255
    torch.testing.assert_close(found, ink, atol=1e-3, rtol=0.0)  # averaging keeps the amount of ink
    assert images.train[:, 0, 0, 0].eq(255).all()
    no_conversion()
    again = load_images("omniglot", omniglot_home.parent, validation=2)
    assert same([images.test], [again.test])
    assert sorted(rows(images.train)) == sorted(rows(again.train) + rows(again.validation))


def test_incomplete_omniglot_is_named(omniglot_home):
    next(omniglot_home.glob("images_background/*/*/*.png")).unlink()
    with pytest.raises(DataError, match="expected 6 images in .*images_background.*got 5"):
        load_images("omniglot", omniglot_home.parent)


def test_omniglot_is_unpacked_inside_its_folder(omniglot_home, monkeypatch):
    expected = load_images("omniglot", omniglot_home.parent, validation=0)
    for part in list(omniglot._MD5):
        with zipfile.ZipFile(omniglot_home / f"{part}.zip", "w") as zipped:
            for path in (omniglot_home / part).rglob("*.png"):
                zipped.write(path, path.relative_to(omniglot_home))
            zipped.writestr("../../escaped", "")
        monkeypatch.setitem(omniglot._MD5, part, md5((omniglot_home / f"{part}.zip").read_bytes()))
        (omniglot_home / part).rename(omniglot_home.parent / part)
    images = load_images("omniglot", omniglot_home.parent, validation=0, download=False)
    assert same([images.train, images.test], [expected.train, expected.test])
    assert not list(omniglot_home.parent.parent.glob("escaped"))
    assert not (omniglot_home.parent / "escaped").exists()


def test_celeba_follows_the_official_partition(celeba_home, no_conversion):
    images = load_images("celeba", celeba_home.parent)
    assert images.shape == (3, 64, 64)
    for split, numbers in {"train": [0, 3, 4], "validation": [1, 5], "test": [2]}.items():
        colour = 16 * torch.tensor(numbers)[:, None] + torch.tensor([0, 40, 80])  # without a trace of the white frame
        assert (images.split(split) - colour[:, :, None, None]).abs().max() <= 3  # JPEG
    no_conversion()
    first = load_images("celeba", celeba_home.parent, validation=1)
    assert same([first.train, first.validation], [images.train, images.validation[:1]])
    assert same([load_images("celeba", celeba_home.parent, validation=0).train], [images.train])
    with pytest.raises(ValueError, match="has 2 images, got validation=3"):
        load_images("celeba", celeba_home.parent, validation=3)


def _truncate(path):
    path.write_bytes(path.read_bytes()[:-100])


def _flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [_truncate, _flip_a_bit, lambda path: path.write_bytes(b"")])
def test_a_damaged_cache_is_rebuilt(celeba_home, damage, no_conversion):
    images = load_images("celeba", celeba_home.parent)
    damage(celeba_home / "celeba-64x64.npz")
    assert same([load_images("celeba", celeba_home.parent).train], [images.train])
    no_conversion()
    assert same([load_images("celeba", celeba_home.parent).train], [images.train])
    assert sorted(os.listdir(celeba_home)) == ["celeba-64x64.npz", "img_align_celeba", "list_eval_partition.txt"]


def test_a_cache_of_other_files_is_rebuilt(celeba_home):
    images = load_images("celeba", celeba_home.parent)
    (celeba_home / "list_eval_partition.txt").write_text("".join(f"{n:06}.jpg {c}\n" for n, c in enumerate("002011")))
    expected = torch.cat([images.train[:1], images.validation[:1], images.train[1:2]])
    assert same([load_images("celeba", celeba_home.parent).train], [expected])


def test_damaged_celeba_is_named(celeba_home):
    face = celeba_home / "img_align_celeba" / "000003.jpg"
    good = face.read_bytes()
    for content in (good[: len(good) // 2], b"", b"<html>"):
        face.write_bytes(content)
        with pytest.raises(DataError, match=str(face)):
            load_images("celeba", celeba_home.parent)
    Image.new("RGB", (64, 64)).save(face)
    with pytest.raises(DataError, match="expected 178×218 pixels, got 64×64"):
        load_images("celeba", celeba_home.parent)
    partition = celeba_home / "list_eval_partition.txt"
    partition.write_text(partition.read_text().replace("000004.jpg 0", "../secret.jpg 0"))
    with pytest.raises(DataError, match="line 5"):
        load_images("celeba", celeba_home.parent)
    partition.write_text("000000.jpg 0\n")
    with pytest.raises(DataError, match="'train': 1"):
        load_images("celeba", celeba_home.parent)
    partition.unlink()
    with pytest.raises(DataError, match=rf"{partition}.*img_align_celeba.zip.*mmlab.*put both into {celeba_home}"):
        load_images("celeba", celeba_home.parent)


# Transforms


def standard_errors_from_the_grey_level(transform):
    """How far the mean of 4,000 draws of every inner grey level is from pixel / 255, in the worst case."""
    levels = torch.arange(1, 255, dtype=torch.uint8)
    mean = transform(levels.expand(4000, -1), generator()).double().mean(0)
    p = levels.double() / 255
    return float(((mean - p) / (p * (1 - p) / 4000).sqrt()).abs().max())


def test_binarisation_has_the_grey_level_as_its_mean():
    assert standard_errors_from_the_grey_level(TRANSFORMS["binarize"]) < 5
    threshold = lambda pixels, generator: (pixels.double() / 255 > 0.5).double()
    assert standard_errors_from_the_grey_level(threshold) > 5


def test_dequantised_values_bin_back_to_the_pixel():
    pixels = torch.arange(256, dtype=torch.uint8).expand(20_000, -1)
    values = TRANSFORMS["dequantize"](pixels, generator())
    assert torch.equal((values * 256).floor(), pixels.float())
    assert values.min() > 0
    assert values.max() < 1
    noise = values.double() * 256 - pixels
    for moment, (mean, variance) in {1: (1 / 2, 1 / 12), 2: (1 / 3, 4 / 45)}.items():
        assert abs(noise.pow(moment).mean() - mean) < 5 * (variance / noise.numel()) ** 0.5
    naive = (pixels.float() + torch.rand(pixels.shape, dtype=torch.float32, generator=generator())) / 256
    assert not torch.equal((naive * 256).floor(), pixels.float()), "rounding into the next pixel has gone unnoticed"


@pytest.mark.parametrize(("name", "draws"), [("binarize", 1), ("scale", 0), ("dequantize", 1)])
def test_a_transform_draws_one_array_or_none(name, draws):
    used, expected = generator(), generator()
    values = TRANSFORMS[name](random_pixels(3, 1, 5, 5), used)
    for _ in range(draws):
        torch.rand(3, 1, 5, 5, generator=expected, dtype=torch.float32)
    assert torch.equal(used.get_state(), expected.get_state())
    assert values.dtype == torch.float32
    with pytest.raises(TypeError, match="uint8 from 0 to 255, got torch.float32"):
        TRANSFORMS[name](values, used)


# Batches


def numbered(count):
    """Images that can be told apart."""
    return torch.arange(count).reshape(count, 1, 1, 1).to(torch.uint8)


def batches(count, batch_size, name="dequantize", seed=3, epoch=0, **ranks):
    return list(Batches(numbered(count), batch_size, TRANSFORMS[name], seed=seed, epoch=epoch, **ranks))


def numbers(parts):
    return [int(x) for part in parts for x in (part * 256).floor().flatten()]


def test_batches_are_a_function_of_seed_and_epoch():
    assert same(batches(50, 8), batches(50, 8))
    assert same(batches(50, 8, epoch=np.int64(0)), batches(50, 8))
    for other in (batches(50, 8, epoch=1), batches(50, 8, seed=4), batches(50, 8, epoch=None)):
        assert numbers(other)[:48] != numbers(batches(50, 8))
    first = batches(50, 8)[0].flatten()[:3] * 2**24  # whole numbers
    assert first.tolist() == [68721, 2113625, 1220063], "runs of an earlier version can no longer be repeated"


def test_an_epoch_visits_every_image_at_most_once():
    epoch = batches(50, 8)
    assert [len(b) for b in epoch] == [8] * 6
    assert len(set(numbers(epoch))) == 48
    assert numbers(epoch) != sorted(numbers(epoch))
    assert sorted(numbers(batches(5, 8))) == list(range(5))
    seen = set.union(*(set(numbers(batches(50, 8, epoch=e))) for e in range(9)))
    assert seen == set(range(50))  # what one epoch drops, another visits


def test_evaluation_visits_all_images_in_order_with_fixed_noise():
    evaluation = Batches(numbered(50), 8, TRANSFORMS["dequantize"], seed=3, epoch=None)
    assert same(list(evaluation), list(evaluation))
    assert numbers(evaluation) == list(range(50))
    assert len(evaluation) == len(list(evaluation)) == 7
    assert batches(0, 8, epoch=None) == []


def test_noise_differs_between_batches():
    noise = [batch * 256 % 1 for batch in batches(48, 8)]
    assert len({tuple(n.flatten().tolist()) for n in noise}) == 6


@pytest.mark.parametrize("name", list(TRANSFORMS))
@pytest.mark.parametrize("epoch", [0, 7, None])
@pytest.mark.parametrize(("count", "world_size"), [(50, 2), (54, 4), (8, 4)])
def test_ranks_together_yield_what_one_process_does(name, epoch, count, world_size):
    whole = batches(count, 8, name, epoch=epoch)
    parts = [batches(count, 8, name, epoch=epoch, rank=r, world_size=world_size) for r in range(world_size)]
    assert same([torch.cat(shares) for shares in zip(*parts, strict=True)], whole)
    for shares in zip(*parts, strict=True):  # training batches are cut evenly, others are dealt out whole
        lengths = sorted(map(len, shares))
        assert lengths[0] == lengths[-1] if epoch is not None else not any(lengths[:-1])


def test_batches_that_cannot_be_shared_are_refused():
    with pytest.raises(ValueError, match="choose a multiple of 3"):
        batches(50, 8, rank=0, world_size=3)
    with pytest.raises(ValueError, match="positive batch_size"):
        batches(50, 0)
    with pytest.raises(ValueError, match="rank from 0 to world_size - 1 = 1, got 2"):
        batches(50, 8, rank=2, world_size=2)
    with pytest.raises(ValueError, match="only batch has 7 images, which 4 processes cannot share evenly"):
        batches(7, 8, epoch=0, rank=0, world_size=4)
    assert len(batches(7, 8, epoch=None, rank=0, world_size=4)) == 1
    assert len(batches(50, 8, epoch=0, rank=0, world_size=4)) == 6
