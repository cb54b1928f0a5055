"""Images in class folders, decoded once: folder/train/<class>/… and folder/test/<class>/….

Shapes: B images, H = W = image_size; images uint8 [B, 3, H, W] (red, green, blue, 0..255), labels int64 [B].
Decoding 60,000 files takes a while, so the pixels are kept in the user's cache folder; the images' own
folder is only read.
"""

import contextlib
import hashlib
import os
import stat
import sys
import tempfile
import time
import warnings
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

ENDINGS = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
SECONDS_BEFORE_NOTICE = 2.0


class DataError(ValueError):
    """Raised for data that are missing, damaged or asked for wrongly; the message says what to do."""


class ImageFile(NamedTuple):
    """One image on disk: its place and class, and what tells whether it was changed (bytes, nanoseconds)."""

    path: str
    label: int
    size: int
    modified: int


class Images(NamedTuple):
    """A data set as given: (uint8 [n, C, H, W], int64 [n]) twice, and class names in label order."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    classes: tuple[str, ...]


def read_image_folder(folder: Path, image_size: int) -> Images:
    """Reads every image of folder/train and folder/test as RGB, resized to a square (aspect isn't kept).

    Pixels stay where the file has them: a camera's note on how it was held (EXIF) is not followed.

    The pixels come from the cache if they were made from files of the same paths, sizes and modification
    times, for the same image_size; otherwise, or if the cache is damaged, every image is decoded.

    Raises DataError: a folder is missing or empty, train and test differ in classes, an image can't be
    decoded.
    """
    if image_size < 1:
        raise DataError(f"image_size is {image_size}; it must be at least 1 pixel.")
    folder = folder.resolve()
    classes = _class_names(folder)
    train, test = (_list_images(folder / split, classes) for split in ("train", "test"))
    cache = _cache_file(folder, image_size)
    fingerprint = _fingerprint(folder, train + test, image_size)
    pixels = _read_cache(cache, fingerprint, (len(train) + len(test), 3, image_size, image_size))
    if pixels is None:
        pixels = _decode(train + test, image_size, f"images of {folder}; the result is kept in {cache}")
        _write_cache(cache, fingerprint, pixels)
    labels = torch.tensor([image.label for image in train + test])
    n = len(train)
    return Images((pixels[:n], labels[:n]), (pixels[n:], labels[n:]), classes)


def _class_names(folder: Path) -> tuple[str, ...]:
    """The folders in folder/train, sorted; those in folder/test must be the same."""
    if not folder.is_dir():
        raise DataError(
            f"There is no folder {folder}. It is dataset.root and dataset.folder put together, "
            "and must hold images in train/<class>/ and test/<class>/."
        )
    found = {}
    for split in ("train", "test"):
        if not (folder / split).is_dir():
            raise DataError(f"{folder} lacks {split!r}; images go into train/<class>/ and test/<class>/.")
        with os.scandir(folder / split) as entries:
            found[split] = {entry.name for entry in entries if entry.is_dir() and entry.name[0] != "."}
    if len(found["train"]) < 2:
        raise DataError(
            f"{folder / 'train'} has {len(found['train'])} class folders; it must have at least 2, with images inside."
        )
    for split, other in (("train", "test"), ("test", "train")):
        if missing := sorted(found[other] - found[split]):
            raise DataError(
                f"{folder / split} lacks the classes {', '.join(missing)}, which {other} has. "
                f"Add these folders with images, or take them out of {other}."
            )
    return tuple(sorted(found["train"]))


def _list_images(folder: Path, classes: tuple[str, ...]) -> list[ImageFile]:
    """The image files of every class, subfolders included, in a fixed order: by class, then by path."""
    images = []
    for label, name in enumerate(classes):
        paths = [
            os.path.join(place, file)
            for place, _, files in os.walk(folder / name)
            for file in files
            if file.lower().endswith(ENDINGS) and not file.startswith(".")
        ]
        if not paths:
            raise DataError(f"{folder / name} holds no image (file names must end in {', '.join(ENDINGS)}).")
        for path in sorted(paths):
            try:
                status = os.stat(path)
            except OSError as error:  # a link that leads nowhere
                raise DataError(f"{path} can't be read: {error.strerror}. Replace or delete it.") from error
            if not stat.S_ISREG(status.st_mode):  # to open a pipe would wait for ever
                raise DataError(f"{path} is no regular file. Replace or delete it.")
            images.append(ImageFile(path, label, status.st_size, status.st_mtime_ns))
    return images


def _decode(images: list[ImageFile], image_size: int, what: str) -> Tensor:
    """uint8 [B, 3, H, W]. If that takes long, one line on stderr says so; `what` ends its sentence."""
    try:
        pixels = np.empty((len(images), image_size, image_size, 3), dtype=np.uint8)
    except (MemoryError, ValueError) as error:  # ValueError: more than could be addressed
        size = len(images) * image_size**2 * 3 / 2**30
        raise DataError(
            f"image_size={image_size}: {len(images):,} images of that size need {size:,.1f} GiB of memory. Lower it."
        ) from error
    start, silent = time.monotonic(), True
    for i, image in enumerate(images):
        with warnings.catch_warnings():  # Pillow decodes what is up to twice its limit, and only warns
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            pixels[i] = _decode_one(image.path, image_size)
        if silent and (passed := time.monotonic() - start) > SECONDS_BEFORE_NOTICE:
            silent = False
            left = passed / (i + 1) * (len(images) - i - 1)
            print(f"Decoding (about {left:.0f} s more) {len(images):,} {what}.", file=sys.stderr)
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()


def _decode_one(path: str, image_size: int) -> np.ndarray:
    """uint8 [H, W, 3]."""
    size = (image_size, image_size)
    try:
        with Image.open(path) as image:
            if image.mode[0] in "IF":  # 16 or 32 bits: Pillow would clip them to 255 without a word
                raise DataError(f"{path} has more than 8 bits a channel (mode {image.mode}). Make it 8 bits.")
            if image.size != size:
                image.draft("RGB", size)  # large JPEGs are decoded at 1/2, 1/4 or 1/8 of their size: faster
            rgb = image if image.mode == "RGB" else image.convert("RGB")
            return np.asarray(rgb if rgb.size == size else rgb.resize(size, Image.Resampling.BILINEAR))
    except DataError:
        raise
    except Exception as error:  # Pillow raises many unrelated types, depending on format and damage
        raise DataError(f"{path} can't be decoded as an image: {error}. Replace or delete it.") from error


def _cache_file(folder: Path, image_size: int) -> Path:
    """One file per folder and size, so that a changed folder replaces its old pixels."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    place = hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]
    return base / "tnvp" / f"{folder.name}-{image_size}-{place}.pt"


def _fingerprint(folder: Path, images: list[ImageFile], image_size: int) -> str:
    """Changes when a file is added, removed, renamed or rewritten, or another size is asked for."""
    lines = (
        b"%s\0%d\0%d" % (os.fsencode(image.path.removeprefix(str(folder))), image.size, image.modified)
        for image in images
    )
    return hashlib.sha256(b"%d\n" % image_size + b"\n".join(lines)).hexdigest()


def _read_cache(path: Path, fingerprint: str, shape: tuple[int, ...]) -> Tensor | None:
    """The pixels, uint8 of that shape; None if there are none for this fingerprint or they are damaged."""
    if not path.is_file():
        return None
    try:
        stored = torch.load(path, weights_only=True, map_location="cpu")
        if stored["fingerprint"] != fingerprint:
            return None
        pixels = stored["pixels"]
        # torch.load doesn't check the CRC of its own format: a flipped bit would go unnoticed.
        if tuple(pixels.shape) == shape and zlib.crc32(pixels.numpy()) == stored["checksum"]:
            return pixels
        problem = "its checksum is wrong"
    except Exception as error:  # the types torch.load raises for a damaged file are not documented
        problem = type(error).__name__
    print(f"The cache {path} is damaged ({problem}); it is made anew.", file=sys.stderr)
    return None


def _write_cache(path: Path, fingerprint: str, pixels: Tensor) -> None:
    """Writes aside and renames, so nobody reads half a file. Without a writable cache the run goes on."""
    content = {"fingerprint": fingerprint, "checksum": zlib.crc32(pixels.numpy()), "pixels": pixels}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, aside = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".part")
        os.close(handle)
        try:
            torch.save(content, aside)
            os.replace(aside, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(aside)
            raise
    except (OSError, RuntimeError) as error:  # torch.save turns a full disk into a RuntimeError
        print(f"The decoded images can't be kept in {path}: {error}.", file=sys.stderr)
