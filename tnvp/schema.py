"""The schema of a run: a dataclass for each choice of each config group, with ranges beside the fields.

Types, ranges and choices stand here, values in conf/; ``config`` puts the two together and checks.
"""
# ruff: noqa: RUF009 (number, one_of and text make fields, which every instance may share)

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from .models import ACTIVATIONS, LIBRARIES, ModelError, check_name
from .pruning.compensation import COMPENSATIONS
from .pruning.criteria import CRITERIA
from .pruning.evidence import COUPLINGS
from .pruning.pruner import LOOKS_AT
from .pruning.selection import NORMALIZATIONS, SCOPES
from .pruning.surgery import MODES
from .training import PRECISIONS, SCHEDULES


def number(interval: str) -> Any:
    """A field whose value, or whose every element, lies in ``interval``, such as "[0, 1)" or "[1, inf)"."""
    return field(metadata={"interval": interval})


def one_of(choices: Iterable[str]) -> Any:
    return field(metadata={"choices": tuple(choices)})


def text(pattern: str, form: str, longest: int = 255) -> Any:
    """A field whose value, or whose every element, matches all of ``pattern``; ``form`` says so in words.

    ``longest``: bytes between two slashes.
    """
    return field(metadata={"pattern": pattern, "form": form, "longest": longest})


class Checked:
    """A schema: ``config`` checks fields by their metadata, ``conflicts`` what no field knows alone."""

    def conflicts(self) -> Iterator[str]:
        """A line for each pair of values that don't fit together."""
        return iter(())


OPTIMIZER_STATES = ("carried", "reset", "fresh")
LARGEST = 4294967295  # no whole number here needs more, and torch's own limits are near
LARGEST_FLOAT = 1e18  # the product of two is still a float32
LONGEST_PATH = 1024  # Linux allows 4096 bytes, and what is made below it has long names too
LABEL = (  # the folder of a run is <name>-<hash>, at most 255 bytes; results.NOT_RUNS are looked over
    r"(?!wandb$|.*\.old-\d+$)\w[^/\\]*",
    "a name that a file could have: a letter or digit first, no slashes, not wandb, not ending in .old-1",
    200,
)
PATH = (r".+", "a path, not empty", 255)


@dataclass
class Dataset(Checked):
    """What all data sets share; digits has no more (it comes with scikit-learn)."""

    name: str
    """Which data set; set by the choice of the group."""
    validation_fraction: float = number("(0, 1)")
    """Fraction of the training images set aside for validation."""
    split_seed: int = number("[0, 4294967295]")
    """Seed of that split; apart from `seed`, so that all seeds of a study validate on the same images."""
    mean: list[float] | None = number("(-inf, inf)")
    """Taken from each pixel (0..1), one value per channel; null: the mean of the training images."""
    std: list[float] | None = number("(0, inf)")
    """What each pixel is then divided by, one value per channel; null: that of the training images."""
    flip: bool
    """Mirror half of the training images at random."""
    crop_padding: int = number("[0, 1024]")
    """Pixels of padding for random crops of the training images; 0: no crops."""

    def conflicts(self) -> Iterator[str]:
        if self.mean is not None and self.std is not None and len(self.mean) != len(self.std):
            yield f"dataset.mean={self.mean} and dataset.std={self.std} need one value per channel each"


@dataclass
class StoredDataset(Dataset):
    root: str = text(*PATH)
    """Folder that holds data sets; made if a download needs it."""


@dataclass
class TorchvisionDataset(StoredDataset):
    download: bool
    """Fetch the files if they are missing."""


@dataclass
class ImageFolder(StoredDataset):
    folder: str = text(*PATH)
    """Folder under `root` that holds train/<class>/ and test/<class>/."""
    image_size: int = number("[1, 8192]")
    """Height and width that images are brought to, in pixels."""


@dataclass
class Model(Checked):
    name: str
    """Which network; set by the choice of the group, but for torchvision's."""


@dataclass
class MLP(Model):
    widths: list[int] = number("[1, inf)")
    """Neurons of each hidden layer."""
    activation: str = one_of(ACTIVATIONS)
    """After each hidden layer."""
    batch_norm: bool
    """BatchNorm between each hidden layer and its activation."""
    dropout: float = number("[0, 1)")
    """Probability that a hidden neuron's activation is dropped in training."""

    def conflicts(self) -> Iterator[str]:
        if not self.widths:
            yield "model.widths=[] leaves nothing to prune: give at least one hidden layer"


