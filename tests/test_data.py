"""Laws of the data sets, their splits, batches and augmentation.

Tests of the real MNIST and CIFAR-10 (JPEG) read the folder TNVP_DATA_ROOT and are skipped without it.
"""

import gzip
import hashlib
import io
import os
import pickle
import struct
import tarfile
import time
import zlib
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from torchvision import datasets

from tnvp import data as module
from tnvp import image_folder
from tnvp.data import Data, DataError, Split, batch_sizes, batches, load

ROOT = os.environ.get("TNVP_DATA_ROOT")
USER_CACHE = os.environ.get("XDG_CACHE_HOME", "")
real_data = pytest.mark.skipif(not ROOT, reason="TNVP_DATA_ROOT isn't set to a folder with MNIST/raw and cifar10-jpeg")


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def made_up(n: int, shape=(3, 6, 7), *, flip=False, crop_padding=0) -> Data:
    """Random images whose label is their number, so that a batch tells which images it holds."""
    split = Split(torch.randint(1, 256, (n, *shape), dtype=torch.uint8, generator=seeded()), torch.arange(n))
    mean, std = torch.linspace(0.2, 0.6, shape[0]), torch.linspace(0.1, 0.3, shape[0])
    return Data("made up", split, split, split, ("a", "b"), mean, std, flip, crop_padding)


def raw_pixels(data: Data, x: torch.Tensor) -> torch.Tensor:
    """Undoes the normalisation: uint8 [B, C, H, W]."""
    pixels = (x * data.std.view(-1, 1, 1) + data.mean.view(-1, 1, 1)) * 255
    torch.testing.assert_close(pixels, pixels.round(), atol=1e-3, rtol=0)
    return pixels.round().to(torch.uint8)


@pytest.fixture
def offline(monkeypatch):
    """Any attempt to reach the network fails at once."""

    def refuse(*_, **__):
        raise URLError("no route to host")

    monkeypatch.setattr("urllib.request.urlopen", refuse)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


# digits, splits, statistics


def test_digits_are_complete_and_need_nothing():
    data = load("digits")
    assert (len(data.train), len(data.validation), len(data.test)) == (1294, 144, 359)
    assert data.shape == (1, 8, 8) and data.classes == tuple("0123456789")
    for split in (data.train, data.validation, data.test):
        assert split.images.dtype == torch.uint8 and split.labels.dtype == torch.int64
        assert split.images.max() == 255 and split.images.min() == 0
    from sklearn.datasets import load_digits

    pixels = torch.cat([data.train.images, data.validation.images, data.test.images]).flatten(1)
    ours = sorted((pixels.double() * 16 / 255).round().int().tolist())
    assert ours == sorted(load_digits().data.astype(int).tolist())


def test_digits_test_split_is_the_same_for_every_split_seed_and_stratified():
    one, other = load("digits", split_seed=1), load("digits", split_seed=2)
    assert torch.equal(one.test.images, other.test.images)
    assert not torch.equal(one.validation.images, other.validation.images)
    counts = torch.bincount(one.test.labels)
    assert counts.min() >= 34 and counts.max() <= 37  # a fifth of 174 to 183 images a class, rounded


@settings(max_examples=60, deadline=None)
@given(
    counts=st.lists(st.integers(1, 40), min_size=2, max_size=6),
    fraction=st.floats(0.01, 0.9),
    seed=st.integers(0, 2**31),
)
def test_stratified_split_parts_the_examples_and_gives_each_class_its_share(counts, fraction, seed):
    labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    kept, held_out = module._stratified(labels, fraction, seed)
    assert sorted(torch.cat([kept, held_out]).tolist()) == list(range(len(labels)))
    assert len(held_out) == max(1, round(fraction * len(labels)))
    shares = torch.bincount(labels[held_out], minlength=len(counts))
    wanted = torch.tensor(counts) * len(held_out) / len(labels)
    assert (shares - wanted).abs().max() <= 1
    again = module._stratified(labels, fraction, seed)
    assert torch.equal(kept, again[0]) and torch.equal(held_out, again[1])


def test_every_example_may_be_held_out():
    labels = torch.arange(2).repeat_interleave(20)
    seen = torch.cat([module._stratified(labels, 0.1, seed)[1] for seed in range(200)])
    assert set(seen.tolist()) == set(range(40))


