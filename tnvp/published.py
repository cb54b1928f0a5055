"""Published data sets by torchvision: downloaded when missing, checked by checksum, never swapped silently."""

import hashlib
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tnvp.image_folder import DataError, Images

# MD5 of the unpacked files. torchvision only looks whether they exist: it would read one cut short.
IDX_MD5 = {
    "mnist": {
        "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
        "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
        "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
        "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
    },
    "fashion_mnist": {
        "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
        "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
        "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
        "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
    },
}
# The names under which torchvision, which knows the addresses and the archives' MD5s, has its classes.
TORCHVISION = dict(mnist="MNIST", fashion_mnist="FashionMNIST", cifar10="CIFAR10", cifar100="CIFAR100")
DOWNLOAD_TIMEOUT = 30.0  # seconds without a byte after which a server counts as dead


class Published(NamedTuple):
    """A data set torchvision can download: its class there, our root, and files with their MD5s.

    `archives` are downloaded and unpacked to `files`, which are read; `advice` says which to put where by
    hand.
    """

    name: str
    source: type
    root: Path
    files: dict[Path, str]
    archives: dict[Path, str]
    advice: str


def read_idx(name: str, root: Path, download: bool) -> Images:
    """MNIST and Fashion-MNIST: plain bytes after a header, known to be right once the MD5 is."""
    from torchvision import datasets

    source = getattr(datasets, TORCHVISION[name])
    folder = root / source.__name__ / "raw"
    files = {folder / file: md5 for file, md5 in IDX_MD5[name].items()}
    archives = {folder / file: md5 for file, md5 in source.resources}
    advice = f"Put {', '.join(archive.name for archive in archives)} into {folder}, packed or unpacked"
    _provide(Published(name, source, root, files, archives, advice), download)

    def read(part: str) -> tuple[Tensor, Tensor]:
        images = np.fromfile(folder / f"{part}-images-idx3-ubyte", dtype=np.uint8, offset=16)
        labels = np.fromfile(folder / f"{part}-labels-idx1-ubyte", dtype=np.uint8, offset=8)
        return torch.from_numpy(images).view(-1, 1, 28, 28), torch.from_numpy(labels).long()

    return Images(read("train"), read("t10k"), tuple(source.classes))


def read_cifar(name: str, root: Path, download: bool) -> Images:
    from torchvision import datasets

    source = getattr(datasets, TORCHVISION[name])
    listed = [*source.train_list, *source.test_list, (source.meta["filename"], source.meta["md5"])]
    files = {root / source.base_folder / file: md5 for file, md5 in listed}
    advice = f"Put {source.filename}, or {source.base_folder} unpacked from it, into {root}"
    archives = {root / source.filename: source.tgz_md5}
    _provide(Published(name, source, root, files, archives, advice), download)

    def tensors(part) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(part.data).permute(0, 3, 1, 2).contiguous(), torch.tensor(part.targets)

    train, test = source(root, train=True), source(root, train=False)
    return Images(tensors(train), tensors(test), tuple(train.classes))


def _provide(wanted: Published, download: bool) -> None:
    """Sees to it that every file is there, with its MD5, by unpacking or downloading what is missing.

    A damaged file is an error, never replaced without a word: the disk may be failing.
    """
    from torchvision.datasets.utils import extract_archive

    missing = _missing(wanted)
    if not missing:
        return
    advice = f"{wanted.advice}, or use the embedded data set, which needs no files: dataset=digits."
    archives = [path for path in wanted.archives if path.is_file() and not path.with_suffix("").is_file()]
    intact = [path for path in archives if _md5(path) == wanted.archives[path]]
    if damaged := [str(path) for path in archives if path not in intact]:
        advice = f"Damaged, or packed anew (then unpack it), by its MD5: {', '.join(damaged)}. {advice}"
    action = "unpacked"
    try:
        for path in intact:
            extract_archive(path, path.parent)
        missing = _missing(wanted)
        if missing and download:
            action = "downloaded"
            with _socket_timeout(DOWNLOAD_TIMEOUT):
                wanted.source(wanted.root, train=True, download=True)
            missing = _missing(wanted)
    except (OSError, RuntimeError, HTTPException) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{wanted.name} can't be {action}: {reason.rstrip('.')}. {advice}") from error
    if missing:
        hint = "" if download else "Set dataset.download=true, or dataset.root to where they are. "
        raise DataError(f"{wanted.name} lacks files in {wanted.root}: {', '.join(missing)}. {hint}{advice}")


def _missing(wanted: Published) -> list[str]:
    """Names of the files that aren't there. Raises DataError for one that is there but has the wrong MD5."""
    for path, expected in wanted.files.items():
        if path.is_file() and (found := _md5(path)) != expected:
            raise DataError(
                f"{path} is damaged, or not of {wanted.name}: its MD5 is {found}, not {expected}. "
                "Delete it and start again: with dataset.download=true it is fetched anew."
            )
    return [path.name for path in wanted.files if not path.is_file()]


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


@contextmanager
def _socket_timeout(seconds: float) -> Iterator[None]:
    """torchvision sets none: a server that goes silent would hold the run for ever."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