@dataclass
class LeNet300100(Model):
    activation: str = one_of(ACTIVATIONS)
    """After each hidden layer."""


@dataclass
class VGG11(Model):
    width: float = number("(0, 1024]")
    """Multiple of the published number of channels in every layer."""


@dataclass
class ResNet20(Model):
    width: int = number("[1, 65536]")
    """Channels of the first stage; the others have 2 and 4 times as many."""


@dataclass
class ViT(Model):
    patch_size: int = number("[1, 8192]")
    """Height and width of a token's patch, in pixels; must divide the image's."""
    dim: int = number("[1, 65536]")
    """Features of a token."""
    depth: int = number("[1, 1024]")
    """Transformer blocks."""
    heads: int = number("[1, 65536]")
    """Attention heads of a block; must divide `dim`."""
    mlp_ratio: float = number("(0, 1024]")
    """Hidden neurons of a block, as a multiple of `dim`."""
    dropout: float = number("[0, 1)")
    """Probability that a feature is dropped in training, where a block adds to its tokens."""

    def conflicts(self) -> Iterator[str]:
        if self.dim % self.heads:
            yield f"model.dim={self.dim} must be a multiple of model.heads={self.heads}"


@dataclass
class TorchvisionModel(Model):
    """Here the name is the user's to choose; `library` says whose it is, since the zoo has some names too."""

    library: str = one_of(LIBRARIES)
    """Where the network comes from; set by the choice of the group."""
    pretrained: bool
    """Start from torchvision's default weights, in all layers that fit; downloads them if they are missing."""

    def conflicts(self) -> Iterator[str]:
        try:
            check_name(self.name, self.library)
        except ModelError as error:
            yield f"model.name={self.name}: {error}"


@dataclass
class Optimizer(Checked):
    name: str
    """Which optimizer; set by the choice of the group."""
    lr: float = number("(0, inf)")
    """Learning rate; the peak of it where `schedule` varies it."""
    weight_decay: float = number("[0, inf)")
    """L2 penalty (sgd, adam) or decoupled decay (adamw)."""
    schedule: str = one_of(SCHEDULES)
    """How the learning rate goes over the steps of a training phase."""


@dataclass
class SGD(Optimizer):
    momentum: float = number("[0, 1)")
    """Share of the last update kept in the next."""
    nesterov: bool
    """Look ahead along the momentum."""

    def conflicts(self) -> Iterator[str]:
        if self.nesterov and self.momentum == 0:
            yield "optimizer.nesterov=true needs optimizer.momentum above 0, got 0"


@dataclass
class Adam(Optimizer):
    """adam and adamw."""

    beta1: float = number("[0, 1)")
    """Decay of the running mean of gradients, per step."""
    beta2: float = number("[0, 1)")
    """Decay of the running mean of squared gradients, per step."""


@dataclass
class Pruning(Checked):
    name: str
    """When to prune; set by the choice of the group."""
    trace_every: int = number("[1, inf)")
    """Steps in one recording window of the trace."""

    def trunk(self) -> dict:
        """What shapes the run up to its first prune event."""
        raise NotImplementedError


@dataclass
class NoPruning(Pruning):
    epochs: int = number("[1, inf)")
    """Training epochs."""

    def trunk(self) -> dict:
        return {"epochs": self.epochs}


@dataclass
class Scratch(Pruning):
    """The control: a network of the widths that one_shot ends with, trained from random weights for as many steps."""

    sparsity: float = number("[0, 1)")
    """Fraction of each layer's prunable neurons that the network never has."""
    dense_epochs: int = number("[1, inf)")
    """Epochs of one_shot before its event; here there is one phase, as long as both together."""
    finetune_epochs: int = number("[0, inf)")
    """Epochs of one_shot after its event."""
    min_neurons: int = number("[1, inf)")
    """Neurons that every layer has at least."""
    round_to: int = number("[1, inf)")
    """Widths are multiples of this; 1: any width."""
    approximate: bool
    """Narrow the layers behind layer norms too."""
    ignore: list[str] = text(r".+", "a layer's name, not empty")
    """Layers that keep their width, by their names in the network."""

    def trunk(self) -> dict:
        return asdict(self)