def test_split_mixes_sorted_classes():
    labels = torch.arange(10).repeat_interleave(100)
    kept, held_out = module._stratified(labels, 0.3, 0)
    assert len(set(labels[kept][:60].tolist())) == 10 and len(set(labels[held_out][:60].tolist())) == 10


def test_moments_are_those_of_the_pixels():
    images = torch.randint(0, 256, (50, 3, 5, 4), dtype=torch.uint8, generator=seeded())
    images[:, 1] = images[:, 1] // 3
    images[:, 2] = 77
    mean, std = module._moments(images)
    pixels = images.double().transpose(0, 1).flatten(1) / 255
    np.testing.assert_allclose(mean, pixels.mean(1), rtol=1e-12)
    np.testing.assert_allclose(std[:2], pixels.std(1, correction=0)[:2], rtol=1e-12)
    assert std[2] == 1  # a constant channel can't be scaled


def test_mean_and_std_default_to_the_training_split_and_can_be_given():
    data = load("digits")
    pixels = data.train.images.double() / 255
    assert data.mean.item() == pytest.approx(pixels.mean().item(), rel=1e-6)
    assert data.std.item() == pytest.approx(pixels.std(correction=0).item(), rel=1e-6)
    half = load("digits", mean=[0.5])
    assert half.mean.tolist() == [0.5] and torch.equal(half.std, data.std)
    assert load("digits", mean=[0.5], std=[0.25]).std.tolist() == [0.25]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"name": "svhn"}, ["'svhn'", *module.DATASETS]),
        ({"name": "digits", "mean": [0.1, 0.2, 0.3]}, ["mean", "length 3", "1 channels"]),
        ({"name": "digits", "std": []}, ["std", "length 0", "1 channels"]),
        ({"name": "digits", "std": [0.0]}, ["std", "0.0", "positive"]),
        ({"name": "digits", "std": [float("nan")]}, ["std", "nan"]),
        ({"name": "digits", "validation_fraction": 1.0}, ["validation_fraction", "1.0"]),
        ({"name": "digits", "validation_fraction": float("nan")}, ["validation_fraction", "nan"]),
        ({"name": "digits", "validation_fraction": 0.9999}, ["validation_fraction", "no training image"]),
        ({"name": "digits", "crop_padding": -1}, ["crop_padding", "-1"]),
        ({"name": "mnist"}, ["mnist", "root", "digits"]),
        ({"name": "image_folder", "root": "."}, ["folder", "image_size", "None"]),
    ],
)
def test_bad_arguments_are_named(arguments, words):
    with pytest.raises(DataError) as error:
        load(**arguments)
    assert isinstance(error.value, ValueError)
    assert all(word in str(error.value) for word in words), str(error.value)


# batches


