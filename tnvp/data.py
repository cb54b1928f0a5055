"""Data sets as tensors on the device; seeded batches and augmentation.

Shapes: n images of a split, B of a batch; C channels, H rows, W columns.
Images stay uint8 [n, C, H, W] (0..255) on the device; a batch becomes float32 and normalised when it is used.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Generator, Tensor
from torch.nn.functional import pad

from tnvp.image_folder import DataError, Images, read_image_folder
from tnvp.published import IDX_MD5, TORCHVISION, read_cifar, read_idx

__all__ = ["DATASETS", "Data", "DataError", "Split", "batch_sizes", "batches", "load"]
DATASETS = ("digits", *TORCHVISION, "image_folder")
DIGITS_TEST_FRACTION = 0.2  # of the 1,797 images; the same images whatever the split_seed
BLOCK_VALUES = 1 << 19  # pixel values a block of batches holds (see _stream): what fits a core's cache


@dataclass(frozen=True, eq=False)
class Split:
    """Part of a data set: images uint8 [n, C, H, W] and labels int64 [n], both on the device."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, eq=False)
class Data:
    """A data set ready for training.

    `mean` and `std`: float32 [C] on the device, of pixels scaled to 0..1. `flip` and `crop_padding`
    (pixels) are what `batches` augments by. `classes` names the labels.
    """

    name: str
    train: Split
    validation: Split
    test: Split
    classes: tuple[str, ...]
    mean: Tensor
    std: Tensor
    flip: bool
    crop_padding: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W) of one image."""
        return tuple(self.train.images.shape[1:])


def load(
    name: str,
    *,
    root: str | Path | None = None,
    download: bool = True,
    validation_fraction: float = 0.1,
    split_seed: int = 0,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    flip: bool = False,
    crop_padding: int = 0,
    folder: str | None = None,
    image_size: int | None = None,
    device: str | torch.device = "cpu",
) -> Data:
    """Reads a data set (one of DATASETS) and puts it on the device.

    The validation split is a stratified random sample, `validation_fraction` of the given training images,
    drawn with `split_seed` alone; the rest is the training split. Both come in random order: their first
    batches hold all classes even if the files are sorted by class. The test split is the given one, in its
    own order. (digits has none: a fixed stratified fifth is held out.)

    `mean` and `std` left out are those of the training split; a constant channel gets std 1. `root` is
    where the files are or are downloaded to; `folder` (relative to it) and `image_size` (pixels) are
    image_folder's.

    Raises DataError: an unknown name, a bad value, or data that are missing, damaged or can't be downloaded.
    """
    if name not in DATASETS:
        raise DataError(f"Unknown data set {name!r}. Choose one of: {', '.join(DATASETS)}.")
    if not 0 < validation_fraction < 1:
        raise DataError(f"validation_fraction is {validation_fraction}; it must lie between 0 and 1.")
    if crop_padding < 0:
        raise DataError(f"crop_padding is {crop_padding}; it must be 0 pixels or more.")
    raw = _read(name, root, download, folder, image_size)
    images, labels = raw.train
    kept, held_out = _stratified(labels, validation_fraction, split_seed)
    _check_every_class_kept(labels[kept], raw.classes, validation_fraction)
    train = images[kept]
    mean, std = _normalisation(name, train, mean, std)
    return Data(
        name=name,
        train=Split(train.to(device), labels[kept].to(device)),
        validation=Split(images[held_out].to(device), labels[held_out].to(device)),
        test=Split(raw.test[0].to(device), raw.test[1].to(device)),
        classes=raw.classes,
        mean=mean.to(device),
        std=std.to(device),
        flip=flip,
        crop_padding=crop_padding,
    )


def _read(name: str, root: str | Path | None, download: bool, folder: str | None, image_size: int | None) -> Images:
    if name == "digits":
        return _read_digits()
    if root is None:
        raise DataError(f"{name} needs a root, the folder of its files. The data set digits needs none.")
    root = Path(root).expanduser()
    if name == "image_folder":
        if folder is None or image_size is None:
            raise DataError(f"image_folder needs folder and image_size; here: {folder!r} and {image_size!r}.")
        return read_image_folder(root / folder, image_size)
    return (read_idx if name in IDX_MD5 else read_cifar)(name, root, download)


# Sources. scikit-learn and torchvision take seconds to import: only the function that uses one imports it.


def _read_digits() -> Images:
    from sklearn.datasets import load_digits

    digits = load_digits()  # pixels 0..16
    images = (torch.from_numpy(digits.images)[:, None] * (255 / 16)).round().to(torch.uint8)
    labels = torch.from_numpy(digits.target).long()
    kept, test = _stratified(labels, DIGITS_TEST_FRACTION, seed=0)
    return Images((images[kept], labels[kept]), (images[test], labels[test]), tuple("0123456789"))


# Splits and statistics.


def _stratified(labels: Tensor, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Indices, int64, of the examples kept and of those held out, each in random order.

    The examples are shuffled, sorted by class, and one in every 1/fraction is held out: the total is
    exact, and each class gives its share, rounded up or down.
    """
    n = len(labels)
    count = max(1, round(n * fraction))
    shuffled = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    by_class = shuffled[torch.sort(labels[shuffled], stable=True).indices]
    chosen = torch.zeros(n, dtype=torch.bool)
    chosen[by_class[(2 * torch.arange(count) + 1) * n // (2 * count)]] = True
    return shuffled[~chosen[shuffled]], shuffled[chosen[shuffled]]


def _check_every_class_kept(labels: Tensor, classes: tuple[str, ...], fraction: float) -> None:
    counts = torch.bincount(labels, minlength=len(classes)).tolist()
    if gone := [name for name, count in zip(classes, counts, strict=True) if count == 0]:
        raise DataError(
            f"validation_fraction={fraction} leaves no training image of {', '.join(gone)}. "
            "Lower it, or add images of this class."
        )


def _normalisation(
    name: str, images: Tensor, mean: Sequence[float] | None, std: Sequence[float] | None
) -> tuple[Tensor, Tensor]:
    """Mean and std, float32 [C]: those given, or else those of images uint8 [n, C, H, W]."""
    C = images.shape[1]
    for field, values in (("mean", mean), ("std", std)):
        if values is not None and len(values) != C:
            raise DataError(f"{field} has length {len(values)}, but an image of {name} has {C} channels.")
    if std is not None and not all(0 < value < float("inf") for value in std):
        raise DataError(f"std is {list(std)}; every value must be positive and finite.")
    if mean is None or std is None:
        own_mean, own_std = _moments(images)
        mean, std = own_mean if mean is None else mean, own_std if std is None else std
    mean, std = torch.tensor(mean, dtype=torch.float32), torch.tensor(std, dtype=torch.float32)
    if not torch.stack([1 / (255 * std), mean / std]).isfinite().all():
        raise DataError(
            f"mean {mean.tolist()} and std {std.tolist()} make pixels that are not finite: std is too small."
        )
    return mean, std


def _moments(images: Tensor) -> tuple[list[float], list[float]]:
    """Mean and std per channel of images uint8 [n, C, H, W] scaled to 0..1; std 1 for a constant channel.

    Counting how often each of the 256 values occurs gives both exactly, however many pixels there are.
    """
    counts = torch.zeros(images.shape[1], 256, dtype=torch.int64)
    for chunk in images.split(4096):
        counts += torch.stack([torch.bincount(pixels.flatten(), minlength=256) for pixels in chunk.unbind(1)])
    share = counts.double() / counts.sum(1, keepdim=True)
    values = torch.arange(256, dtype=torch.float64) / 255
    mean = share @ values
    std = (share * (values - mean[:, None]).square()).sum(1).sqrt()
    std[(counts > 0).sum(1) == 1] = 1
    return mean.tolist(), std.tolist()


# Batches.


def batch_sizes(n: int, batch_size: int, drop_last: bool = False) -> list[int]:
    """The size of each batch of an epoch over n examples; the length of the list is the number of steps.

    The last batch is short, or left out with `drop_last`. A single left-over example joins the batch
    before it, which then has batch_size + 1: BatchNorm can't train on one example, and none may be lost.
    Raises DataError if there is no batch.
    """
    if batch_size < 1:
        raise DataError(f"batch_size is {batch_size}; it must be at least 1.")
    full, rest = divmod(n, batch_size)
    sizes = [batch_size] * full
    if rest == 1 and full and not drop_last:
        sizes[-1] += 1
    elif rest and not drop_last:
        sizes.append(rest)
    if not sizes:
        raise DataError(f"{n} examples make no batch of {batch_size} (drop_last={drop_last}).")
    return sizes


def batches(
    data: Data,
    split: Split,
    batch_size: int,
    *,
    generator: Generator | None = None,
    augment: bool = False,
    drop_last: bool = False,
) -> Iterator[tuple[Tensor, Tensor]]:
    """One epoch of (x, y): x float32 [B, C, H, W], normalised, and y int64 [B], on the split's device.

    With a generator (on the CPU, whatever the device) the examples are shuffled; without one they come in
    order. `augment` flips and crops as `data` says and needs the generator. All random numbers of the
    epoch are drawn in this call, before the first batch: restore the generator's state and skip batches to
    resume within an epoch. The sizes are those of `batch_sizes`.
    """
    sizes = batch_sizes(len(split), batch_size, drop_last)
    if augment and generator is None:
        raise DataError("augment=True needs a generator: flips and crops are random.")
    n, device = sum(sizes), split.labels.device
    order = flip = offset = None
    if generator is not None:
        order = torch.randperm(len(split), generator=generator)[:n].to(device)
    if augment and data.flip:
        flip = (torch.rand(n, generator=generator) < 0.5).to(device)
    if augment and data.crop_padding:
        offset = torch.randint(2 * data.crop_padding + 1, (n, 2), generator=generator).to(device)
    return _stream(data, split, sizes, order, flip, offset)


def _stream(
    data: Data,
    split: Split,
    sizes: list[int],
    order: Tensor | None,
    flip: Tensor | None,
    offset: Tensor | None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Prepares a block of batches at once, then hands them out: at batch 4 calls cost more than work."""
    scale = (1 / (255 * data.std)).view(-1, 1, 1)
    shift = (-data.mean / data.std).view(-1, 1, 1)
    block = max(1, BLOCK_VALUES // (sizes[0] * split.images[0].numel()))  # batches
    start = 0
    for first in range(0, len(sizes), block):
        members = sizes[first : first + block]
        part = slice(start, start + sum(members))
        start = part.stop
        chosen = part if order is None else order[part]
        images = split.images[chosen]
        if flip is not None:
            images = _flipped(images, flip[part])
        if offset is not None:
            images = _cropped(images, offset[part], data.crop_padding)
        x = images.to(torch.float32).mul_(scale).add_(shift)
        yield from zip(x.split(members), split.labels[chosen].split(members), strict=True)


def _flipped(images: Tensor, flip: Tensor) -> Tensor:
    """Images [B, C, H, W], those mirrored left to right for which flip, bool [B], is true."""
    return torch.where(flip.view(-1, 1, 1, 1), images.flip(3), images)


def _cropped(images: Tensor, offset: Tensor, padding: int) -> Tensor:
    """Images [B, C, H, W] padded with 0 (black, not the mean) and cut back to H x W, each at its own offset.

    `offset`, int64 [B, 2]: row and column of the cut, 0 … 2 · padding. One gather fetches all pixels.
    """
    B, C, H, W = images.shape
    rows = offset[:, :1] + torch.arange(H, device=images.device)
    columns = offset[:, 1:] + torch.arange(W, device=images.device)
    places = rows[:, :, None] * (W + 2 * padding) + columns[:, None, :]
    padded = pad(images, (padding,) * 4).flatten(2)
    return padded.gather(2, places.view(B, 1, H * W).expand(B, C, H * W)).view(B, C, H, W)