@dataclass
class ActivePruning(Pruning):
    """What all kinds that prune share."""

    criterion: str = one_of(CRITERIA)
    """Score per neuron; the lowest go."""
    coupled: str = one_of(COUPLINGS)
    """How the scores of several layers that write or read the same neurons are combined."""
    compensation: str = one_of(COMPENSATIONS)
    """What the readers of removed neurons take over."""
    scope: str = one_of(SCOPES)
    """Rank neurons within each layer or over all layers."""
    normalize: str = one_of(NORMALIZATIONS)
    """What each layer's scores are divided by before they compete over all layers: their own mean, maximum or norm."""
    min_neurons: int = number("[1, inf)")
    """Neurons that every layer keeps at least."""
    round_to: int = number("[1, inf)")
    """Widths are kept at multiples of this; 1: any width."""
    window: str = one_of(LOOKS_AT)
    """What scores look at: all steps since the start, those since the last event, their exponential average, or, instead of
    training, the calibration pass at the event."""
    calibration_batches: int = number("[1, inf)")
    """Training batches of the pass in eval mode that means for the compensation are measured on."""
    bn_recalibrate: int = number("[0, inf)")
    """Training batches on which running statistics of batch norms, if there are any, are measured anew after an event; 0: kept."""
    mode: str = one_of(MODES)
    """rebuild shrinks layers at the event; mask makes removed rows zero until the end of the run."""
    approximate: bool
    """Prune behind layer norms too, where the pruned network differs from the masked one."""
    ignore: list[str] = text(r".+", "a layer's name, not empty")
    """Layers that are left alone, by their names in the network."""

    def conflicts(self) -> Iterator[str]:
        for name in sorted({name for name in self.ignore if self.ignore.count(name) > 1}):
            yield f"pruning.ignore={self.ignore} names {name!r} more than once"
        if self.criterion == "taylor" and self.window == "calibration":
            yield "pruning.criterion=taylor needs gradients, and pruning.window=calibration has none: choose another of either"


@dataclass
class OneShot(ActivePruning):
    """Train, prune once, fine-tune."""

    sparsity: float = number("[0, 1)")
    """Fraction of the prunable neurons to remove."""
    dense_epochs: int = number("[1, inf)")
    """Epochs before the prune event."""
    finetune_epochs: int = number("[0, inf)")
    """Epochs after it."""
    finetune_lr_factor: float = number("(0, inf)")
    """Learning rate of these, as a multiple of `optimizer.lr`."""
    optimizer_state: str = one_of(OPTIMIZER_STATES)
    """The optimizer's state after the event: carried over and cut like the weights; reset, the same optimizer without any;
    fresh, a new optimizer with a warm-up."""
    warmup_steps: int = number("[1, inf)")
    """Steps of that warm-up, over which the learning rate rises linearly from 0 to what the schedule says."""

    def trunk(self) -> dict:
        return {"dense_epochs": self.dense_epochs}


@dataclass
class PruningWhileTraining(ActivePruning):
    """What the kinds share that prune in the course of one training phase."""

    epochs: int = number("[1, inf)")
    """Training epochs in all."""
    every: int = number("[1, inf)")
    """Steps between events."""

    def first_event(self) -> int:
        """Its step; the first step of a run is 1."""
        raise NotImplementedError

    def reaches(self) -> tuple[int, str]:
        """The step that a run must not end before, and the words for it in a message."""
        raise NotImplementedError

    def trunk(self) -> dict:
        return {"epochs": self.epochs, "first_event": self.first_event()}


@dataclass
class Gradual(PruningWhileTraining):
    """Prune while training, fast at first, then ever slower (cubic)."""

    sparsity: float = number("[0, 1)")
    """Fraction of the prunable neurons removed in the end."""
    start_step: int = number("[0, inf)")
    """Step from which the target rises from 0; the first event is `every` steps later."""
    end_step: int = number("[1, inf)")
    """Step of the last event."""

    def conflicts(self) -> Iterator[str]:
        yield from super().conflicts()
        if self.start_step >= self.end_step:
            yield f"pruning.start_step={self.start_step} must be below pruning.end_step={self.end_step}"

    def first_event(self) -> int:
        return min(self.start_step + self.every, self.end_step)

    def reaches(self) -> tuple[int, str]:
        return self.end_step, f"pruning.end_step={self.end_step}"