@settings(max_examples=80, deadline=None)
@given(n=st.integers(1, 70), batch_size=st.integers(1, 20), drop_last=st.booleans(), shuffle=st.booleans())
@example(n=9, batch_size=4, drop_last=False, shuffle=True)
@example(n=9, batch_size=4, drop_last=True, shuffle=True)
def test_an_epoch_holds_every_example_once(n, batch_size, drop_last, shuffle):
    data = made_up(n, (1, 2, 2))
    if drop_last and n < batch_size:
        with pytest.raises(DataError, match="no batch"):
            batch_sizes(n, batch_size, drop_last)
        return
    generator = seeded() if shuffle else None
    got = list(batches(data, data.train, batch_size, generator=generator, drop_last=drop_last))
    sizes = [len(y) for _, y in got]
    assert sizes == batch_sizes(n, batch_size, drop_last) == [len(x) for x, _ in got]
    numbers = torch.cat([y for _, y in got]).tolist()
    assert len(set(numbers)) == len(numbers) == (n // batch_size * batch_size if drop_last else n)
    assert all(size == batch_size for size in sizes[:-1])
    assert 1 not in sizes or batch_size == 1 or n == 1  # BatchNorm can't train on one example
    if not shuffle:
        assert numbers == list(range(len(numbers)))
    pixels = torch.cat([raw_pixels(data, x) for x, _ in got])
    assert torch.equal(pixels, data.train.images[torch.tensor(numbers)])


def test_batches_are_normalised_float32_and_survive_block_borders(monkeypatch):
    data = made_up(50)
    expected = (data.train.images / 255 - data.mean.view(-1, 1, 1)) / data.std.view(-1, 1, 1)
    for values in (1, 1000, 1 << 19):  # one batch, a few batches, all batches at once
        monkeypatch.setattr(module, "BLOCK_VALUES", values)
        got = list(batches(data, data.train, 4))
        assert all(x.dtype == torch.float32 and x.is_contiguous() for x, _ in got)
        torch.testing.assert_close(torch.cat([x for x, _ in got]), expected, atol=1e-5, rtol=1e-5)


def test_batches_depend_on_the_generator_alone():
    data = made_up(40, flip=True, crop_padding=2)

    def epoch(generator, **options):
        return list(batches(data, data.train, 8, generator=generator, augment=True, **options))

    torch.manual_seed(1)
    one, other = epoch(seeded(3)), epoch(seeded(4))
    torch.manual_seed(2)
    again = epoch(seeded(3))
    assert all(torch.equal(x, p) and torch.equal(y, q) for (x, y), (p, q) in zip(one, again, strict=True))
    assert not torch.equal(one[0][1], other[0][1])
    generator = seeded(3)
    assert not torch.equal(epoch(generator)[0][1], epoch(generator)[0][1])  # a new order in every epoch


def test_the_generator_is_advanced_once_before_the_first_batch():
    data = made_up(20, flip=True, crop_padding=1)
    generator = seeded()
    epoch = batches(data, data.train, 4, generator=generator, augment=True)
    state = generator.get_state()
    list(epoch)
    assert torch.equal(state, generator.get_state())


def test_one_batch_may_be_changed_in_place_without_touching_others():
    data = made_up(20)
    epoch = list(batches(data, data.train, 4))
    kept = epoch[1][0].clone()
    epoch[0][0].zero_()
    assert torch.equal(epoch[1][0], kept)
    assert data.train.images.min() >= 1


@pytest.mark.parametrize(("batch_size", "options"), [(0, {}), (-3, {}), (2, {"augment": True})])
def test_bad_batches_are_refused_at_the_call(batch_size, options):
    with pytest.raises(DataError, match=r"batch_size is|generator"):
        batches(made_up(8), made_up(8).train, batch_size, **options)


# augmentation


@pytest.mark.parametrize(("flip", "padding"), [(True, 0), (False, 2), (True, 2)])
def test_each_image_is_a_crop_of_its_own_padded_image(flip, padding):
    data = made_up(300, (2, 5, 6), flip=flip, crop_padding=padding)
    used = []
    for x, y in batches(data, data.train, 64, generator=seeded(), augment=True):
        for pixels, number in zip(raw_pixels(data, x), y.tolist(), strict=True):
            source = data.train.images[number]
            variants = {
                (mirrored, row, column): torch.nn.functional.pad(
                    source.flip(2) if mirrored else source, (padding,) * 4
                )[:, row : row + 5, column : column + 6]
                for mirrored in ((0, 1) if flip else (0,))
                for row in range(2 * padding + 1)
                for column in range(2 * padding + 1)
            }
            matches = [key for key, variant in variants.items() if torch.equal(variant, pixels)]
            assert len(matches) == 1  # random pixels: each variant is unlike the others
            used.append(matches[0])
    assert len(used) == 300
    mirrored, rows, columns = np.array(used).T
    assert not flip or 110 < mirrored.sum() < 190  # 150 expected, standard deviation 9
    for offsets in (rows, columns):
        counts = np.bincount(offsets, minlength=2 * padding + 1)
        assert len(counts) == 2 * padding + 1 and counts.min() > 0.5 * 300 / len(counts)
    if padding:
        assert abs(np.corrcoef(rows, columns)[0, 1]) < 0.3  # row, column and flip are drawn independently
    assert len(set(used[:64])) > 1  # images of one batch differ


def test_padding_is_a_black_pixel_normalised_like_any_other():
    data = made_up(200, crop_padding=3)
    x = torch.cat([x for x, _ in batches(data, data.train, 50, generator=seeded(), augment=True)])
    zeros = raw_pixels(data, x) == 0  # the images themselves hold no zero
    assert zeros.any() and torch.equal(zeros[:, 0], zeros[:, 1])
    black = (-data.mean / data.std).view(1, -1, 1, 1).expand_as(x)
    torch.testing.assert_close(x[zeros], black[zeros])


def test_without_augment_nothing_is_flipped_or_cropped():
    data = made_up(30, flip=True, crop_padding=2)
    for x, y in batches(data, data.train, 7, generator=seeded()):
        assert torch.equal(raw_pixels(data, x), data.train.images[y])


def test_small_batches_cost_little():
    data = made_up(8000, (3, 32, 32))
    start = time.perf_counter()
    count = sum(1 for _ in batches(data, data.train, 4, generator=seeded()))
    assert count == 2000
    assert time.perf_counter() - start < 1.5  # 0.07 s on a slow core; per-image code takes several seconds


def test_tensors_follow_the_device():
    data = load("digits", device="meta")
    assert {data.train.images.device.type, data.test.labels.device.type, data.mean.device.type} == {"meta"}


# published data sets, torchvision's


def fake_idx(monkeypatch, root: Path, name: str) -> tuple[Path, dict[str, torch.Tensor]]:
    """Writes four small files in MNIST's form, and makes their MD5s the expected ones."""
    folder = root / module.TORCHVISION[name] / "raw"
    folder.mkdir(parents=True)
    arrays, sums = {}, {}
    for part, n in (("train", 40), ("t10k", 20)):
        images = torch.randint(0, 256, (n, 28, 28), dtype=torch.uint8, generator=seeded(n))
        labels = (torch.arange(n) % 10).to(torch.uint8)
        for kind, dims, array in (("images-idx3", 3, images), ("labels-idx1", 1, labels)):
            content = bytes([0, 0, 8, dims])
            content += b"".join(size.to_bytes(4, "big") for size in array.shape) + array.numpy().tobytes()
            file = f"{part}-{kind}-ubyte"
            (folder / file).write_bytes(content)
            arrays[f"{part} {kind[:6]}"], sums[file] = array, hashlib.md5(content).hexdigest()
    monkeypatch.setitem(module.IDX_MD5, name, sums)
    return folder, arrays


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
def test_idx_files_are_read_as_they_are(name, monkeypatch, tmp_path, offline):
    _, arrays = fake_idx(monkeypatch, tmp_path, name)
    before = sorted(tmp_path.rglob("*"))
    data = load(name, root=tmp_path, validation_fraction=0.25)
    assert (len(data.train), len(data.validation), len(data.test)) == (30, 10, 20)
    assert torch.equal(data.test.images[:, 0], arrays["t10k images"])
    assert torch.equal(data.test.labels, arrays["t10k labels"].long())
    both = torch.cat([data.train.images, data.validation.images]).flatten(1)
    assert sorted(both.tolist()) == sorted(arrays["train images"].flatten(1).tolist())
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
@pytest.mark.parametrize("damage", ["flipped bit", "cut short"])
def test_a_damaged_idx_file_is_named(name, damage, monkeypatch, tmp_path, offline):
    folder, _ = fake_idx(monkeypatch, tmp_path, name)
    path = folder / "t10k-images-idx3-ubyte"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content if damage == "flipped bit" else content[:-1])
    with pytest.raises(DataError, match=rf"{path} is damaged.*MD5.*Delete it"):
        load(name, root=tmp_path)
    assert path.is_file()


def test_intact_archives_are_unpacked_without_download(monkeypatch, tmp_path, offline):
    folder, arrays = fake_idx(monkeypatch, tmp_path, "mnist")
    sums = []
    for file in module.IDX_MD5["mnist"]:
        (folder / f"{file}.gz").write_bytes(gzip.compress((folder / file).read_bytes()))
        sums.append((f"{file}.gz", hashlib.md5((folder / f"{file}.gz").read_bytes()).hexdigest()))
    (folder / "train-images-idx3-ubyte").unlink()
    (folder / "train-labels-idx1-ubyte").unlink()
    monkeypatch.setattr(datasets.MNIST, "resources", sums)
    data = load("mnist", root=tmp_path, download=False)
    assert len(data.train) == 36 and torch.equal(data.test.images[:, 0], arrays["t10k images"])


def test_a_damaged_archive_is_named(monkeypatch, tmp_path, offline):
    folder, _ = fake_idx(monkeypatch, tmp_path, "mnist")
    path = folder / "train-images-idx3-ubyte"
    archive = folder / f"{path.name}.gz"
    archive.write_bytes(gzip.compress(path.read_bytes())[:-9])
    path.unlink()
    for download in (True, False):
        with pytest.raises(DataError, match=f"Damaged.*{archive}"):
            load("mnist", root=tmp_path, download=download)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("mnist", "train-images-idx3-ubyte.gz.* into {root}/MNIST/raw"),
        ("fashion_mnist", "train-images-idx3-ubyte.gz.* into {root}/FashionMNIST/raw"),
        ("cifar10", "cifar-10-python.tar.gz.* into {root},"),
        ("cifar100", "cifar-100-python.tar.gz.* into {root},"),
    ],
)
def test_a_failed_or_forbidden_download_says_what_to_do(name, place, tmp_path, offline):
    place = place.format(root=tmp_path)
    with pytest.raises(DataError, match=rf"{name} can't be downloaded.*no route.*{place}.*dataset=digits"):
        load(name, root=tmp_path)
    with pytest.raises(DataError, match=rf"{name} lacks .*dataset.download=true.*{place}.*dataset=digits"):
        load(name, root=tmp_path, download=False)