@dataclass
class Iterative(PruningWhileTraining):
    """Prune while training, by the same share of the neurons at each event."""

    sparsity: float = number("[0, 1)")
    """Fraction of the prunable neurons removed in the end."""
    start_step: int = number("[1, inf)")
    """Step of the first event."""
    events: int = number("[1, inf)")
    """How many there are; each removes `sparsity / events` of the neurons that there were at first."""

    def first_event(self) -> int:
        return self.start_step

    def reaches(self) -> tuple[int, str]:
        last = self.start_step + (self.events - 1) * self.every
        values = f"pruning.start_step={self.start_step}, pruning.events={self.events}, pruning.every={self.every}"
        return last, f"{values}: the last event, at step {last},"


@dataclass
class Threshold(PruningWhileTraining):
    """The demo's rule: every so often, remove the neurons that hardly vary."""

    threshold: float = number("(0, inf)")
    """Neurons go whose standard deviation is under this multiple of their layer's mean one."""

    def first_event(self) -> int:
        return self.every

    def reaches(self) -> tuple[int, str]:
        return self.every, f"pruning.every={self.every}"


@dataclass
class Tracking(Checked):
    name: str
    """Where the copy of the run's records goes; set by the choice of the group."""


@dataclass
class WandbTracking(Tracking):
    mode: str = one_of(("offline", "online", "disabled"))
    """offline needs neither login nor network."""
    project: str = text(*LABEL)
    """W&B project."""
    entity: str | None = text(*LABEL)
    """W&B user or team; null: the one logged in."""
    tags: list[str] = text(r".+", "a tag, not empty")
    """W&B tags."""


@dataclass
class Config(Checked):
    dataset: Dataset
    model: Model
    optimizer: Optimizer
    pruning: Pruning
    tracking: Tracking
    study: str = text(*LABEL)
    """The question this run belongs to; groups runs in tables and in W&B."""
    name: str | None = text(*LABEL)
    """Label of the run; null: made from data set, model and pruning."""
    seed: int = number("[0, 4294967295]")
    """Seed of initial weights, batches, augmentation and random scores."""
    device: str = text(r"auto|cpu|mps|cuda(:\d+)?", "auto, cpu, mps, cuda or cuda:N")
    """Where to compute; auto: the best there is."""
    batch_size: int = number("[1, inf)")
    """Images per training step."""
    precision: str = one_of(PRECISIONS)
    """Type that autocast computes in; parameters stay float32."""
    compile: bool
    """Run the network through torch.compile, anew after each prune event."""
    threads: int = number("[0, 1024]")
    """CPU threads of torch; 0: its own choice. The order of sums depends on it, so results may too."""
    runs: str = text(*PATH)
    """Folder that run directories are made in."""
    trunks: str | None = text(*PATH)
    """Folder of trained trunks, for runs that share one; null: each run trains its own. The results are the same."""
    checkpoint_steps: int | None = number("[1, inf)")
    """Training steps between checkpoints, from which a killed run goes on; null: none of this kind. One at the end of every epoch
    there is in any case."""
    checkpoint_minutes: float | None = number("(0, inf)")
    """Minutes between checkpoints, the same way."""
    force: bool
    """Run again though a complete run of this configuration is there."""
    progress: bool
    """Show progress on the terminal."""


@dataclass
class Composition(Config):
    """What Hydra composes: a Config, and a shorthand that conf/pruning refers to and ``resolve`` drops."""

    epochs: int
    """Training epochs (of one_shot: those before its event), under one name for every choice of pruning."""


SCHEMAS: dict[str, dict[str, type]] = {  # group → choice → schema; conf/<group>/<choice>.yaml has the values
    "dataset": {
        "digits": Dataset,
        "mnist": TorchvisionDataset,
        "fashion_mnist": TorchvisionDataset,
        "cifar10": TorchvisionDataset,
        "cifar100": TorchvisionDataset,
        "image_folder": ImageFolder,
    },
    "model": {
        "mlp": MLP,
        "lenet_300_100": LeNet300100,
        "lenet_5": Model,
        "tutorial_cnn": Model,
        "vgg11_bn": VGG11,
        "resnet20": ResNet20,
        "vit_tiny": ViT,
        "torchvision": TorchvisionModel,
    },
    "optimizer": {"sgd": SGD, "adam": Adam, "adamw": Adam},
    "pruning": {
        "none": NoPruning,
        "one_shot": OneShot,
        "gradual": Gradual,
        "iterative": Iterative,
        "threshold": Threshold,
        "scratch": Scratch,
    },
    "tracking": {"none": Tracking, "wandb": WandbTracking},
}