def test_a_forbidden_download_touches_neither_network_nor_disk(monkeypatch, tmp_path):
    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: pytest.fail("reached for the network"))
    with pytest.raises(DataError):
        load("mnist", root=tmp_path / "new", download=False)
    assert not (tmp_path / "new").exists()


def fake_cifar(monkeypatch, root: Path, name: str) -> tuple[Path, np.ndarray]:
    """Writes small files in CIFAR's form, and makes their MD5s the expected ones."""
    source = getattr(datasets, module.TORCHVISION[name])
    folder = root / source.base_folder
    folder.mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(0, 256, (20, 3072), dtype=np.uint8)
    key, meta_key = ("labels", "label_names") if name == "cifar10" else ("fine_labels", "fine_label_names")

    def write(file, content):
        (folder / file).write_bytes(pickle.dumps(content))
        return [file, hashlib.md5((folder / file).read_bytes()).hexdigest()]

    batch = {"data": pixels, key: [0, 1] * 10}
    monkeypatch.setattr(source, "train_list", [write(file, batch) for file, _ in source.train_list])
    monkeypatch.setattr(source, "test_list", [write(file, batch) for file, _ in source.test_list])
    file, md5 = write(source.meta["filename"], {meta_key: ["cat", "dog"]})
    monkeypatch.setattr(source, "meta", {"filename": file, "key": meta_key, "md5": md5})
    return folder, pixels


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar_is_read_checked_and_unpacked(name, monkeypatch, tmp_path, offline):
    folder, pixels = fake_cifar(monkeypatch, tmp_path, name)
    source = getattr(datasets, module.TORCHVISION[name])
    data = load(name, root=tmp_path)
    assert data.classes == ("cat", "dog") and data.shape == (3, 32, 32)
    assert len(data.train) + len(data.validation) == 20 * len(source.train_list)
    assert np.array_equal(data.test.images.numpy(), pixels.reshape(20, 3, 32, 32))
    assert data.test.labels.tolist() == [0, 1] * 10

    archive = tmp_path / source.filename
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, folder.name)
    monkeypatch.setattr(source, "tgz_md5", hashlib.md5(archive.read_bytes()).hexdigest())
    (folder / source.test_list[0][0]).unlink()
    assert len(load(name, root=tmp_path, download=False).test) == 20


@pytest.mark.parametrize("which", ["a batch", "the class names"])
def test_a_damaged_cifar_file_is_named(which, monkeypatch, tmp_path, offline):
    folder, _ = fake_cifar(monkeypatch, tmp_path, "cifar10")
    path = folder / ("data_batch_3" if which == "a batch" else "batches.meta")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=f"{path} is damaged"):
        load("cifar10", root=tmp_path)


# image folders


def make_images(root: Path, *, size=(9, 9), train=6, test=3, ending="png") -> Path:
    """root/pictures with classes cat and dog; each image has one colour, which tells them apart."""
    for split, count in (("train", train), ("test", test)):
        for label, name in enumerate(("cat", "dog")):
            folder = root / "pictures" / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                colour = (20 * i, 100 * label, 200 if split == "test" else 0)
                Image.new("RGB", size, colour).save(folder / f"{i}.{ending}")
    return root / "pictures"


def load_folder(root: Path, **options) -> Data:
    return load("image_folder", root=root, folder="pictures", **{"image_size": 9, **options})


def colours(*splits: Split) -> list[tuple[int, ...]]:
    """(label, red, green, blue) of every image, sorted; each has one colour."""
    images, labels = torch.cat([s.images for s in splits]), torch.cat([s.labels for s in splits])
    assert torch.equal(images.amin((2, 3)), images.amax((2, 3)))
    return sorted((label, *pixel) for label, pixel in zip(labels.tolist(), images[:, :, 0, 0].tolist(), strict=True))


def test_an_image_folder_is_read_whole_and_left_alone(tmp_path):
    folder = make_images(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    data = load_folder(tmp_path, validation_fraction=0.25)
    assert data.classes == ("cat", "dog") and data.shape == (3, 9, 9)
    assert (len(data.train), len(data.validation), len(data.test)) == (9, 3, 6)
    given = [(label, 20 * i, 100 * label, 0) for label in (0, 1) for i in range(6)]
    assert colours(data.train, data.validation) == given
    assert data.test.images[:, 0, 0, 0].tolist() == [0, 20, 40] * 2  # in order of class and file name
    assert colours(data.test) == [(label, 20 * i, 100 * label, 200) for label in (0, 1) for i in range(3)]
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "1", "LA"])
def test_other_modes_and_sizes_become_rgb_squares(mode, tmp_path):
    folder = make_images(tmp_path)
    odd = folder / "test" / "cat" / ("odd.tif" if mode == "CMYK" else "odd.png")
    Image.new("RGB", (31, 17), (255, 255, 255)).convert(mode).save(odd)
    data = load_folder(tmp_path)
    assert data.shape == (3, 9, 9) and len(data.test) == 7
    assert (data.test.images[data.test.labels == 0] == 255).flatten(1).all(1).sum() == 1


def test_large_images_shrink_by_averaging(tmp_path):
    folder = make_images(tmp_path)
    rows, columns = np.indices((300, 400))
    ramp_and_grid = 50 + columns * 0.35 + 60 * ((rows + columns) // 2 % 2)
    picture = Image.fromarray(np.stack([ramp_and_grid.astype(np.uint8)] * 3, axis=2))
    picture.save(folder / "test" / "cat" / "big.jpg", quality=95)
    picture.save(folder / "test" / "dog" / "big.png")
    data = load_folder(tmp_path, image_size=32)
    exact = np.asarray(picture.resize((32, 32), Image.Resampling.BILINEAR)).transpose(2, 0, 1)
    errors = np.abs(data.test.images.numpy().astype(int) - exact).max((1, 2, 3))
    assert errors[data.test.labels == 0].min() <= 4  # decoded smaller by the JPEG decoder, so not to the bit
    assert errors[data.test.labels == 1].min() == 0


def test_the_cache_is_used_until_a_file_changes(tmp_path, monkeypatch):
    folder = make_images(tmp_path)
    first = load_folder(tmp_path)
    decoded = []
    decode_one = image_folder._decode_one
    monkeypatch.setattr(image_folder, "_decode_one", lambda *a: decoded.append(a) or decode_one(*a))
    again = load_folder(tmp_path)
    assert not decoded and torch.equal(first.train.images, again.train.images)

    load_folder(tmp_path, image_size=4)
    assert len(decoded) == 18
    load_folder(tmp_path, image_size=4)
    assert len(decoded) == 18

    path = folder / "test" / "dog" / "0.png"
    Image.new("RGB", (9, 9), (1, 2, 3)).save(path)
    os.utime(path, ns=(1, 1))
    changed = load_folder(tmp_path)
    assert len(decoded) == 36 and (changed.test.images[:, :, 0, 0] == torch.tensor([1, 2, 3])).all(1).any()

    path.rename(path.with_name("new.png"))
    load_folder(tmp_path)
    assert len(decoded) == 54
    assert len(list((tmp_path / "cache" / "tnvp").iterdir())) == 2  # one a size; no left-overs of writing


@pytest.mark.parametrize("damage", ["cut short", "flipped bit", "empty", "other content", "no tensor"])
def test_a_damaged_cache_is_noticed_and_made_anew(damage, tmp_path, capfd):
    make_images(tmp_path, size=(64, 64))
    first = load_folder(tmp_path, image_size=64)
    (cache,) = (tmp_path / "cache" / "tnvp").iterdir()
    good = cache.read_bytes()
    content = bytearray(good)
    if damage == "flipped bit":
        content[len(content) // 2] ^= 16
    elif damage == "cut short":
        del content[len(content) // 2 :]
    elif damage == "empty":
        content.clear()
    cache.write_bytes(content)
    if damage == "other content":
        torch.save({"pixels": 3}, cache)
    elif damage == "no tensor":
        stored = torch.load(cache, weights_only=True)
        torch.save({**stored, "pixels": "none"}, cache)
    capfd.readouterr()
    again = load_folder(tmp_path, image_size=64)
    assert "damaged" in capfd.readouterr().err
    assert torch.equal(first.train.images, again.train.images)
    load_folder(tmp_path, image_size=64)
    assert capfd.readouterr().err == ""


def test_without_a_writable_cache_the_images_are_read_all_the_same(tmp_path, monkeypatch, capfd):
    make_images(tmp_path)
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert len(load_folder(tmp_path).test) == 6
    assert "can't be kept" in capfd.readouterr().err


def test_long_decoding_is_said_once_on_stderr(tmp_path, monkeypatch, capfd):
    make_images(tmp_path)
    load_folder(tmp_path)
    assert capfd.readouterr() == ("", "")
    monkeypatch.setattr(image_folder, "SECONDS_BEFORE_NOTICE", -1)
    load_folder(tmp_path, image_size=5)
    said = capfd.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and "18 images" in said.err and "cache" in said.err


@pytest.mark.parametrize("image_size", [10**7, 2**32 - 1])
def test_images_too_large_for_any_memory_are_refused_by_their_size(image_size, tmp_path):
    make_images(tmp_path)
    with pytest.raises(DataError, match=rf"image_size={image_size}: 18 images .* GiB of memory"):
        load_folder(tmp_path, image_size=image_size)


def test_a_broken_image_is_named(tmp_path):
    folder = make_images(tmp_path, size=(40, 40), ending="jpg")
    path = folder / "train" / "dog" / "3.jpg"
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(DataError, match=f"{path} can't be decoded"):
        load_folder(tmp_path)
    path.write_text("no image")
    with pytest.raises(DataError, match=f"{path} can't be decoded"):
        load_folder(tmp_path)
    assert not list((tmp_path / "cache").rglob("*.pt"))


def test_images_of_16_bits_are_refused_not_clipped(tmp_path):
    folder = make_images(tmp_path)
    path = folder / "train" / "cat" / "deep.png"
    Image.fromarray(np.full((9, 9), 40_000, dtype=np.uint16)).save(path)
    with pytest.raises(DataError, match=f"{path} has more than 8 bits"):
        load_folder(tmp_path)


def remove(path: Path) -> None:
    for child in sorted(path.rglob("*"), reverse=True):
        child.rmdir() if child.is_dir() else child.unlink()
    path.rmdir()


def test_a_folder_in_the_wrong_form_is_explained(tmp_path):
    with pytest.raises(DataError, match=r"no folder .*pictures.*train/<class>/"):
        load_folder(tmp_path)
    folder = make_images(tmp_path)
    for path in (folder / "train" / "cat").iterdir():
        path.unlink()
    (folder / "train" / "cat" / "notes.txt").write_text("no image")
    with pytest.raises(DataError, match=rf"{folder / 'train' / 'cat'} holds no image.*png"):
        load_folder(tmp_path)
    remove(folder / "train" / "cat")
    with pytest.raises(DataError, match=r"train has 1 class folders.*at least 2"):
        load_folder(tmp_path)
    (folder / "train" / "bird").mkdir()
    with pytest.raises(DataError, match="train lacks the classes cat"):
        load_folder(tmp_path)
    remove(folder / "test" / "cat")
    with pytest.raises(DataError, match="test lacks the classes bird"):
        load_folder(tmp_path)
    remove(folder / "test")
    with pytest.raises(DataError, match="lacks 'test'"):
        load_folder(tmp_path)


def test_a_class_too_small_to_split_is_named(tmp_path):
    make_images(tmp_path, train=1)
    with pytest.raises(DataError, match=r"no training image of (cat|dog)"):
        load_folder(tmp_path)


# real data


@real_data
def test_real_mnist():
    data = load("mnist", root=ROOT, download=False)
    assert (len(data.train), len(data.validation), len(data.test)) == (54_000, 6_000, 10_000)
    mean, std = module._moments(torch.cat([data.train.images, data.validation.images]))
    assert mean == [pytest.approx(0.1307, abs=5e-5)] and std == [pytest.approx(0.3081, abs=5e-5)]
    assert data.test.labels[:8].tolist() == [7, 2, 1, 0, 4, 1, 4, 9]
    raw = module.read_idx("mnist", Path(ROOT), download=False)
    assert raw.train[1][:8].tolist() == [5, 0, 4, 1, 9, 2, 1, 3]
    given = datasets.MNIST(ROOT, train=True)
    assert torch.equal(raw.train[0][:, 0], given.data) and torch.equal(raw.train[1], given.targets)


@real_data
def test_real_cifar10_jpeg(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", USER_CACHE)  # decoding takes 10 to 30 s: once, not in every test run
    data = load("image_folder", root=ROOT, folder="cifar10-jpeg", image_size=32)
    assert (len(data.train), len(data.validation), len(data.test)) == (45_000, 5_000, 10_000)
    mean, std = module._moments(torch.cat([data.train.images, data.validation.images]))
    assert mean == pytest.approx([0.4913, 0.4821, 0.4465], abs=1e-4)
    assert std == pytest.approx([0.2452, 0.2428, 0.2606], abs=1e-4)
    assert torch.bincount(data.validation.labels).tolist() == [500] * 10
    assert data.classes[0] == "airplane" and data.classes[-1] == "truck"
    path = Path(ROOT) / "cifar10-jpeg" / "test" / "frog" / "0007.jpg"
    frogs = data.test.images[data.test.labels == data.classes.index("frog")]
    assert np.array_equal(frogs[7].permute(1, 2, 0).numpy(), np.asarray(Image.open(path).convert("RGB")))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_batches_on_cuda_equal_those_on_the_cpu():
    data = made_up(100, flip=True, crop_padding=2)
    moved = Split(data.train.images.cuda(), data.train.labels.cuda())
    other = Data("made up", moved, moved, moved, data.classes, data.mean.cuda(), data.std.cuda(), True, 2)
    one = batches(data, data.train, 16, generator=seeded(), augment=True)
    two = batches(other, moved, 16, generator=seeded(), augment=True)
    for (x, y), (p, q) in zip(one, two, strict=True):
        assert p.is_cuda and torch.equal(y, q.cpu())
        torch.testing.assert_close(x, p.cpu())


def png(width: int, height: int) -> bytes:
    """The head of a PNG file that claims a size; a reader that believes it takes width · height bytes."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    rows = zlib.compress(bytes(1000 * (width + 1)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@pytest.mark.parametrize("side", [10_000, 20_000])  # Pillow only warns of the smaller one
def test_a_decompression_bomb_is_named_with_the_limit_before_it_is_unpacked(side, tmp_path):
    path = make_images(tmp_path) / "train" / "cat" / "bomb.png"
    path.write_bytes(png(side, side))
    with pytest.raises(
        DataError, match=rf"{path} can't be decoded.*{side * side} pixels.* exceeds limit of \d+ pixels"
    ):
        load_folder(tmp_path)


def damaged_images() -> dict[str, bytes]:
    stream = io.BytesIO()
    Image.linear_gradient("L").save(stream, "png")
    whole = stream.getvalue()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 4
    return {"empty": b"", "text": b"no image", "cut short": whole[: len(whole) // 2], "flipped bit": bytes(flipped)}


@pytest.mark.parametrize(("damage", "content"), damaged_images().items(), ids=damaged_images())
def test_a_file_that_is_no_image_is_named(damage, content, tmp_path):
    path = make_images(tmp_path) / "test" / "dog" / "bad.png"
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"{path} can't be decoded.*Replace or delete it"):
        load_folder(tmp_path)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    path = make_images(tmp_path) / "test" / "dog" / "pipe.png"
    os.mkfifo(path)
    with pytest.raises(DataError, match=f"{path} is no regular file. Replace or delete it"):
        load_folder(tmp_path)


def test_pixels_stay_where_the_file_has_them_whatever_exif_says(tmp_path):
    folder = make_images(tmp_path)
    image = Image.new("RGB", (9, 9))
    image.paste((255, 255, 255), (0, 0, 9, 3))
    image.getexif()[0x0112] = 6  # turn it by 90 degrees to see it upright
    image.save(folder / "test" / "cat" / "0.png", exif=image.getexif())
    (rows,) = [
        x for x in load_folder(tmp_path).test.images if x.amax() == 255 and x.amin() == 0 and (x[2] == x[0]).all()
    ]
    assert (rows[:, :3] == 255).all() and (rows[:, 3:] == 0).all()


class Malicious:
    def __reduce__(self):
        return print, ("code ran",)


def test_a_malicious_cache_runs_nothing(tmp_path, capfd):
    make_images(tmp_path)
    before = load_folder(tmp_path)
    (cache,) = (tmp_path / "cache").rglob("*.pt")
    for write in (torch.save, lambda value, path: path.write_bytes(pickle.dumps(value))):
        write({"fingerprint": Malicious(), "pixels": Malicious()}, cache)
        assert torch.equal(load_folder(tmp_path).train.images, before.train.images)
    printed = "".join(capfd.readouterr())
    assert "code ran" not in printed and printed.count("is damaged") == 2
